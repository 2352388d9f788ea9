"""What all tests share: GPU tests are left out where there is no GPU, one random seed, and
ranks that serve all tests of a session (mark them `xdist_group("ranks")`)."""

import functools
import gc
import os
from collections.abc import Iterator

import pytest

from support.ranks import SELDOM, Ranks


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        return  # xdist's workers run the tests: this process need not import torch
    import torch

    # Small tensors lose by being shared among threads, and sums depend on their number.
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        gc.set_threshold(*SELDOM)
        # No server each that compiles for a CPU.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@functools.cache
def has_gpu() -> bool:
    """Whether there is one with float8 tensor cores: else tests marked `gpu` are deselected."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if only_gpus and not has_gpu() and not config.option.collectonly:
        config.hook.pytest_deselected(items=only_gpus)
        items[:] = [item for item in items if item not in set(only_gpus)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new() -> None:
    """Each run of the trainer collects garbage: of what was there before this file it need not."""
    if not has_gpu():
        gc.freeze()


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Several workers share a GPU: none keeps what its largest test took."""
    yield
    if not has_gpu():
        return
    import torch

    if torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _convert_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are for no GPU, so that tiny ones are converted on GPUs, too.

    What runs in another process passes `module_filter_fn=all_linears` instead.
    """
    from float8.convert import choice

    monkeypatch.setattr(choice, "gpu_for", lambda device: None)


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
