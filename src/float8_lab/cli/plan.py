"""`float8 plan`: which layers of a model to convert."""

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import nn

import float8
from float8 import ConversionReport, conversion_report, convert_to_high_precision
from float8.config import Float8LinearConfig, Float8Weights
from float8.convert.choice import Chooser, short_name
from float8.convert.conversion import LayerReport
from float8.convert.convert import convert_chosen
from float8.convert.speed import MODELLED, WAITS_BELOW_MS
from float8.experts import kind_of
from float8_lab.bench.linear import Shape, Times, measure_linear
from float8_lab.bench.step import Row
from float8_lab.bench.whole import HOST_ERROR, Setup, Step, keep_experts_of_a_rank
from float8_lab.cli.measure import Bench, Output, Place
from float8_lab.cli.options import App, takes
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Llama
from float8_lab.models.presets import PRESETS, preset
from float8_lab.trainer.config import RECIPES
from float8_lab.trainer.environment import device_name
from float8_lab.trainer.recipes import imported, recipe_config

CONVERT = "convert"

app = App()


def load_model(name: str) -> nn.Module:
    """Call `"module:function"` on the meta device; a `ConfigError` if it returns no model there."""
    what = "a function without arguments that returns a model, or --model for one of ours"
    make = imported("model", name, what)
    if isinstance(make, nn.Module):
        raise ConfigError(f"model: got {name!r}, expected {what}: it is a model")
    try:
        with contextlib.suppress(ValueError):  # a builtin may have no signature
            inspect.signature(make, follow_wrapped=False).bind()
    except TypeError as error:
        raise ConfigError(f"model: got {name!r}, expected {what}: {error}") from error
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        do = "make it from its configuration, not a checkpoint, or under torch.device('cpu')"
        raise ConfigError(f"model: {name!r} fails on the meta device: {error}; {do}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {name!r} returned {type(model).__name__}, expected nn.Module")
    return model


def report_on(
    model: nn.Module, config: Float8LinearConfig, run: Setup, gpu: str | None
) -> ConversionReport:
    """Convert a model on the meta device and report; `gpu` None: whatever the size of layers."""
    if gpu is None:
        config = replace(config, emulate=True)  # of which no speed is asked
    chooser = Chooser(model, config, None, run.tokens, gpu, run.cuda_graphs, head=run.head)
    if config.enable_fsdp_float8_all_gather:
        chooser.linear_ranks = chooser.expert_ranks = run.data_parallel
        if any(kind_of(module) is not None for module in model.modules()):
            chooser.expert_ranks //= run.expert_parallel
    return conversion_report(convert_chosen(chooser))


def plan_layers(
    report: ConversionReport, tokens: int, measure: Callable[[Shape], Times], waits: bool
) -> list[Row]:
    """Return a row for all linear layers of one shape and fate, with the times of one.

    A layer stays if float8 is slower or, with `waits`, if the CPU takes longer to start it.
    """
    groups: dict[tuple[int, int, str | None], list[str]] = {}
    for layer in report.layers:
        key = (layer.in_features, layer.out_features, layer.skip_reason)
        groups.setdefault(key, []).append(layer.fqn)
    rows = []
    for (K, N, reason), names in groups.items():
        layers = " ".join(dict.fromkeys(map(_short, names)))
        high, low = measure((tokens, K, N))
        if low > high:
            reason = reason or "slower"
        elif waits and high < WAITS_BELOW_MS:
            reason = reason or "waits for the CPU"
        row: Row = {"M": tokens, "K": K, "N": N, "count": len(names), "layers": layers}
        row |= {"bf16_ms": high, "float8_ms": low, "speedup": high / low}
        row["fate"] = f"leave: {reason.partition(':')[0]}" if reason else CONVERT
        rows.append(row)
    return rows


