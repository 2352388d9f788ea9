"""Models that transformers shares among two ranks, converted: as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Weights,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from sqnr import sqnr
from support.lazily import Lazily
from support.parallel import alone
from support.ranks import Ranks
from support.sharded import whole

transformers, hf = Lazily("transformers"), Lazily("support.hugging_face")
ours = Lazily("float8.integrations.transformers_parallel")

pytestmark = pytest.mark.xdist_group("ranks")


def body(mod: nn.Module, fqn: str) -> bool:
    return fqn != "lm_head"


def two_ranks_train(folder: Path, recipe: Any, sizes: dict[str, int]) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = transformers.distributed.DistributedConfig(**sizes)
    one, model = load(folder), load(folder, distributed_config=config)
    with pytest.warns(UserWarning, match="convert within forwards_taken_off"):
        convert_to_float8_training(model, config=recipe, module_filter_fn=body)
    with ours.forwards_taken_off(model):
        convert_to_float8_training(model, config=recipe, module_filter_fn=body)
    convert_to_float8_training(one, config=recipe, module_filter_fn=body)
    converted = len(conversion_report(one).converted)
    assert len(conversion_report(model).converted) == converted > 0
    assert all(x.skip_reason is None for x in conversion_report(model).experts)
    found = []
    for each, group in ((model, None), (one, alone())):
        optimizer = torch.optim.SGD(each.train().parameters(), 1e-3)
        attach_to_optimizer(each, optimizer, group=group)
        for seed in range(2):
            optimizer.zero_grad()
            each(input_ids=hf.tokens(seed), labels=hf.tokens(seed)).loss.backward()
            optimizer.step()
            if not seed:
                grads = [whole(p.grad).flatten() for p in each.parameters()]
        found.append((torch.cat(grads), torch.cat([whole(p).flatten() for p in each.parameters()])))
    for a, b in zip(*found, strict=True):
        assert sqnr(b, a) > 60  # they differ in the order of sums
    histories = {n: x for n, x in one.named_buffers() if "amax_history" in n}
    for name, x in histories.items():
        torch.testing.assert_close(model.get_buffer(name), x, rtol=1e-2, atol=0.0)
    model.eval().generate(hf.tokens(0)[:, :4], max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="by forwards_taken_off"):
        convert_to_high_precision(model)
    with ours.forwards_taken_off(model):
        convert_to_high_precision(model)
    assert not any(isinstance(x, Float8Linear) for x in model.modules())
    model.save_pretrained(folder / "saved")
    loss = model(input_ids=hf.tokens(2), labels=hf.tokens(2)).loss
    back = load(folder / "saved")
    torch.testing.assert_close(back(input_ids=hf.tokens(2), labels=hf.tokens(2)).loss, loss)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Llama", "delayed"),
        # Gathers what its layers return.
        pytest.param("Phi3", "tensorwise", marks=pytest.mark.exhaustive),
        pytest.param("Llama", "rowwise", marks=pytest.mark.exhaustive),
    ],
)
def test_a_shared_model(two: Ranks, name: str, recipe: str, tmp_path: Path) -> None:
    hf.llama(name=name, num_hidden_layers=1).save_pretrained(tmp_path)
    two.run(two_ranks_train, tmp_path, recipe, {"tp_size": 2})


BOTH = {"tp_size": 2, "ep_size": 2}
HELD = Float8LinearConfig(float8_weights=Float8Weights.HELD)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        pytest.param("rowwise", BOTH, id="rowwise", marks=pytest.mark.exhaustive),
        pytest.param("rowwise", {"tp_size": 2}, id="rowwise, parts of each expert"),
        pytest.param(HELD, BOTH, id="held", marks=pytest.mark.exhaustive),
    ],
)
def test_shared_experts(two: Ranks, recipe: Any, sizes: dict[str, int], tmp_path: Path) -> None:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    hf.llama(0, "Qwen3Moe", head_dim=16, num_hidden_layers=1, **more).save_pretrained(tmp_path)
    two.run(two_ranks_train, tmp_path, recipe, sizes)


def test_forwards_of_others_stay() -> None:
    model = hf.llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = nn.Linear(64, 160).forward
    before = layer.forward
    with ours.forwards_taken_off(model):
        assert layer.forward is before
    assert layer.forward is before
