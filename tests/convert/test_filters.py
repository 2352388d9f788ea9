"""Which layers are converted without a filter: those that float8 makes no slower."""

import copy
import dataclasses
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Weights,
    ScalingGranularity,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    keep_high_precision,
)
from float8.config import GEMM_OPERANDS, RECIPES
from float8.convert import choice
from float8.convert.speed import COSTS, MEMORY, judged_as, layer_ms
from support.configs import DISABLED, mixed, of_recipe
from support.errors import require_errors

GEMMS = ("output", "grad_input", "grad_weight")
TENSORWISE, AXISWISE = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE

# Not what tests/conftest.py replaces.
GPU_FOR = choice.gpu_for


def model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.ModuleDict({"large": nn.Linear(8192, 8192), "small": nn.Linear(512, 512)})


def is_float8(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)]


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", lambda device: "H100")


def test_each_recipe_has_a_time_of_its_own() -> None:
    """The feed-forward of a 150m model: 1.02 of a step, `rowwise` of all layers 0.88."""
    layers = nn.Sequential(nn.Linear(1024, 3072, device="meta"))
    how: dict[str, Any] = {"gpu": "H200", "cuda_graphs": True}
    assert is_float8(convert_to_float8_training(copy.deepcopy(layers), **how)) == ["0"]
    with pytest.warns(UserWarning, match="loses: modelled 0.9.x of bf16 on H200, 8192 tokens"):
        convert_to_float8_training(layers, config="rowwise", **how)


@pytest.mark.parametrize("recipe", [*COSTS][1:])
def test_a_config_is_judged_as_the_recipe_that_it_is_like(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    more = {"float8_weights": Float8Weights.HELD} if recipe != "rowwise_with_gw_hp" else {}
    assert judged_as(dataclasses.replace(config, emulate=True, **more)) == recipe
    if recipe == "delayed":  # the weight is the smallest part
        assert judged_as(dataclasses.replace(config, cast_config_weight=CastConfig())) == recipe


def some_gemms(*names: str, granularity: ScalingGranularity = TENSORWISE) -> Float8LinearConfig:
    """Return a configuration in which the GEMMs of these names alone run in float8."""
    casts = {}
    for gemm, sites in GEMM_OPERANDS.items():
        for site in sites:
            cast = CastConfig(scaling_granularity=granularity) if gemm in names else DISABLED
            casts[f"cast_config_{site.value}"] = cast
    return Float8LinearConfig(**casts)


@pytest.mark.parametrize(
    ("granularity", "recipe"), [(TENSORWISE, "tensorwise"), (AXISWISE, "rowwise")]
)
@pytest.mark.parametrize("experts", [0, 8])
def test_each_gemm_is_modelled_by_itself(
    granularity: ScalingGranularity, recipe: str, experts: int
) -> None:
    """Those in float8 gain, their casts cost: more of them more, all of them as the recipe."""
    ms = partial(layer_ms, "H200", tokens=16384, K=8192, N=8192, experts=experts)
    take = partial(some_gemms, granularity=granularity)
    times = [ms(take(*GEMMS[:count])) for count in range(4)]
    assert times == sorted(times, reverse=True)
    assert (times[0], times[3]) == (ms("bf16"), ms(recipe))
    for gemm in GEMMS:
        assert times[3] < ms(take(gemm)) < times[0]
        emulated = dataclasses.replace(take(gemm), emulate=True)
        assert ms(emulated) > times[0]  # the GEMM gains nothing, its casts cost
    two = ms(take(*GEMMS[:2]), trains=False)
    assert two == ms(recipe, trains=False)  # a frozen layer has no third
    assert ms(take("grad_weight"), trains=False) == ms("bf16", trains=False)


def test_the_filter_takes_what_gains_by_the_gemms_in_float8() -> None:
    found = {}
    for names in (GEMMS, ("output", "grad_input"), ("output",), ("grad_weight",)):
        with torch.device("meta"):
            layers = [(str(N), nn.Linear(N, N)) for N in range(1024, 4097, 128)]
        whole = nn.ModuleDict(layers)
        convert_to_float8_training(whole, config=some_gemms(*names), gpu="H200", cuda_graphs=True)
        found[names] = int(is_float8(whole)[0])
        judged = "modelled as tensorwise at" if names == GEMMS else "output .*, grad_weight .* at"
        assert re.search(judged, conversion_report(whole).chosen_for[0])
    # The third needs all tokens transposed: it gains the least for its casts.
    assert found["output", "grad_input"] <= found["output",] < found[GEMMS] < found["grad_weight",]


@pytest.mark.usefixtures("on_h100")
def test_what_else_decides() -> None:
    everything = ["large", "small"]
    for arguments, expected in (
        ({"tokens_per_step": 16}, []),
        ({"module_filter_fn": all_linears}, everything),  # decides alone
        ({"config": Float8LinearConfig(emulate=True)}, everything),  # not about speed
    ):
        assert is_float8(convert_to_float8_training(model(), **arguments)) == expected
    off = mixed(DISABLED, DISABLED, DISABLED)  # no question of speed either
    (_, small) = conversion_report(convert_to_float8_training(model(), config=off)).layers
    assert small.skip_reason == "all casts of its config are DISABLED"


def test_gpus_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, known in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA L40S", "NVIDIA L40S"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        for device in ("cuda:0", "cpu", "meta"):
            assert GPU_FOR(torch.device(device)) == known


@pytest.mark.usefixtures("on_h100")
def test_a_layer_that_cannot_be_converted_says_so_and_not_how_slow_it_is() -> None:
    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64))
    (skipped,) = conversion_report(convert_to_float8_training(small)).skipped
    assert skipped.skip_reason is not None
    assert "float64" in skipped.skip_reason


