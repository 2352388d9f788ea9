"""`Float8GatherWeight`: a high-precision tensor to everyone, that keeps its spec and its scale."""

import copy
import io
import pickle
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from float8.config import CastConfig
from float8.fsdp.gather import CastAhead, Float8GatherWeight
from float8.tensor import high_precision
from float8.tensor.ranks import sharding_groups
from sqnr import assert_close
from support.configs import RECIPES
from support.devices import E4M3, on_devices
from support.models import FeedForward, forward_backward, seeded
from support.sharded import convert

SPEC = CastConfig(target_dtype=E4M3)


def weight(seed: int = 0, scale: float | None = None, **more) -> Float8GatherWeight:
    x = Float8GatherWeight(seeded(seed, 6, 4, **more), SPEC)
    if scale is not None:
        remember(x, scale)
    return x


def remember(x: Float8GatherWeight, scale: float = 0.5) -> None:
    x.keep(CastAhead(torch.tensor(scale)), x)


def known(x: Float8GatherWeight) -> float | None:
    ahead = x.kept(x)
    return None if ahead is None else ahead.scale.item()


VIEWS = {
    "split": lambda x: x.split(2)[1],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:3],
    "select": lambda x: x[1],
    "transpose": lambda x: x.t(),
    "as_strided": lambda x: x.as_strided((2, 4), (4, 1)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
}
COPIES = {
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to("cpu", copy=True),
    "contiguous": lambda x: x.t().contiguous(),
    "padded": lambda x: padded(x),
    "unflattened": lambda x: unflattened(x),
}


def padded(x: Tensor) -> Tensor:
    """As FSDP2 does it."""
    new = x.new_zeros(8, 4)
    new.narrow(0, 0, 6).copy_(x)
    return new


def unflattened(x: Float8GatherWeight) -> Tensor:
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    return type(x).__tensor_unflatten__(inner, context, x.shape, x.stride())


MODES = torch.no_grad, torch.inference_mode


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("mode", MODES)
def test_a_write_through_any_view_forgets_the_scale(how: str, mode: type) -> None:
    """Through a view, and through a plain alias of it, made before the scale is known or after."""
    writes = [lambda y: y.mul_(2), lambda y: high_precision(y).mul_(2)]
    writes += [lambda y: high_precision(y).detach()[:1].mul_(2)]
    for write in writes:
        x = nn.Parameter(weight())
        with mode():
            view = VIEWS[how](x.detach())
            alias = high_precision(view)
            assert type(alias) is Tensor
            for before in (True, False):
                remember(x)
                VIEWS[how](x.detach())
                assert known(x) == 0.5  # reading is no writing
                write(view) if before else alias.mul_(2)
                assert known(x) is None
        assert not torch.equal(x.high_precision, seeded(0, 6, 4))


def stepped(x: nn.Parameter, optimizer: type, compiled: bool = False, **options: object) -> None:
    torch._dynamo.reset()
    step = optimizer([x], **options).step
    x.grad = torch.ones(6, 4)
    (torch.compile(step, backend="aot_eager") if compiled else step)()


FUSED, FOR_LOOP = {"fused": True}, {"foreach": False}
WRITES = {
    "foreach": lambda x: torch._foreach_mul_([x], 2),
    "out": lambda x: torch.mul(x, 2, out=x),
    "copy": lambda x: x.copy_(weight(1)),
    "init": lambda x: nn.init.constant_(x, 1.0),
    "item": lambda x: x.__setitem__(0, 3.0),
    "data": lambda x: x.data.mul_(2),
}
STEPS = {
    "foreach step": lambda x: stepped(x, torch.optim.AdamW, foreach=True),
    "fused step": lambda x: stepped(x, torch.optim.SGD, **FUSED),
    "step": lambda x: stepped(x, torch.optim.AdamW, **FOR_LOOP),
    "compiled step": lambda x: stepped(x, torch.optim.AdamW, compiled=True, **FUSED),
    "compiled foreach step": lambda x: stepped(x, torch.optim.SGD, compiled=True, foreach=True),
}


