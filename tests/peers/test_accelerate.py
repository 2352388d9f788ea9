"""Accelerate prepares a model before or after its conversion, loads it, and hooks its layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from float8 import (
    Float8Tensor,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits
from support.configs import of_recipe
from support.lazily import Lazily
from support.libraries import AdamW, by_accelerate, converted, feed_forwards
from support.models import seeded
from support.ranks import Ranks

accelerate, safetensors = Lazily("accelerate"), Lazily("safetensors.torch")
recipes = pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])


def test_the_order_of_prepare_and_conversion_changes_no_bit_in_bf16(tmp_path: Path) -> None:
    orders = ("convert first", "prepare first")
    first, second = (
        by_accelerate(feed_forwards(), tmp_path / x, False, x, "bf16").state_dict() for x in orders
    )
    assert first.keys() == second.keys()
    assert all(same_bits(x, second[name]) for name, x in first.items())
    saved = safetensors.load_file(tmp_path / orders[0] / "model.safetensors")
    assert saved.keys() == first.keys()


@recipes
def test_a_model_converted_on_the_meta_device_loads_a_plain_checkpoint(
    recipe: str, tmp_path: Path
) -> None:
    plain, path = feed_forwards(), str(tmp_path / "model.safetensors")
    safetensors.save_file(plain.state_dict(), path, {"format": "pt"})
    with accelerate.init_empty_weights():
        empty = converted(feed_forwards(), recipe)
    loaded = accelerate.load_checkpoint_and_dispatch(empty, path, device_map={"": "cpu"})
    x = torch.randn(32, 32)
    for each in (converted(plain, recipe), loaded):
        each(x).square().mean().backward()
        sync(each)
        each(x).square().mean().backward()
    state = plain.state_dict()
    assert all(same_bits(y, state[name]) for name, y in loaded.state_dict().items())
    for p, q in zip(plain.parameters(), loaded.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


@recipes
def test_hooks_of_accelerate(recipe: str, tmp_path: Path) -> None:
    """Which hold the forwards of layers, as those of a `device_map` over several devices do."""

    def model() -> nn.Module:
        return feed_forwards().eval()

    hooked = accelerate.dispatch_model(model(), {"": "cpu"}, force_hooks=True)
    with pytest.warns(UserWarning, match="convert before accelerate"):
        converted(hooked, recipe)
    accelerate.hooks.remove_hook_from_submodules(hooked)
    offloaded, alone = converted(model(), recipe), converted(model(), recipe)
    accelerate.disk_offload(offloaded, tmp_path, torch.device("cpu"))
    x = torch.randn(32, 32)
    assert torch.equal(offloaded(x), alone(x))
    assert torch.equal(converted(hooked, recipe)(x), alone(x))
    with pytest.raises(ValueError, match=r"layer '0\.w1': got a layer with a `forward` of its own"):
        convert_to_high_precision(offloaded)
    assert torch.equal(offloaded(x), alone(x))
    accelerate.hooks.remove_hook_from_submodules(offloaded)
    assert torch.equal(convert_to_high_precision(offloaded)(x), model()(x))


def losses_under_fsdp2(gather: bool, efficient: bool) -> list[float]:
    """Of three steps; the optimizer is made before the model is sharded, as by the `Trainer`."""
    state = accelerate.state.AcceleratorState
    state._reset_state(reset_partial_state=True)
    utils, accelerator = accelerate.utils, accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = utils.DistributedType.FSDP  # which it refuses on CPUs
    accelerator.state.fsdp_plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["FeedForward"],
        cpu_ram_efficient_loading=efficient,
    )
    model, losses = feed_forwards(), []
    config = of_recipe("tensorwise", enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    assert isinstance(model[0], FSDPModule)
    kinds = {type(p._local_tensor).__name__ for p in model.parameters()}
    assert ("Float8GatherWeight" in kinds) == gather
    attach_to_optimizer(model, optimizer)
    for seed in range(3):
        x = seeded(seed, 16, 32)
        losses.append(loss := (model(x) - x).square().mean())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state._reset_state(reset_partial_state=True)
    return [loss.item() for loss in losses]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("efficient", [False, True])
def test_an_optimizer_finds_the_weights_that_are_gathered_in_float8(
    two: Ranks, efficient: bool
) -> None:
    """accelerate puts sharded weights into an optimizer that was made before, by `data_ptr`."""
    wanted, _ = two.run(losses_under_fsdp2, False, efficient)
    assert wanted[2] < wanted[0]
    assert two.run(losses_under_fsdp2, True, efficient) == [wanted, wanted]


ONLY = ["tensorwise", "rowwise", "blockwise", "mxfp8"]


def only(recipe: str) -> nn.Module:
    """With weights in float8 only, of which two layers share one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    config = of_recipe(recipe, float8_weights=Float8Weights.ONLY)
    convert_to_float8_training(model, config=config, module_filter_fn=all_linears)
    model[3].weight = model[1].weight
    return model


