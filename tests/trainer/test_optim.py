from __future__ import annotations

from collections.abc import Callable

import pytest

from float8_lab.trainer.build import build_optimizer, learning_rate
from float8_lab.trainer.config import TrainConfig
from support.llama import build_llama


def test_schedule_warms_up_then_follows_half_a_cosine(
    make_config: Callable[..., TrainConfig],
) -> None:
    config = make_config(learning_rate=1.0, min_lr_ratio=0.2, warmup_steps=10, steps=110)
    assert learning_rate(1, config) == pytest.approx(0.1)
    assert learning_rate(5, config) == pytest.approx(0.5)
    assert learning_rate(10, config) == pytest.approx(1.0)
    assert learning_rate(60, config) == pytest.approx(0.6)  # Half-way between 1.0 and 0.2.
    assert learning_rate(35, config) == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)
    assert learning_rate(110, config) == pytest.approx(0.2)
    falling = [learning_rate(step, config) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (5, 5), (9, 5)])
def test_schedule_at_its_edges(
    make_config: Callable[..., TrainConfig], warmup: int, steps: int
) -> None:
    config = make_config(learning_rate=1.0, min_lr_ratio=0.0, warmup_steps=warmup, steps=steps)
    rates = [learning_rate(step, config) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[-1] == pytest.approx(steps / warmup if warmup else 0.0)


def test_only_matrices_decay(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(weight_decay=0.3, beta1=0.8, beta2=0.9)
    model = build_llama(config.model_config(), 16, seed=0)
    decayed, kept = build_optimizer(model, config).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == (0.8, 0.9)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
