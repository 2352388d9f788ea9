"""Accelerate prepares a model before or after its conversion, loads it, and hooks its layers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import convert_to_high_precision
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits
from support.libraries import by_accelerate, converted, feed_forwards

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
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
