from __future__ import annotations

from collections.abc import Callable

import pytest

from float8_lab.trainer.build import learning_rate
from float8_lab.trainer.config import TrainConfig


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