def test_on_a_machine_without_gpu_all_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "gpu_for", GPU_FOR)
    assert is_float8(convert_to_float8_training(model())) == ["large", "small"]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_judged_by_size_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", GPU_FOR)
    known = GPU_FOR(torch.device("cuda", 0))
    converted = convert_to_float8_training(model(device))
    small_too = known not in MEMORY
    assert is_float8(converted) == (["large", "small"] if small_too else ["large"])


# ---------------------------------------------------------------- for a GPU that is not here


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_gpu_that_is_named_decides_wherever_weights_are(device: str) -> None:
    with torch.device(device):
        layers = nn.ModuleDict({"large": nn.Linear(2048, 2048), "small": nn.Linear(512, 512)})
    convert_to_float8_training(layers, gpu="h100")
    assert is_float8(layers) == ["large"]
    report = conversion_report(layers)
    assert report.skipped[0].skip_reason == (
        "loses: modelled 0.47x of bf16 on H100, 8192 tokens per forward"
    )
    expected = 'chosen for H100 (gpu="H100"): modelled as tensorwise at 8192 tokens per forward'
    assert report.chosen_for == (expected,)
    assert expected in str(report).splitlines()


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_on_a_gpu_that_is_named_no_emulated_layer_gains(recipe: str) -> None:
    config = of_recipe(recipe, emulate=True)
    with pytest.warns(UserWarning, match="loses: emulate=True computes GEMMs in high precision, a"):
        convert_to_float8_training(large := model(), gpu="H200", config=config)
    assert is_float8(large) == []


