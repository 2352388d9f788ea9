"""Accelerate prepares a model before or after its conversion, and saves and loads its state."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import all_linears, convert_to_float8_training, convert_to_high_precision
from float8 import sync_float8_amax_and_scale_history as sync
from sqnr import same_bits
from support.fresh import ONE_WORKER, in_fresh_process

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
accelerated = importlib.import_module("support.accelerated")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_order_of_prepare_and_conversion_changes_no_bit(precision: str, tmp_path: Path) -> None:
    first, second = (
        accelerated.run(tmp_path / order, order, range(4), precision=precision)
        for order in ("before", "after")
    )
    assert first.keys() == second.keys()
    assert all(same_bits(x, second[name]) for name, x in first.items())
    histories = [x for name, x in first.items() if "history" in name]
    assert len(histories) == 12
    assert all((x > 0).sum() == 4 for x in histories)  # one of each step, not microbatch
    saved = safetensors.load_file(tmp_path / "before" / "model.safetensors")
    assert saved.keys() == first.keys()


@ONE_WORKER
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_run_is_resumed_bit_by_bit_in_a_fresh_process(order: str, tmp_path: Path) -> None:
    whole = accelerated.run(tmp_path, order, range(4))
    rest = in_fresh_process(accelerated.run, tmp_path, order, range(2, 4), 1)
    assert all(same_bits(x, rest[name]) for name, x in whole.items())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_a_model_converted_on_the_meta_device_loads_a_plain_checkpoint(
    recipe: str, tmp_path: Path
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    plain = model()
    path = str(tmp_path / "model.safetensors")
    safetensors.save_file(plain.state_dict(), path, {"format": "pt"})
    with accelerate.init_empty_weights():
        empty = model()
    convert_to_float8_training(empty, config=recipe, module_filter_fn=all_linears)
    loaded = accelerate.load_checkpoint_and_dispatch(empty, path, device_map={"": "cpu"})
    convert_to_float8_training(plain, config=recipe, module_filter_fn=all_linears)
    x = torch.randn(32, 64)
    for each in (plain, loaded):
        each(x).square().mean().backward()
        sync(each)
        each(x).square().mean().backward()
    state = plain.state_dict()
    assert all(same_bits(y, state[name]) for name, y in loaded.state_dict().items())
    for p, q in zip(plain.parameters(), loaded.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_hooks_of_accelerate(recipe: str, tmp_path: Path) -> None:
    """Which hold the forwards of layers, as those of a `device_map` over several devices do."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()

    def converted(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)

    hooked = accelerate.dispatch_model(model(), {"": "cpu"}, force_hooks=True)
    with pytest.warns(UserWarning, match="convert before accelerate"):
        converted(hooked)
    accelerate.hooks.remove_hook_from_submodules(hooked)
    offloaded, alone = converted(model()), converted(model())
    accelerate.disk_offload(offloaded, tmp_path, torch.device("cpu"))
    x = torch.randn(32, 64)
    assert torch.equal(offloaded(x), alone(x))
    assert torch.equal(converted(hooked)(x), alone(x))
    with pytest.raises(ValueError, match="layer '0': got a layer with a `forward` of its own"):
        convert_to_high_precision(offloaded)
    assert torch.equal(offloaded(x), alone(x))
    accelerate.hooks.remove_hook_from_submodules(offloaded)
    assert torch.equal(convert_to_high_precision(offloaded)(x), model()(x))