@pytest.mark.parametrize(
    "how",
    [
        *WRITES,
        *(each for each in STEPS if each != "compiled step"),
        pytest.param("compiled step", marks=pytest.mark.exhaustive),
    ],
)
def test_what_else_writes_forgets_the_scale(how: str) -> None:
    for mode in MODES if how in WRITES else MODES[:1]:
        x = nn.Parameter(weight())
        remember(x)
        with mode() if how in WRITES else nullcontext():
            (WRITES | STEPS)[how](x)
        assert known(x) is None
        assert not torch.equal(x.high_precision, seeded(0, 6, 4))


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("how", [*VIEWS, *COPIES])
def test_views_and_copies_are_as_torch_makes_them(how: str, mode: type) -> None:
    """And keep the spec; a write to a copy leaves the scale. In inference mode nobody has taken
    compound ops apart."""
    x, plain = weight(scale=0.5), seeded(0, 6, 4)
    with mode():
        y, expected = (VIEWS | COPIES)[how](x), plain
        if how != "unflattened":
            expected = (VIEWS | COPIES)[how](plain)
        assert torch.equal(high_precision(y), expected)
        assert (type(y), y.how) == (Float8GatherWeight, SPEC)
        if how in VIEWS:
            assert y.is_inference() == expected.is_inference()
            made = weight()  # in inference mode, too
            assert torch.equal(high_precision(VIEWS[how](made)), expected)
            y.mul_(2)
        elif how != "unflattened":  # takes the memory itself
            assert known(y) is None
            y.mul_(2)
            assert known(x) == 0.5
    assert torch.equal(x.high_precision, plain) == (how in COPIES)
    assert torch.equal(high_precision(y), expected * (1 if how == "unflattened" else 2))


def test_another_dtype_has_the_spec_but_not_the_scale() -> None:
    x = weight(scale=0.5)
    x.param_dtype = torch.bfloat16
    assert known(x) is None
    y = x.to(torch.bfloat16)
    assert (type(y), y.dtype, y.how) == (Float8GatherWeight, torch.bfloat16, SPEC)
    assert known(y) is None
    x = weight(dtype=torch.bfloat16)  # a view of other bits is one of the same memory
    y = x.view(torch.float16)
    assert torch.equal(high_precision(y), high_precision(x).view(torch.float16))
    assert high_precision(y).data_ptr() == high_precision(x).data_ptr()


def test_other_ops_give_plain_tensors() -> None:
    x = weight()
    for y in (x + 1, x.abs(), x @ x.t(), torch.zeros_like(x), x.sum(), x == x, x.int()):
        assert type(y) is Tensor
    assert type(torch.empty_like(x)) is Float8GatherWeight
    assert type(high_precision(x)) is Tensor
    assert high_precision(x).data_ptr() == x.high_precision.data_ptr()


def test_copies_outside_of_torch() -> None:
    x = nn.Parameter(weight(), requires_grad=False)
    torch.save(x, file := io.BytesIO())
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded):
        assert type(y) is Float8GatherWeight
        assert isinstance(y, nn.Parameter)
        assert not y.requires_grad
        assert y.how == x.how
        assert torch.equal(y.high_precision, x.high_precision)
        assert y.high_precision.data_ptr() != x.high_precision.data_ptr()


def test_no_tensor_takes_the_place_of_what_it_holds() -> None:
    x = nn.Parameter(weight())
    with pytest.raises(RuntimeError, match=r"take the place of what a Float8Gath(.)*copy_\(\)"):
        x.data = torch.ones(6, 4)
    assert torch.equal(x.high_precision, seeded(0, 6, 4))


def pair(recipe: str, device: str, model: nn.Module) -> list[nn.Module]:
    return [convert(copy.deepcopy(model).to(device), recipe, gather) for gather in (False, True)]


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unsharded_model_computes_as_without(recipe: str, device: str) -> None:
    models = pair(recipe, device, FeedForward(32, 48))
    assert isinstance(models[1].w1.weight, Float8GatherWeight)
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 32, device=device)
    plain, gathered = (forward_backward(model, x, g) for model in models)
    assert_close(plain, gathered)
    assert all(type(x) is Tensor for x in gathered.values())


