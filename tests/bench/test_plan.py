"""Plans of what to convert, and the judges that make them."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig
from float8.convert.filters import SMALLEST
from float8.convert.measure import LinearTimes
from float8_lab.bench import plan
from float8_lab.bench.plan import Verdict, by_measuring, by_size, plan_conversion

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


def test_layers_are_grouped_by_shape_and_fate() -> None:
    judge = by_size(8192, "H100")
    rows = plan_conversion(model(), 8192, judge, head="head")
    found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
    assert found == [
        ("a b", 2, 8192, 4096, "convert"),
        ("small", 1, 8192, 64, "leave: K=64 is less than 640"),
        ("head", 1, 8192, 4096, "leave: output head"),
    ]


def test_the_model_is_not_changed() -> None:
    planned = model()
    plan_conversion(planned, 16, lambda in_features, out_features: Verdict(None), head="head")
    assert all(type(layer) is nn.Linear for layer in planned.children())


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
    slower = by_size(tokens, "H100")(K, N).slower
    assert slower is not None
    assert re.fullmatch(f"{compared}: float8 is slower there on H100", slower)


@pytest.mark.parametrize("gpu", SMALLEST)
def test_layers_that_were_measured_to_gain_are_large_enough(gpu: str) -> None:
    rows = json.loads((RESULTS / "h100-linear-eager.json").read_text())["rows"]
    gaining = [row for row in rows if row["K"] is not None and row["speedup"] > 1]
    assert len(gaining) == 24
    for row in gaining:
        assert by_size(row["M"], gpu)(row["K"], row["N"]).slower is None


def test_faster_memory_makes_smaller_layers_gain() -> None:
    shapes = [
        (tokens, K, N) for tokens in (512, 1024, 4096) for K in (512, 2048) for N in (512, 8192)
    ]
    gains = {
        gpu: {(M, K, N) for M, K, N in shapes if by_size(M, gpu)(K, N).slower is None}
        for gpu in SMALLEST
    }
    assert gains["H100"] < gains["H200"]


def test_measuring_leaves_random_numbers_alone() -> None:
    measured = by_measuring(32, Float8LinearConfig(), torch.device("cpu"))
    state = torch.get_rng_state()
    verdict = measured(64, 32)
    assert torch.equal(state, torch.get_rng_state())
    assert verdict.bf16_ms > 0
    assert verdict.float8_ms > 0


@pytest.mark.parametrize(("float8_ms", "slower"), [(0.5, None), (1.0, None), (1.1, "slower")])
def test_a_measured_layer_says_whether_it_is_slower(
    float8_ms: float, slower: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure_linear", lambda *_: LinearTimes(1.0, float8_ms))
    verdict = by_measuring(100, Float8LinearConfig(), torch.device("cpu"))(64, 32)
    assert verdict == (slower, 1.0, float8_ms)


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    judge = by_measuring(8192, Float8LinearConfig(), torch.device("cuda", 0))
    assert judge(4096, 4096).slower is None