@pytest.mark.parametrize(("tokens", "converted"), [(4096, False), (8192, True)])
def test_under_fsdp2_all_layers_stay_that_wait_for_the_cpu_together(
    tokens: int, converted: bool
) -> None:
    """A 1B was measured at 0.69 of bf16 with 4,096 tokens, and at 1.13 with 8,192."""
    sizes = [
        (2048, 2048),
        (2048, 512),
        (2048, 512),
        (2048, 2048),
        *[(2048, 8192)] * 2,
        (8192, 2048),
    ]
    with torch.device("meta"):
        block = nn.Sequential(*(nn.Linear(K, N, bias=False) for K, N in sizes))
        layers = nn.ModuleDict({"block": block, "lm_head": nn.Linear(2048, 128256)})
    alone = copy.deepcopy(layers)
    how: dict[str, Any] = {"gpu": "H200", "tokens_per_step": tokens}
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(layers, config=config, **how)
    assert is_float8(layers) == [f"block.{i}" for i in (0, 3, 4, 5, 6) if converted]
    reasons = [x.skip_reason for x in conversion_report(layers).skipped if "lm_" not in x.fqn]
    expected = "loses" if converted else "waits for the CPU: 0.30 ms a layer in bf16, on "
    assert all(expected in reason for reason in reasons), reasons
    layers["computed"] = nn.Linear(64, 64, device="meta")
    layers["computed"].weight = None
    layers["gates"] = nn.Sequential(*(nn.Linear(64, 1, device="meta") for _ in range(99)))
    convert_to_float8_training(layers, config=config, **how)  # what cannot be converted counts not
    assert all("waits" not in str(x.skip_reason) for x in conversion_report(layers["gates"]).layers)
    convert_to_float8_training(alone, **how)  # without the gather layers wait each by itself
    assert is_float8(alone) == [
        f"block.{i}" for i in range(7) if i >= 4 or (converted and i in (0, 3))
    ]


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_layer_that_waits_for_the_cpu_stays_but_in_a_cuda_graph(gpu: str) -> None:
    with torch.device("meta"):
        layers = nn.ModuleDict({"wide": nn.Linear(2048, 2048), "waits": nn.Linear(1024, 3072)})
    convert_to_float8_training(layers, gpu=gpu)
    assert is_float8(layers) == ["wide"]
    of_cpu = (
        "waits for the CPU: 0.22 ms of H200 in bf16 is less than the CPU needs; "
        "cuda_graphs=True converts it"
    )
    of_gpu = "loses: modelled 0.94x of bf16 on H100, 8192 tokens per forward"
    (waits,) = conversion_report(layers).skipped
    assert waits.skip_reason == {"H100": of_gpu, "H200": of_cpu}[gpu]
    convert_to_float8_training(layers, gpu=gpu, cuda_graphs=True)
    assert is_float8(layers) == ["wide", *["waits"] * (gpu == "H200")]
    (chosen,) = conversion_report(layers).chosen_for
    assert chosen.endswith("modelled as tensorwise at 8192 tokens per forward, as CUDA graphs")


def test_frozen_layers_are_judged_by_what_they_run() -> None:
    """Two GEMMs, and casts of tokens that nobody needs transposed."""
    layer = nn.Linear(2048, 2048, device="meta")
    for trains in (True, False):
        whole = nn.Sequential(copy.deepcopy(layer).requires_grad_(trains))
        convert_to_float8_training(whole, gpu="H100", cuda_graphs=True, tokens_per_step=4096)
        assert is_float8(whole) == ([] if trains else ["0"])


def test_what_arguments_cannot_be() -> None:
    layers, filtered = model(), {"module_filter_fn": all_linears}
    gpus = "expected one that is modelled, of 'H100', 'H200'; leave it out"
    for expected, arguments in (
        ("ValueError: tokens_per_step: got", {"tokens_per_step": 0}),
        ("TypeError: tokens_per_step: got", {"tokens_per_step": 1.5}),
        ("TypeError: tokens_per_step: got", {"tokens_per_step": True}),
        ("TypeError: cuda_graphs: got 'auto', expected True or", {"cuda_graphs": "auto"}),
        ("TypeError: head: got 'lm_head', expected True or", {"head": "lm_head"}),
        ("ValueError: alone, with .*, head=True; expected none", {"head": True, **filtered}),
        (
            "ValueError: alone, with gpu=None, cuda_graphs=T",
            {"cuda_graphs": True, **filtered},
        ),
        (f"ValueError: gpu: got 'B200', {gpus}", {"gpu": "B200"}),
        (f"ValueError: gpu: got 'H100,H200', {gpus}", {"gpu": "H100,H200"}),
        ("ValueError: gpu: got .'H100'., expected one", {"gpu": ["H100"]}),
        ("ValueError: alone, with gpu=.H100., cuda_graphs=F", {"gpu": "H100", **filtered}),
    ):
        require_errors((expected, partial(convert_to_float8_training, **arguments), [layers]))
    assert is_float8(layers) == []