@pytest.mark.parametrize("options", [{"foreach": True}, FUSED, FOR_LOOP])
def test_an_unsharded_model_trains_as_without(options: dict[str, bool]) -> None:
    models = pair("tensorwise", "cpu", FeedForward(32, 48))
    for model in models:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for step in range(3):
            model(seeded(step, 16, 32)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        for state in adam.state.values():
            assert all(type(x) is Tensor for x in state.values())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other.data)


def test_state_dicts_and_vectors_of_an_unsharded_model_are_plain_and_load() -> None:
    plain, model = FeedForward(32, 48), pair("tensorwise", "cpu", FeedForward(32, 48))[1]
    state = model.state_dict()
    assert all(type(x) is Tensor for x in state.values())
    plain.load_state_dict(state)
    for assign in (False, True):
        other = pair("tensorwise", "cpu", FeedForward(32, 48))[1]
        other.load_state_dict(plain.state_dict(), assign=assign)
        assert isinstance(other.w1.weight, Float8GatherWeight)
        assert isinstance(other.w1.weight, nn.Parameter)
        assert torch.equal(other.w1.weight.high_precision, plain.w1.weight)


def test_moves_and_meta() -> None:
    with torch.device("meta"):
        plain = FeedForward(32, 48)
    model = pair("delayed", "meta", plain)[1]
    model.to_empty(device="cpu").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Float8GatherWeight), name
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.dtype, parameter.device.type) == (torch.bfloat16, "cpu")
        nn.init.normal_(parameter)
    model(seeded(0, 16, 32, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("swappable", [True, False])
def test_conversion_keeps_what_hung_on_the_parameter(swappable: bool) -> None:
    model = FeedForward(32, 48)
    before = model.w1.weight
    reference = None if swappable else weakref.ref(before)
    model.w1.weight.group = "decay"
    model.w1.weight.grad = torch.ones(48, 32)
    model.w2.weight.requires_grad_(False)
    memory, model.w3.weight = model.w1.weight.data_ptr(), model.w1.weight
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = convert(model, "tensorwise")
    assert len(warned) == (not swappable)
    assert all("1 layer(s)" in str(w.message) for w in warned)
    assert all("make it after" in str(w.message) for w in warned)
    weight = model.w1.weight
    assert (weight is before) == swappable  # which an optimizer has
    assert model.w3.weight is weight
    assert isinstance(weight, Float8GatherWeight)
    assert isinstance(weight, nn.Parameter)
    assert reference is None or reference() is before
    assert (weight.group, weight.grad.sum()) == ("decay", 48 * 32)
    assert not model.w2.weight.requires_grad
    assert weight.high_precision.data_ptr() == memory


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_hooks_is_not_converted(kind: str) -> None:
    model = FeedForward(32, 48)
    handle = getattr(model.w2.weight, kind)(lambda x: None)
    with pytest.raises(ValueError, match=r"'w2': got a weight with gradient hooks(.)*after"):
        convert(model, "tensorwise")
    assert type(model.w1) is nn.Linear
    handle.remove()
    convert(model, "tensorwise")
    assert isinstance(model.w2.weight, Float8GatherWeight)


def test_a_weight_that_something_else_uses_stays_plain() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(48, 32), "head": nn.Linear(32, 48, bias=False)})
    model.other = nn.Linear(32, 48)
    model.head.weight = model.embed.weight
    convert(model, "tensorwise")
    assert model.head.weight is model.embed.weight
    assert type(model.head.weight) is nn.Parameter
    assert isinstance(model.other.weight, Float8GatherWeight)


def test_the_groups_of_a_weight_are_those_of_all_dims_that_shard_it() -> None:
    """FSDP2 with tensor parallel shards along two: both have a part of the amax."""
    sharded, replicated = (SimpleNamespace(is_replicate=lambda x=x: x) for x in (False, True))
    sizes, groups = (2, 3, 4, 1), ("dp", "tp", "rp", "pp")
    mesh = SimpleNamespace(size=sizes.__getitem__, get_group=groups.__getitem__)
    weight = SimpleNamespace(device_mesh=mesh, placements=(sharded, sharded, replicated, sharded))
    assert sharding_groups(weight) == ("dp", "tp")