def filter_code(report: ConversionReport, meant: Callable[[LayerReport], bool]) -> str:
    """Return code of a filter that takes the layers, and modules of experts, that are meant."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for x in report.layers:
        names[meant(x)].append("" if x.fqn == "(root)" else x.fqn)
    for fqn, x in {x.fqn.rpartition(".")[0]: x for x in report.experts}.items():
        names[meant(x)].append(fqn)
    alike = {key: {re.sub(r"\d+", "N", name) for name in names[key]} for key in names}
    if alike[True] & alike[False] or alike[True] == {*names[True]}:  # blocks differ; no blocks
        return f"lambda mod, fqn: fqn in {names[True]}"
    return f'lambda mod, fqn: re.sub(r"\\d+", "N", fqn) in {sorted(alike[True])}'


def config_code(config: Float8LinearConfig, recipe: str) -> str:
    """Return code of a configuration: that of a recipe, or of one's own, with what differs."""
    name, plain = recipe.partition("+")[0], recipe_config(recipe.partition("+")[0])
    base = f'Float8LinearConfig.from_recipe_name("{name}")'
    if own := name.rpartition(":")[2] * (":" in name):
        base = own + "()" * callable(imported("recipe", name, ""))  # a configuration has no call
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    more = [f"{key}={x}" for key, x in values.items() if x != getattr(plain, key)]
    return f"replace({base}, {', '.join(more)})" if more else base if own else f'"{name}"'


def conversion_code(config: Float8LinearConfig, recipe: str, arguments: str) -> list[str]:
    """Return lines of code, with imports, that convert `model`."""
    lines = [f"config = {config_code(config, recipe)}"]
    lines.append(f"convert_to_float8_training(model, config=config, {arguments})")
    code, (module, _, own) = "\n".join(lines), recipe.partition("+")[0].rpartition(":")
    names = [x for x in float8.__all__ if re.search(rf"(?<![\w.\"]){x}\b", code)]
    lines.insert(0, f"from float8 import {', '.join(names)}")
    others = {f"from {module} import {own}": module, "import re": "re.sub(" in code}
    others["from dataclasses import replace"] = "= replace(" in code
    return [line for line, needed in others.items() if needed] + lines


def judge(
    model: nn.Module, config: Float8LinearConfig, run: Setup, gpu: str, recipe: str
) -> tuple[Step, ConversionReport, list[str]]:
    """Return a step, its report and lines on it, on as many GPUs as hold weights and their state.

    The default filter decides what is converted.
    """
    if run.data_parallel > 1 and ":" not in recipe:  # a configuration of one's own says it itself
        with contextlib.suppress(ValueError):  # not every recipe can
            config = replace(config, enable_fsdp_float8_all_gather=True)
    report_on(model, config, run, gpu)
    step, here, only = Step(model, gpu, config, run), run.data_parallel, Float8Weights.ONLY
    if (gib := step.gib) > step.gib_of_gpu and config.float8_weights is not only:  # is not shared
        gpus = here * 2 ** math.ceil(math.log2(gib / step.gib_of_gpu))
        many = replace(run, data_parallel=gpus)
        step, report, lines = judge(convert_to_high_precision(model), config, many, gpu, recipe)
        short = f"does not fit on {here} GPU{'s' * (here > 1)}, {gib:.1f} of {step.gib_of_gpu} GiB"
        lines[0] = f"{short}; on {gpus} (FSDP2, without activations) {lines[0]}"
    else:
        report, lines = answer(config, step, recipe)
    frozen = not all(weight.requires_grad for weight in model.parameters())
    if frozen and here == 1 and config.float8_weights is Float8Weights.ON_THE_FLY:
        with contextlib.suppress(ValueError):  # not every recipe can
            config = replace(config, float8_weights=only)
            report_on(convert_to_high_precision(model), config, run, gpu)
            if (best := Step(model, gpu, config, run)).gib < gib:
                saves = f"a step {best.speedup:.2f}x, {best.gib:.1f} GiB"
                lines.append(f"frozen base in float8 alone, --recipe {recipe}+only: {saves}")
    return step, report, lines