def offloaded_parts(model: nn.Module) -> nn.Module:
    """As `dispatch_model` from a GPU does with layers on the CPU: ties are told by addresses."""
    big = accelerate.big_modeling
    state, tied = dict(model.state_dict()), big.find_tied_parameters(model)
    pointers = {model.get_parameter(name).data_ptr(): {} for group in tied for name in group}
    assert len(pointers) == 1
    names = ["", *(name for name, _ in model.named_children())]
    big.attach_align_device_hook_on_blocks(
        model,
        execution_device=dict.fromkeys(names, "cpu"),
        offload={name: name != "2" for name in names[1:]},
        weights_map=accelerate.utils.OffloadedWeightsLoader(state_dict=state),
        tied_params_map=pointers,
    )
    return model


@pytest.mark.parametrize(
    "dispatch",
    [
        lambda model: accelerate.cpu_offload(model, torch.device("cpu")),
        lambda model: accelerate.cpu_offload_with_hook(model, "cpu")[0],
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
        offloaded_parts,
    ],
    ids=["cpu_offload", "cpu_offload_with_hook", "dispatch_model", "parts"],
)
def test_weights_in_float8_only_are_offloaded(dispatch: Callable) -> None:
    for recipe in ONLY:
        x = torch.randn(8, 64)
        wanted, model = only(recipe)(x), dispatch(only(recipe))
        for _ in range(2):
            assert same_bits(model(x), wanted)
            assert all(isinstance(layer.weight, Float8Tensor) for layer in model)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert same_bits(model(x), wanted)
        assert not any(p.is_meta or p.requires_grad for p in model.parameters())
        convert_to_high_precision(model)


@pytest.mark.gpu
def test_weights_in_float8_only_are_spread() -> None:
    where = {"0": 0, "1": "cpu", "2": 0, "3": "cpu"}
    for recipe in ONLY[:3]:
        x = torch.randn(8, 64, device="cuda")
        wanted = only(recipe).cuda()(x)
        assert same_bits(accelerate.dispatch_model(only(recipe).cuda(), where)(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_float8_only_are_not_offloaded_to_the_disk(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, x = only("tensorwise").to(dtype), torch.randn(8, 64, dtype=dtype)
    wanted, where = model(x), {"0": "disk", "1": "cpu", "2": "cpu", "3": "cpu"}
    for offload in (
        lambda: accelerate.disk_offload(model, tmp_path, torch.device("cpu")),
        lambda: accelerate.dispatch_model(model, where, offload_dir=tmp_path),
    ):
        with pytest.raises(RuntimeError, match=r"offload to the CPU, or call convert_to_high_prec"):
            offload()
        assert same_bits(model(x), wanted)  # nothing has moved
    with pytest.raises(TypeError, match=r"got none for data of .*model\.load_state_dict"):
        accelerate.utils.set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.eye(64))
