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

from float8 import ConversionReport, all_linears, conversion_report, convert_to_high_precision
from float8.config import Float8LinearConfig, Float8Weights
from float8.convert.choice import Chooser, short_name
from float8.convert.convert import convert_chosen, convert_to_float8_training
from float8.convert.report import LayerReport
from float8.convert.speed import MEMORY, WAITS_BELOW_MS
from float8_lab.bench.linear import Shape, Times, measure_linear
from float8_lab.bench.step import Row
from float8_lab.bench.whole import Setup, Step, keep_experts_of_a_rank
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
    """Call a function on the meta device, where weights need no memory: `"module:function"`.

    Raises:
        ConfigError: it is not there, needs values of weights, or returns no model.
    """
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
    model: nn.Module, config: Float8LinearConfig, how: Setup, gpu: str | None
) -> ConversionReport:
    """Convert a model on the meta device and report; `gpu` None: whatever the size of layers."""
    if gpu is None:
        config = replace(config, emulate=True)  # of which no speed is asked
    chooser = Chooser(model, config, None, how.tokens, gpu, how.cuda_graphs, head=how.head)
    if config.enable_fsdp_float8_all_gather:
        chooser.ranks = how.data_parallel, how.data_parallel // how.expert_parallel
    return conversion_report(convert_chosen(chooser))


def plan_layers(
    report: ConversionReport, tokens: int, measure: Callable[[Shape], Times], waits: bool
) -> list[Row]:
    """Return a row for all linear layers of one shape and fate, with the times of one.

    What the report leaves stays. So does a layer if float8 is slower or, with `waits`, if the CPU
    takes longer to start it.
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


def filter_code(
    report: ConversionReport, meant: Callable[[LayerReport], bool], word: str = "in"
) -> str:
    """Return code of a filter: it takes what is `in` the layers that are meant, or `not in`."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for x in report.layers:
        names[meant(x)].append("" if x.fqn == "(root)" else x.fqn)
    alike = {key: {re.sub(r"\d+", "N", name) for name in names[key]} for key in names}
    if word == "not in" and not names[True]:
        return "all_linears"
    if alike[True] & alike[False] or alike[True] == {*names[True]}:  # blocks differ; no blocks
        return f"lambda mod, fqn: fqn {word} {names[True]}"
    return f'lambda mod, fqn: re.sub(r"\\d+", "N", fqn) {word} {sorted(alike[True])}'


def config_code(config: Float8LinearConfig, recipe: str) -> str:
    """Return code of a configuration: that of a recipe, or of one's own, with what differs."""
    name = recipe.partition("+")[0]
    own, plain = name.replace(":", ".") * (":" in name), recipe_config(name)
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    more = [f"{key}={x}" for key, x in values.items() if x != getattr(plain, key)]
    base = own or f'Float8LinearConfig.from_recipe_name("{name}")'
    return f"replace({base}, {', '.join(more)})" if more else own or f'"{name}"'


def judge(
    model: nn.Module, config: Float8LinearConfig, how: Setup, gpu: str, recipe: str
) -> tuple[Step, list[str]]:
    """Return a step, what the default filter takes or all if clearly faster, and lines on it."""
    report_on(model, config, how, gpu)
    step, of_all = Step(model, gpu, config, how), ""
    code = filter_code(step.report, lambda x: "filter_fn takes" in (x.skip_reason or ""), "not in")
    takes = eval(code, {"re": re, "all_linears": all_linears})  # so what is told is what is planned
    convert_to_high_precision(model)
    convert_to_float8_training(model, config=config, module_filter_fn=takes)
    every = Step(model, gpu, config, how)
    other = f"all layers in float8, module_filter_fn={code}: a step {every.speedup:.2f}x"
    flags = ", cuda_graphs=True" * how.cuda_graphs + ", head=True" * how.head
    call = f'tokens_per_step={how.tokens}, gpu="{gpu}"{flags}'
    if (gains := every.speedup / step.speedup - 1) > step.error:
        other = f"by the default filter, which knows of no gathers: a step {step.speedup:.2f}x"
        step, of_all, call = every, ", with all layers in float8", f"module_filter_fn={code}"
    level = abs(step.speedup - 1) < step.error
    word = "about level" if level else "it pays" if step.speedup > 1 else "loses"
    fits, only = "activations come on top", config.float8_weights is Float8Weights.ONLY
    if step.gib > (limit := step.gib_of_gpu):
        gpus = how.data_parallel * 2 ** math.ceil(math.log2(step.gib / limit))
        fits, word = "they do not fit", "does not fit"
        word += f"; {gpus} GPUs (FSDP2) would hold it" * (not only)  # which is not shared
    far = ", extrapolated from up to 4 GPUs" * (how.data_parallel > 4)
    far = ", expert parallel was not measured" if how.expert_parallel > 1 else far
    said = f"modelled (±{step.error:.0%}{far})" + ": may as well lose, so time it" * level
    lines = [f"{word}: {step}{of_all}", said]
    if not (converted := step.report.share > 0):
        slow = any("modelled" in (x.skip_reason or "") for x in step.report.layers)
        hint = "more --tokens, or --cuda-graphs, may change that"
        lines = [f"loses: no layer gains; {hint if slow else 'the report says why'}"]
    lines.append(f"parameters, gradients, AdamW: {step.gib:.1f} of {limit} GiB a GPU; {fits}")
    lines += [other] * (gains > 0.005)
    lines += [f"{x}: judged at all tokens, timed at one of each sequence" for x in step.pooled]
    code = f"config = {config_code(config, recipe)}\n"
    code += f"convert_to_float8_training(model, config=config, {call})"
    frozen = not all(weight.requires_grad for weight in model.parameters())
    if frozen and how.data_parallel == 1 and config.float8_weights is Float8Weights.ON_THE_FLY:
        with contextlib.suppress(ValueError):  # not every recipe can
            config = replace(config, float8_weights=Float8Weights.ONLY)
            report_on(convert_to_high_precision(model), config, how, gpu)
            best = Step(model, gpu, config, how)
            if best.gib < step.gib:
                saves = f"a step {best.speedup:.2f}x, {best.gib:.1f} GiB"
                lines.append(f"frozen base in float8 alone, --recipe {recipe}+only: {saves}")
    return step, lines + code.splitlines() * converted