def test_on_a_gpu_that_is_not_modelled_narrow_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", lambda device: "NVIDIA L40S")
    with torch.device("meta"):
        layers = nn.ModuleDict({"wide": nn.Linear(256, 256), "narrow": nn.Linear(1024, 255)})
    convert_to_float8_training(layers)
    assert is_float8(layers) == ["wide"]
    report = conversion_report(layers)
    (narrow,) = report.skipped
    assert narrow.skip_reason == ("255 features are less than 256, and NVIDIA L40S is not modelled")
    assert report.chosen_for[0].startswith("NVIDIA L40S is not modelled: layers with fewer than")


def test_a_gpu_may_have_the_name_that_torch_gives_it() -> None:
    report = conversion_report(convert_to_float8_training(model(), gpu="NVIDIA H100 80GB HBM3"))
    assert report.chosen_for[0].startswith('chosen for H100 (gpu="H100")')


def test_reasons_of_an_earlier_conversion_stay_where_a_filter_takes_nothing() -> None:
    parts = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "r": nn.Linear(32, 8)})
    whole = nn.Sequential(nn.ModuleDict({"body": parts, "lm_head": nn.Linear(32, 32)}))

    def reasons() -> dict[str, str | None]:
        layers = conversion_report(whole).layers
        return {layer.fqn.rpartition(".")[2]: layer.skip_reason for layer in layers}

    convert_to_float8_training(whole, module_filter_fn=lambda mod, fqn: fqn.endswith("a"))
    assert reasons()["lm_head"] == reasons()["b"] == "module_filter_fn returned False"
    convert_to_float8_training(whole)
    first = reasons()
    assert str(first["lm_head"]).startswith("the head: converted only with")
    router = "N=8 is less than 16, as a router's: converted only if a module_filter_fn takes it"
    assert first["r"] == router
    convert_to_float8_training(
        whole, config="rowwise", module_filter_fn=lambda mod, fqn: fqn.endswith("b")
    )
    assert reasons() == first
    convert_to_float8_training(whole, module_filter_fn=all_linears)
    assert {*reasons().values()} == {None}


def test_the_report_speaks_of_the_last_conversion_only() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 8))
    convert_to_float8_training(whole[0])
    assert conversion_report(whole).chosen_for[0].startswith("no GPU here: layers of any size")
    convert_to_float8_training(whole, module_filter_fn=all_linears)
    assert conversion_report(whole).chosen_for == ()
    convert_to_float8_training(convert_to_high_precision(whole))
    assert len(conversion_report(whole).chosen_for) == 1
    assert conversion_report(convert_to_high_precision(whole)).chosen_for == ()


# ---------------------------------------------------------------- by name


class WithHead(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"output": nn.Linear(16, 16), "lora_A": nn.Linear(16, 8)})
        self.add_module(head, nn.Linear(16, 32))


@pytest.mark.parametrize("head", ["lm_head", "output"])
def test_the_head_and_adapters_are_converted_only_if_asked(head: str) -> None:
    for wrap in (None, "model", "module", "_orig_mod"):
        parts = WithHead(head)
        whole = parts if wrap is None else nn.ModuleDict({wrap: parts})
        convert_to_float8_training(whole)
        assert is_float8(parts) == ["attention.output"]
        assert [layer.skip_reason for layer in conversion_report(parts).skipped] == [
            "of an adapter: converted only if a module_filter_fn takes it",
            "the head: converted only with head=True, or if a module_filter_fn takes it",
        ]
        convert_to_float8_training(whole, head=True)
        assert is_float8(parts) == ["attention.output", head]
        convert_to_float8_training(whole, module_filter_fn=all_linears)
        assert is_float8(parts) == ["attention.output", "attention.lora_A", head]


