"""Plans of what to convert, and the judges that make them."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig, Float8LinearRecipeName
from float8.convert import smallest
from float8.convert.measure import LinearTimes, measure_linear
from float8.convert.smallest import SMALLEST, Smallest, too_small
from float8_lab.cli.plan import plan_conversion

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "a": nn.Linear(4096, 4096),
                "b": nn.Linear(4096, 4096),
                "small": nn.Linear(64, 64),
                "head": nn.Linear(4096, 4096),
            }
        )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"tensorwise": Smallest(1024, 640, 32e9)}
    monkeypatch.setattr(smallest, "SMALLEST", {"H100": limits})


@pytest.mark.usefixtures("limits")
def test_layers_are_grouped_by_shape_and_fate() -> None:
    judge = lambda K, N: too_small("H100", "tensorwise", 8192, K, N)  # noqa: E731
    rows = plan_conversion(model(), 8192, judge, head="head")
    found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
    assert found == [
        ("a b", 2, 8192, 4096, "convert"),
        ("small", 1, 8192, 64, "leave: K=64 is less than 640"),
        ("head", 1, 8192, 4096, "leave: output head"),
    ]


def test_the_model_is_not_changed() -> None:
    planned = model()
    plan_conversion(planned, 16, lambda K, N: None, head="head")
    assert all(type(layer) is nn.Linear for layer in planned.children())


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("tokens", "K", "N", "compared"),
    [
        (16, 4096, 4096, "tokens=16 is less than 1024"),
        (8192, 512, 8192, "K=512 is less than 640"),
        (8192, 8192, 512, "N=512 is less than 640"),
        (4096, 1024, 1024, r"tokens\*K\*N=4.295e\+09 is less than 3.2e\+10"),
    ],
)
def test_a_size_that_is_too_small_is_named(tokens: int, K: int, N: int, compared: str) -> None:
    slower = too_small("H100", "tensorwise", tokens, K, N)
    assert slower is not None
    assert re.fullmatch(f"{compared}: tensorwise is slower there on H100", slower)


@pytest.mark.parametrize("gpu", SMALLEST)
def test_layers_that_were_measured_to_gain_are_large_enough(gpu: str) -> None:
    rows = json.loads((RESULTS / "h100-linear-eager.json").read_text())["rows"]
    gaining = [row for row in rows if row["K"] is not None and row["speedup"] > 1]
    assert len(gaining) == 24
    for row in gaining:
        assert too_small(gpu, row["recipe"], row["M"], row["K"], row["N"]) is None


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
def test_faster_memory_makes_smaller_layers_gain(recipe: str) -> None:
    slow, fast = (SMALLEST[gpu][recipe] for gpu in ("H100", "H200"))
    assert all(a >= b for a, b in zip(slow, fast, strict=True))


def test_measuring_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    times = measure_linear(32, 64, 32, torch.device("cpu"), Float8LinearConfig())
    assert torch.equal(state, torch.get_rng_state())
    assert min(times) > 0


@pytest.mark.parametrize(
    ("float8_ms", "fate"), [(0.5, "convert"), (1.0, "convert"), (1.1, "leave: slower")]
)
def test_a_measured_layer_says_whether_it_is_slower(float8_ms: float, fate: str) -> None:
    rows = plan_conversion(model(), 100, lambda K, N: LinearTimes(1.0, float8_ms), head="head")
    assert (rows[0]["fate"], rows[0]["bf16_ms"], rows[0]["float8_ms"]) == (fate, 1.0, float8_ms)
    assert rows[0]["speedup"] == 1 / float8_ms
    assert rows[-1]["fate"].startswith("leave")


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    times = measure_linear(8192, 4096, 4096, torch.device("cuda", 0), Float8LinearConfig())
    assert times.float8_ms < times.bf16_ms
