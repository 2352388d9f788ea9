"""FSDP2 over one dim of a mesh, tensor parallel with float8's styles over the other."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from float8 import attach_to_optimizer, sync_float8_amax_and_scale_history
from support.configs import RECIPES
from support.models import LlamaBlock, seeded
from support.parallel import DIM, HIDDEN, TOKENS, off, plan_of
from support.ranks import Ranks
from support.sharded import Traffic, convert, here, whole
from support.spies import GemmSpy


def model_of(recipe: str, all_gather: bool) -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(LlamaBlock(DIM, HIDDEN)), recipe, all_gather=all_gather).to(here())


def sharded(model: nn.Module, mesh: DeviceMesh, sequence: bool = True) -> nn.Module:
    """On a mesh with the dims `tensor` and, if there are two, `data`."""
    parallelize_module(model[0], mesh["tensor"], plan_of("float8", sequence, norms=True))
    if mesh.ndim == 2:
        for module in (model[0], model):
            fully_shard(module, mesh=mesh["data"])
    return model


def two_dims(recipe: str, all_gather: bool, sequence: bool, precompute: bool) -> list[Any]:
    """FSDP2 over one dim of the mesh, tensor parallel over the other, against one device."""
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    alone, model = model_of(recipe, False), sharded(model_of(recipe, all_gather), mesh, sequence)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (alone, model)]
    attach_to_optimizer(alone, optimizers[0])
    if precompute:
        attach_to_optimizer(model, optimizers[1])
    data, tensor = (mesh.get_local_rank(dim) for dim in ("data", "tensor"))
    results: list[Any] = []
    first = 0
    for step in range(5):
        batch = [seeded(10 * step + rank, 2, TOKENS, DIM, device=here()) for rank in range(2)]
        for x in batch:
            with GemmSpy() as expected:
                loss = (alone(x) - x.roll(1, -1)).square().mean() / 2
            loss.backward()
        x = batch[data]
        x, to = (t.chunk(2, 1)[tensor] if sequence else t for t in (x, x.roll(1, -1)))
        with Traffic() as seen, GemmSpy() as gemms:
            loss = (model(x) - to).square().sum() / (2 * TOKENS * DIM)
        all_reduces = seen.all_reduces
        with seen:
            loss.backward()
        if step == 0:  # the scales of weights are those of the whole, bit by bit
            for (*_, mine), (*_, theirs) in zip(gemms.gemms, expected.gemms, strict=True):
                assert torch.equal(mine, theirs)
        first = first if step else all_reduces  # inputs' amaxes are among them
        if all_gather and recipe == "tensorwise":  # seven weights, two dims
            assert first - all_reduces == (14 if precompute and step else 0)
        if sequence and recipe == "tensorwise":
            assert seen.bytes_of("all_gather") == {torch.uint8: 4 * x.numel()}
        if step in (0, 4):
            for name, parameter in model.named_parameters():
                got, expected = parameter.grad.full_tensor(), alone.get_parameter(name).grad
                assert off(got, expected) < 1e-2, (step, name, off(got, expected))
                results.append(got)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return results


def test_fsdp_with_tensor_parallel_equals_a_single_device(four: Ranks) -> None:
    for recipe, sequence, cases in (
        ("tensorwise", True, [(False, False), (True, False), (True, True)]),
        ("tensorwise", False, [(True, True)]),
        ("delayed", True, [(False, True), (True, True)]),
    ):
        first, *others = [
            four.run(two_dims, recipe, all_gather, sequence, precompute)[0]
            for all_gather, precompute in cases
        ]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def save(path: str, recipe: str) -> dict[str, Tensor]:
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = sharded(model_of(recipe, True), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach_to_optimizer(model, optimizer)
    for step in range(2):
        model(seeded(step, 2, TOKENS // 2, DIM, device=here())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in full.items()}


def load(path: str, recipe: str, expected: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh(here().type, shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    model = sharded(model_of(recipe, True), mesh)
    state = get_model_state_dict(model)
    for value in state.values():
        value.zero_()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name
    model(seeded(9, 2, TOKENS // 2, DIM, device=here())).square().mean().backward()
    sync_float8_amax_and_scale_history(model)


def test_checkpoints_go_from_mesh_to_mesh(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    for recipe in RECIPES:
        path = str(tmp_path / recipe)
        expected = next(each for each in four.run(save, path, recipe) if each)
        four.run(load, path, recipe, expected, (2, 2))
        two.run(load, path, recipe, expected, (2,))
        model = model_of(recipe, False)
        assert model.state_dict().keys() == expected.keys()
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(state[name], expected[name]) for name in state)