def answer(
    config: Float8LinearConfig, step: Step, recipe: str
) -> tuple[ConversionReport, list[str]]:
    """Return a report and lines on a step of a model that fits."""
    run, gpu = step.run, step.gpu
    flags = ", cuda_graphs=True" * run.cuda_graphs + ", head=True" * run.head
    call = f'tokens_per_step={run.tokens}, gpu="{gpu}"{flags}'
    if run.expert_parallel > 1 and step.report.experts:  # a conversion does not know of it
        call = f"module_filter_fn={filter_code(step.report, lambda x: x.skip_reason is None)}"
    (high, low), (bf16, ours), error = step.host_ms, step.gpu_ms, f"±{step.error:.0%}"
    level, converted = abs(step.speedup - 1) < step.error, step.report.share > 0
    word = "about level" if level else "it pays" if step.speedup > 1 else "loses"
    word = "the host decides" if step.host_decides and word != "loses" else word
    if step.unmeasured:
        error = f"error not known: nothing was measured {', '.join(step.unmeasured)}"
    said = f"modelled ({error})" + ": may as well lose, so time it" * level
    lines = [f"{word}: {step}", said]
    if not converted:
        reasons = " ".join(x.skip_reason or "" for x in step.report.layers)
        what, hint = "no layer is faster in float8", "the report says why"
        if "under FSDP2" in reasons:
            what = "the default filter expects that " * (bf16 > high) + "the host decides"
        if "modelled" in reasons or "under FSDP2" in reasons:
            hint = "more --tokens, or --cuda-graphs, may change that"
        lines = [f"no gain: {what}; {hint}"]
    fits = "activations come on top"
    if step.gib > step.gib_of_gpu:
        lines[0], fits = f"does not fit: if it did, {lines[0]}", "they do not fit"
    held = f"parameters, gradients, AdamW: {step.gib:.1f} of {step.gib_of_gpu} GiB a GPU"
    lines.append(f"{held}; {fits}")
    kinds = ", ".join({type(module).__name__: None for module, *_ in step.attention})
    lines.append(f"attention found: {len(step.attention)} modules, {kinds}")
    if not step.attention:
        lines[-1] = "no attention found: if there is any, a step takes longer and gains less"
    if converted and low * (1 + HOST_ERROR) > ours:
        word = "the" if step.host_decides else "a slower"
        word += f" host decides (±{HOST_ERROR:.0%})"
        starts = f"it starts a step in {high:.0f} ms in bf16, {low:.0f} in float8"
        helps = "larger units of FSDP2, " * (run.data_parallel > 1) + "CUDA graphs (--cuda-graphs)"
        runs = f"the GPU runs it in {bf16:.0f} and {ours:.0f}; what helps: more --tokens, {helps}"
        lines.append(f"{word}: {starts}, {runs}")
    lines += [f"{x}: judged at all tokens, timed at one of each sequence" for x in step.pooled]
    lines += conversion_code(config, recipe, call) if converted else []
    told = {of: _told(getattr(step.report, of), step) for of in ("layers", "experts")}
    return replace(step.report, **told), lines


def _told(rows: Any, step: Step) -> Any:
    """Return rows of a report with numbers for scalings."""
    told = []
    for row in rows:
        gain = step.gains[row.fqn]
        text = f"float8: modelled {gain:.2f}x of bf16"
        if both := step.of_experts.get(row.fqn.rpartition(".")[0]):
            gain = both[0] / both[1]
            text += f", {gain:.2f}x with the other weights of these experts"
        told.append(replace(row, scaling=row.scaling and text))
    return tuple(told)


def _short(fqn: str) -> str:
    """Return the last part of a name, with the one before a number, without those of PEFT."""
    parts = fqn.removesuffix(".base_layer").removesuffix(".default").split(".")
    return parts[-1] if not parts[-1].isdigit() else ".".join([*parts[-2:-1], "N"])


_OWN = "Your model: a function without arguments, called on the meta device."