def test_nothing_converted_is_told() -> None:
    expected = "no layer of WithHead was converted: module_filter_fn returned False. print"
    with pytest.warns(UserWarning, match=expected) as caught:
        convert_to_float8_training(WithHead("lm_head"), module_filter_fn=lambda mod, fqn: False)
    assert caught[0].filename == __file__
    forgotten: Any = lambda mod, fqn: print(end="")  # noqa: E731, T201
    with pytest.warns(UserWarning, match="converted: module_filter_fn returned None"):
        convert_to_float8_training(WithHead("lm_head"), module_filter_fn=forgotten)
    with pytest.warns(UserWarning, match="of ReLU was converted: it has no nn.Linear"):
        convert_to_float8_training(nn.ReLU())


# ---------------------------------------------------------------- by block


class Expert(nn.Module):
    """As transformers' sparse layers had them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)


def tower(blocks: int) -> nn.ModuleList:
    made = ({"q": nn.Linear(16, 16), "experts": nn.ModuleList([Expert()])} for _ in range(blocks))
    return nn.ModuleList(map(nn.ModuleDict, made))


class Towers(nn.Module):
    """Vision, as a list; text, as torchtitan's numbered dict; and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = tower(3)
        self.text = nn.ModuleDict({str(n): block for n, block in enumerate(tower(4))})
        self.lm_head = nn.Linear(16, 32)


def in_float8(wrap: Any = lambda model: model, **kept: Any) -> set[str]:
    """Blocks, and what of them is converted, in short: all, or without the down projection."""
    whole = wrap(Towers())
    convert_to_float8_training(whole, module_filter_fn=keep_high_precision(**kept))
    return {
        name.removeprefix("_orig_mod.").replace("experts.0.", "")
        for name in is_float8(whole)
        if not name.endswith("up_proj")
    }


def of_blocks(vision: str, text: str, *layers: str) -> set[str]:
    places = [*(f"vision.{n}" for n in vision), *(f"text.{n}" for n in text)]
    return {f"{place}.{layer}" for place in places for layer in layers}


def test_first_and_last_blocks_of_each_list_stay() -> None:
    both = "q", "down_proj"
    assert in_float8() == of_blocks("012", "0123", *both)
    assert in_float8(first=1) == of_blocks("12", "123", *both)
    assert in_float8(first=1, last=2, wrap=torch.compile) == of_blocks("", "1", *both)
    assert in_float8(last=3) == of_blocks("", "0", *both)
    assert in_float8(last=1, names=["down_proj"]) == of_blocks("01", "012", "q")
    assert in_float8(names=("vision", "text.3.experts")) == of_blocks("", "012", *both) | {
        "text.3.q"
    }


def test_others_are_left_to_the_default_or_to_the_given_filter() -> None:
    keep = keep_high_precision(first=1, names=["down_proj"])
    whole = Towers()
    convert_to_float8_training(whole, gpu="H100", module_filter_fn=keep)  # is still asked
    reasons = {layer.fqn: layer.skip_reason for layer in conversion_report(whole).layers}
    assert reasons["vision.0.q"] == "keep_high_precision: first=1 of vision"
    assert reasons["text.2.experts.0.down_proj"] == "keep_high_precision: named 'down_proj'"
    assert str(reasons["text.2.q"]).startswith("loses: modelled 0.")
    assert str(reasons["lm_head"]).startswith("the head: ")
    assert "vision.0.experts.0.up_proj" in str(conversion_report(whole))
    mine = keep._replace(module_filter_fn=lambda mod, fqn: fqn.endswith(("q", "lm_head")))
    convert_to_float8_training(whole, module_filter_fn=mine)
    assert set(is_float8(whole)) == of_blocks("12", "123", "q") | {"lm_head"}
    refused = partial(convert_to_float8_training, whole, gpu="H100", module_filter_fn=mine)
    require_errors(("ValueError: got a module_filter_fn, which decides alone", refused, []))
    convert_to_float8_training(again := Towers(), head=True, module_filter_fn=keep)
    assert set(is_float8(again)) == of_blocks("12", "123", "q", "experts.0.up_proj") | {"lm_head"}


