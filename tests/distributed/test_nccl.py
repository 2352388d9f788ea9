"""What only GPUs can show: compiled training through NCCL, memory, and ranks that die."""

import gc
import os
import resource
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

import tolerances
from float8 import (
    activations_in_float8,
    attach_to_optimizer,
    precompute_float8_dynamic_scale_for_fsdp,
)
from float8.tensor import local_tensor
from float8_lab.bench.model import Size
from float8_lab.bench.ranks import ParallelStep, TrainStep
from float8_lab.bench.step import Results, bench_steps
from float8_lab.bench.variants import make_variants
from sqnr import sqnr
from support.configs import RECIPES
from support.models import LlamaBlock
from support.outcome import assert_same, train
from support.ranks import Ranks, on
from support.sharded import DIM, batch, convert, here, model_of, shard
from support.spies import Traffic, saved_tensors

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
COLLECTIVE_TIMEOUT = 60.0


def build(kind: str, dtype: torch.dtype) -> nn.Module:
    if kind == "feed-forward":
        return model_of(dtype=dtype)
    torch.manual_seed(0)
    heads = {"heads": 2, "kv": 1, "head_dim": DIM // 2}
    return nn.Sequential(*(LlamaBlock(DIM, 40, **heads) for _ in "ab")).to(here(), dtype)


def one_sequence(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[None])[0]


def gathered(
    kind: str, recipe: str, dtype: torch.dtype, gather: bool, wrap: Any
) -> dict[str, Tensor]:
    """Ten compiled steps with float8 all-gather, or with a cast after the gather."""
    torch._dynamo.reset()
    model = convert(build(kind, dtype), recipe, gather)
    for block in model:
        block.compile(fullgraph=True)
    # The backward of cuDNN's attention is not reproducible.
    with sdpa_kernel(SDPBackend.MATH), Traffic() as seen:
        found = train(wrap(model), 10, dtype=dtype, forward=one_sequence)
    assert (torch.uint8 in seen.gather_dtypes) == gather
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("kind", "dtype", "param_dtype"),
    [("llama", BF16, None), ("feed-forward", F32, BF16)],
    ids=["llama-bf16", "feed-forward-fp32-masters"],
)
@on("two_gpus")
def test_a_float8_gather_has_the_bits_of_a_cast_after_the_gather(
    recipe: str, kind: str, dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    wrap = partial(shard, param_dtype=param_dtype)
    one, other = (gathered(kind, recipe, dtype, how, wrap) for how in (False, True))
    assert_same(other, one)
    assert all(x.isfinite().all() for name, x in one.items() if name.startswith("loss"))


@pytest.mark.parametrize("recipe", RECIPES)
@on("two_gpus")
def test_fsdp2_moves_what_was_converted_on_a_cpu(recipe: str) -> None:
    runs = [train(shard(convert(model_of(device=device), recipe)), 3) for device in ("cpu", here())]
    assert_same(*runs)


@on("two_gpus")
def test_activations_in_float8_change_gradients_little_under_fsdp2() -> None:
    runs, kept = [], []
    for options in (None, activations_in_float8(min_mib=0)):
        torch._dynamo.reset()
        model = shard(convert(build("llama", BF16), "tensorwise", True))
        for block in model:
            block.compile(fullgraph=True, options=options)
        with saved_tensors() as saved:
            runs.append(train(model, 2, dtype=BF16, forward=one_sequence))
        kept.append(sum(x.nbytes for x in saved))
    for name in (name for name in runs[0] if name.startswith(("loss 0", "grad 0"))):
        assert sqnr(runs[0][name], runs[1][name]) > 18, name
    assert kept[1] < kept[0]


def losses(way: str, compare: bool = False) -> list[float]:
    """Losses of seven steps, of which the last four are in eager mode or replays of a CUDA graph.

    Before the last two the weights are scaled. `compare`: each of the four with an eager forward.
    """
    model = shard(convert(model_of(hidden=64), "tensorwise"), param_dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    if way != "cast first":
        attach_to_optimizer(model, optimizer)
    side, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), batch(0, dist.get_rank())

    def step() -> Tensor:
        optimizer.zero_grad()
        if way == "cast first":
            precompute_float8_dynamic_scale_for_fsdp(model)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        found = [step().item() for _ in range(3)]
    if way != "eager":
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            output = step()
    for factor in (1.0, 1.0, 1.1, 1.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
            eager = model(x).float().square().mean().item() if compare else None
        if way == "eager":
            output = step()
        else:
            graph.replay()
        found.append(output.item())
        assert not compare or found[-1] == pytest.approx(eager, rel=1e-3)
    return found


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("way", ["cast first", "attached"])
@on("two_gpus")
def test_replays_of_a_whole_step_gather_the_weights_of_now(way: str, compare: bool) -> None:
    assert losses(way, compare) == pytest.approx(losses("eager"), rel=1e-3)


def peaks(recipes: tuple[str, ...], mode: str) -> dict[str, float]:
    """GiB that training steps of four blocks need, by variant: parameters, optimizer and all."""
    torch._dynamo.reset()
    gc.collect()  # nothing of earlier tests shall be freed while it counts
    how = {"size": Size("1b", blocks=4, seq_len=2048, batch=4), "device": here()}
    make = partial(TrainStep, lora=False, microbatches=1, **how)
    variants = make_variants(recipes, (mode,), sharded=True)
    *_, rows = bench_steps(make, variants, here(), 2)
    return {row["recipe"]: row["peak_gib"] for row in rows}


# Inductor plans memory alike for both recipes; one is compiled.
@pytest.mark.parametrize(
    ("recipes", "mode"), [(("tensorwise", "delayed"), "eager"), (("tensorwise",), "compiled")]
)
def test_float8_needs_no_more_memory_than_bf16(
    two_gpus: Ranks, recipes: tuple[str, ...], mode: str
) -> None:
    for found in two_gpus.run(peaks, recipes, mode):
        bf16 = found.pop("bf16")
        assert found.keys() == set(recipes)
        for recipe, peak in found.items():
            assert 0.5 < peak <= bf16, (recipe, peak, bf16)


def pipelined(recipe: str) -> tuple[Results, Results, dict[str, int]]:
    """This rank's part of the results of a tensor-parallel step without and with pipelining.

    And the ops of the latter.
    """
    *_, variant = make_variants([recipe], ["compiled"])
    size, found = Size("150m", blocks=1, seq_len=1024), []
    for micro_pipeline in (False, True):
        torch._dynamo.reset()
        with inductor.patch(_micro_pipeline_tp=micro_pipeline):
            step = ParallelStep(variant, size, here())
            if micro_pipeline:
                symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
            step.warm_up()  # finds the scales of delayed scaling
            found.append({name: local_tensor(x).cpu() for name, x in step().items()})
            with profile() as profiled:
                step()
    ops = {event.key: event.count for event in profiled.key_averages()}
    return found[0], found[1], ops


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_asynchronous_tensor_parallel(two_gpus: Ranks, recipe: str) -> None:
    """Inductor pipelines gathers in float8 with the GEMM that reads them, GEMMs with sums."""
    if torch.cuda.device_count() < 2:  # with FLOAT8_TESTS_SHARE_GPUS
        pytest.skip("symmetric memory needs a GPU for each rank")
    for plain, got, ops in two_gpus.run(pipelined, recipe):
        # Of `out` and `down`: in backward the gather of a gradient, in forward the sum. With one
        # sequence torch does not recognise the gathers of forward.
        assert ops["symm_mem::fused_all_gather_scaled_matmul"] == 2
        assert ops["symm_mem::fused_scaled_matmul_reduce_scatter"] == 2
        for name, expected in plain.items():  # partial sums are rounded, as in other code
            assert sqnr(expected, got[name]) > tolerances.COMPILED, name


def die_in_training() -> None:
    """Rank 1 does, before its second step, while rank 0 goes on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # NCCL's watchdog aborts
    model = shard(convert(model_of(), "tensorwise"))
    train(model, 1)
    if dist.get_rank() == 1:
        os._exit(1)
    train(model, 1)
    if here().type == "cuda":
        torch.cuda.synchronize()


def test_no_rank_hangs_when_another_one_dies(two_gpus: Ranks) -> None:
    ranks = Ranks(2, "cuda", COLLECTIVE_TIMEOUT)  # not those that serve other tests
    mine, other = ranks.endings(die_in_training)
    assert other == "died"
    assert mine != "returned"  # an error, or the watchdog ended the process