@app.command()
@takes()
def plan_command(
    function: Annotated[str | None, typer.Argument(metavar="MODULE:FUNCTION", help=_OWN)] = None,
    model: Annotated[str | None, f"One of {', '.join(PRESETS)}; else llama3-8b."] = None,
    tokens: Annotated[int, "Tokens per forward on one device."] = 8192,
    sequence: Annotated[int | None, "Of one sequence; else the gcd of --tokens and 8192."] = None,
    recipe: Annotated[
        str,
        f"One of {', '.join(RECIPES)}; or MODULE:NAME, a Float8LinearConfig of yours. With +held "
        "behind it, each weight is cast once per step; with +only, frozen ones have float8 alone.",
    ] = "tensorwise",
    gpu: Annotated[
        str | None, f"Model {' or '.join(MODELLED)}: nothing runs on a GPU here."
    ] = None,
    data_parallel: Annotated[int, "GPUs that share weights by FSDP2, gathered in float8."] = 1,
    expert_parallel: Annotated[int, "Of these, GPUs that share the experts between them."] = 1,
    checkpointing: Annotated[bool, "Blocks will be computed once more in backward."] = False,
    cuda_graphs: Annotated[bool, "It will run as CUDA graphs: GPU time alone decides."] = False,
    head: Annotated[bool, "The head may be in float8, too."] = False,
    device: Annotated[str | None, "Where to measure: cuda (the default), cuda:N or cpu."] = None,
    output: Output = None,
) -> None:
    """Show for each linear layer of a model whether float8 makes it faster.

    A model of yours: float8 plan --gpu H100 my_module:make_model

    Without a GPU, or with --gpu, all is modelled: what a step of training takes, compiled, with
    AdamW, and what each layer gains. Else a layer of each shape runs on the GPU here. What gained
    is printed as a filter, to be pasted. It leaves experts, which are not measured, and the head.
    """
    warnings.filterwarnings("ignore", "float8: no layer")  # the report says so, too
    config = recipe_config(recipe)
    if function and model:
        raise ConfigError(f"model: got {function!r} and --model {model}, expected one of the two")
    if device and gpu:
        raise ConfigError("--device is where to measure: leave it, or --gpu, out")
    judged = short_name(gpu) if gpu else None if device or torch.cuda.is_available() else "H100"
    name = function or model or "llama3-8b"
    place = Place("cpu" if judged else device or "cuda", output)
    if function:
        whole, longest = load_model(function), 8192
    else:
        shape = preset(name)
        longest = shape.seq_len
        with torch.device("meta"):
            whole = Llama(shape.model, longest)
        whole.tie_head()
    each = sequence or math.gcd(tokens, longest)
    run = Setup(tokens, each, data_parallel, expert_parallel, checkpointing, cuda_graphs, head)
    about = {"model": name, "recipe": recipe, "for": judged or place.device, **vars(run)}
    bench = Bench("plan", place, tell=not judged, **about)
    title = f"{name}, {recipe}, {tokens} tokens" + f" in sequences of {each}" * bool(judged)
    title += ", as CUDA graphs" * cuda_graphs
    keep_experts_of_a_rank(whole, expert_parallel)
    if judged:
        step, report, told = judge(whole, config, run, judged, recipe)
        gpus = f"{step.run.data_parallel} " * (step.run.data_parallel > 1)
        title += f": modelled for {gpus}{judged}" + " (no --gpu names another)" * (not gpu)
        bench.console.print("\n".join([title, *told, "", f"{report}\n"]))
        table = "a step of training, modelled; docs/measuring.md explains the parts"
        names = "speedup", "error", "unmeasured", "gib", "gib_of_gpu", "host_ms", "gpu_ms", "gains"
        numbers = {"gpus": step.run.data_parallel, **{x: getattr(step, x) for x in names}}
        results: Any = {"report": step.report.to_dict(), "verdict": told, "modelled": numbers}
        bench.finish(table, step.rows, **results)
        bench.console.print(told[0])
    else:
        report = report_on(whole, config, run, None)
        measure = partial(measure_linear, recipe=recipe, device=bench.device)
        waits = bench.device.type == "cuda" and not cuda_graphs
        rows = plan_layers(report, tokens, measure, waits)
        title += f": measured for {device_name(bench.device)}; ms of forward + backward"
        bench.finish(title, rows)
        bf16 = sum(row["count"] * row["bf16_ms"] for row in rows)
        best = ("float8_ms" if row["fate"] == CONVERT else "bf16_ms" for row in rows)
        ours = sum(row["count"] * row[ms] for row, ms in zip(rows, best, strict=True))
        bench.console.print(f"measured: {bf16 / ours:.2f}x of all linear layers")
        sizes = {(row["K"], row["N"]) for row in rows if row["fate"] == CONVERT}
        fitting = (x for x in report.converted if (x.in_features, x.out_features) in sizes)
        if taken := [*fitting]:
            bench.console.print("what gained, as a filter of the conversion:")
            found = filter_code(report, taken.__contains__)  # in one line, to be pasted
            typer.echo(f"{'import re' * ('re.sub' in found)}\nmodule_filter_fn={found}")
        else:
            bench.console.print("no gain: no layer is faster in float8")
        bench.console.print("M: tokens, K: features in, N: features out; docs/measuring.md")