def _told(rows: Any, gains: dict[str, float]) -> Any:
    """Return rows of a report with numbers for scalings."""
    what = "float8: modelled {:.2f}x of bf16"
    return tuple(replace(x, scaling=x.scaling and what.format(gains[x.fqn])) for x in rows)


def _short(fqn: str) -> str:
    """Return the last part of a name, and where that is a number also the one before it.

    What PEFT wraps has the name of its wrapper; adapters are called `lora_A.default`.
    """
    parts = fqn.removesuffix(".base_layer").removesuffix(".default").split(".")
    return parts[-1] if not parts[-1].isdigit() else ".".join([*parts[-2:-1], "N"])


@app.command()
@takes()
def plan_command(
    make: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Your model: a function without arguments, called on the meta device.",
        ),
    ] = None,
    model: Annotated[str | None, f"One of {', '.join(PRESETS)}; else llama3-8b."] = None,
    tokens: Annotated[int, "Tokens per forward on one device."] = 8192,
    sequence: Annotated[int | None, "Of one sequence; else the gcd of --tokens and 8192."] = None,
    recipe: Annotated[
        str,
        f"One of {', '.join(RECIPES)}; or MODULE:NAME, a Float8LinearConfig of yours. With +held "
        "behind it, each weight is cast once per step; with +only, frozen ones have float8 alone.",
    ] = "tensorwise",
    gpu: Annotated[str | None, f"Model {' or '.join(MEMORY)}: nothing runs on a GPU here."] = None,
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
    if make and model:
        raise ConfigError(f"model: got {make!r} and --model {model}, expected one of the two")
    if device and gpu:
        raise ConfigError("--device is where to measure: leave it, or --gpu, out")
    judged = short_name(gpu) if gpu else None if device or torch.cuda.is_available() else "H100"
    place, name = Place("cpu" if judged else device or "cuda", output), make or model or "llama3-8b"
    if make:
        whole, longest = load_model(make), 8192
    else:
        shape = preset(name)
        longest = shape.seq_len
        with torch.device("meta"):
            whole = Llama(shape.model, longest)
        whole.tie_head()
    each = sequence or math.gcd(tokens, longest)
    how = Setup(tokens, each, data_parallel, expert_parallel, checkpointing, cuda_graphs, head)
    about = {"model": name, "recipe": recipe, "for": judged or place.device, **vars(how)}
    bench = Bench("plan", place, tell=not judged, **about)
    title = f"{name}, {recipe}, {tokens} tokens" + f" in sequences of {each}" * bool(judged)
    title += ", as CUDA graphs" * cuda_graphs
    keep_experts_of_a_rank(whole, expert_parallel)
    if data_parallel > 1 and ":" not in recipe:  # a configuration of one's own says it itself
        with contextlib.suppress(ValueError):  # not every recipe can
            config = replace(config, enable_fsdp_float8_all_gather=True)
    if judged:
        title += f": modelled for {judged}" + " (no --gpu names another)" * (not gpu)
        step, answer = judge(whole, config, how, judged, recipe)
        report = step.report
        told = {of: _told(getattr(report, of), step.gains) for of in ("layers", "experts")}
        bench.console.print("\n".join([title, *answer, "", f"{replace(report, **told)}\n"]))
        table = "a step of training, modelled; docs/measuring.md explains the parts"
        numbers = {x: getattr(step, x) for x in ("speedup", "error", "gib", "gib_of_gpu", "gains")}
        bench.finish(table, step.rows, report=report.to_dict(), verdict=answer, modelled=numbers)
        bench.console.print(answer[0])
    else:
        report = report_on(whole, config, how, None)
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
            bench.console.print("loses: no layer gains")
        bench.console.print("M: tokens, K: features in, N: features out; docs/measuring.md")
