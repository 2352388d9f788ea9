"""Times are fair: interleaved, medians, per call; which shapes are timed, and where."""

import time

import pytest
import torch

from float8_lab.bench.shapes import SHAPE_SETS, parse_shape, select_shapes
from float8_lab.bench.timing import (
    call_sampler,
    input_sets,
    kernel_sampler,
    steady_sampler,
    take_turns,
)
from float8_lab.device import float8_device
from support.clock import stopped_clock

CPU = torch.device("cpu")


def test_rounds_are_interleaved_and_the_first_ones_do_not_count() -> None:
    order: list[str] = []

    def sampler(name: str, times: list[float]):
        def sample() -> float:
            order.append(name)
            return times.pop(0)

        return sample

    slow_start = [99.0] * 3
    medians = take_turns(
        {"a": sampler("a", [*slow_start, 1, 7, 2]), "b": sampler("b", [*slow_start, 4, 4, 50])}, 3
    )
    assert medians == {"a": 2, "b": 4}
    assert order == ["a", "b"] * 6


@pytest.mark.gpu
def test_a_gpu_is_timed_without_the_time_to_issue() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(64, 64, device=device)

    def issue_slowly() -> torch.Tensor:
        time.sleep(0.002)
        return x @ x

    assert kernel_sampler([issue_slowly] * 4, device)() < 0.5
    assert call_sampler([issue_slowly] * 4, device)() > 1.0


def test_short_calls_are_repeated_and_long_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sleep = 0, stopped_clock(monkeypatch)

    def short() -> None:
        nonlocal calls
        calls += 1
        sleep(0.001)

    sample = steady_sampler(short, CPU, at_least_ms=5)
    calls = 0
    sample()
    assert calls == 5
    sample = steady_sampler(short, CPU, at_least_ms=0.1)
    calls = 0
    sample()
    assert calls == 1


def test_sets_and_given_shapes_add_up() -> None:
    selected = select_shapes(["llama3-8b"], ["64, 32,16"])
    assert selected["given"] == ((64, 32, 16),)
    assert selected["llama3-8b"][2] == (8192, 4096, 28672)
    every = [str(shape) for members in SHAPE_SETS.values() for shape in members]
    assert list(map(str, map(parse_shape, every))) == every
    for text in ("", "64,64,64,64", "a,64,64", "0,64,64", "8,8,8"):
        with pytest.raises(ValueError, match="expected M,K,N"):
            parse_shape(text)


@pytest.mark.gpu
def test_input_sets_outgrow_the_cache() -> None:
    device = float8_device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert input_sets(1 << 24, device) * (1 << 24) >= 4 * cache
    assert input_sets(1 << 40, device) == 2
    with pytest.raises(ValueError, match="'cuda:99' is not there: PyTorch sees"):
        float8_device("cuda:99")