def test_experts_stay_with_their_block_or_by_a_weight() -> None:
    def fused() -> nn.Module:
        return nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"moe": Seam()}) for _ in "ab")}
        )

    def kept(**arguments: Any) -> list[bool]:
        whole, keep = fused(), keep_high_precision(module_filter_fn=all_linears, **arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing was converted
            convert_to_float8_training(whole, config="rowwise", module_filter_fn=keep)
        reasons = [each.skip_reason for each in conversion_report(whole).experts]
        assert all(reason is None or "keep_high_precision: " in reason for reason in reasons)
        return [reason is None for reason in reasons]

    assert kept() == [True, True]
    assert kept(last=1) == [True, False]
    assert kept(names=["layers.0"]) == [False, True]
    assert kept(names=["moe.w2"]) == [False, False]


class Seam(nn.Module):
    """Experts as torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Parameter(torch.zeros(2, 16, 32))

    def _grouped_mm(self, *, A: Any, B_t: Any, offs: Any) -> Any:
        raise NotImplementedError


def test_what_cannot_be_kept() -> None:
    plain, convert = nn.Sequential(nn.Linear(16, 16)), convert_to_float8_training
    keeping = lambda **kept: partial(convert, module_filter_fn=keep_high_precision(**kept))  # noqa: E731
    by = lambda **kept: partial(keep_high_precision, **kept)  # noqa: E731
    require_errors(
        ("ValueError: keep_high.* got first=0 and last=2 for .* names=", keeping(last=2), [plain]),
        (
            "ValueError: keep_high.*no module is called .'down'.; pr",
            keeping(names=["down"]),
            [plain],
        ),
        ("TypeError: first: got -1, expected a number of blocks", by(first=-1), []),
        ("TypeError: last: got True, expected a number of blocks", by(last=True), []),
        ("TypeError: names: got 'down_proj', expected a list", by(names="down_proj"), []),
        ("TypeError: names: got .1., expected a list", by(names=[1]), []),
        ("TypeError: names: got None, expected a list", by(names=None), []),
        ("TypeError: names: got b'down', expected a list", by(names=b"down"), []),
        ("TypeError: names: got .'down': 1., expected a list", by(names={"down": 1}), []),
        ("ValueError: names: got an empty one in .'0', ''., expected", by(names=["0", ""]), []),
        (
            "ValueError: keep_high.*no module is called .'weight'.; pr",  # only of experts
            keeping(names=["weight"]),
            [plain],
        ),
        (
            "ValueError: keep_high.*no module is called .' ', '.'",
            keeping(names=[".", " "]),
            [plain],
        ),
        ("TypeError: module_filter_fn: got int", keeping(module_filter_fn=3), [plain]),
    )
    assert is_float8(plain) == []


def test_adapters_and_heads_stay_as_such_where_weights_must_be_frozen() -> None:
    """Not with the advice to freeze them."""
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q", "lora_A", "lm_head")})
    model["q"].requires_grad_(False)
    config = of_recipe("tensorwise", float8_weights=Float8Weights.ONLY)
    convert_to_float8_training(model, config=config)
    reasons = {layer.fqn: str(layer.skip_reason) for layer in conversion_report(model).layers}
    assert reasons["q"] == "None"
    assert reasons["lora_A"].startswith("of an adapter: ")
    assert reasons["lm_head"].startswith("the head: ")
