"""`float8 plan`: which layers of a model to convert."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.filters import known_gpu
from float8.convert.measure import LinearTimes, measure_linear
from float8.convert.smallest import SMALLEST, judged_as, too_small
from float8_lab.cli.bench import Bench, Output, Place
from float8_lab.cli.options import Debug, takes
from float8_lab.errors import ConfigError
from float8_lab.models.llama import Llama
from float8_lab.models.presets import PRESETS, preset
from float8_lab.trainer.config import RECIPES
from float8_lab.trainer.environment import device_name

CONVERT, HEAD = "convert", "output"
_DEFAULT_GPU = "H100"

app = typer.Typer(add_completion=False)


def plan_conversion(
    model: nn.Module, tokens: int, judge: Callable[[int, int], str | LinearTimes | None]
) -> list[dict[str, Any]]:
    """Judge every `nn.Linear` of a model, on the meta device, too, without changing it.

    `judge(in_features, out_features)` gives what was measured, or what says that float8 is slower,
    or None if nothing does. The head is left in high precision. Returns a row per shape, in the
    order of the model: how many, which, their times, their fate.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            key = (linear.in_features, linear.out_features, name == HEAD)
            groups.setdefault(key, []).append(name)
    rows = []
    for (K, N, is_head), names in groups.items():
        layers = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        row: dict[str, Any] = {"M": tokens, "K": K, "N": N, "count": len(names), "layers": layers}
        found = judge(K, N)
        if isinstance(found, LinearTimes):
            row |= {**found._asdict(), "speedup": found.bf16_ms / found.float8_ms}
            found = "slower" if found.float8_ms > found.bf16_ms else None
        reason = found or ("output head" if is_head else None)
        row["fate"] = f"leave: {reason.partition(':')[0]}" if reason else CONVERT
        rows.append(row)
    return rows


@app.command()
@takes()
def plan_command(
    model: Annotated[str, f"One of {', '.join(PRESETS)}."] = "llama3-8b",
    tokens: Annotated[int, "Tokens per forward on one device."] = 8192,
    recipe: Annotated[str, f"One of {', '.join(RECIPES)}."] = "tensorwise",
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--by-size",
            help="Run a layer of each shape, or compare its size with stored limits.",
            show_default="measure if there is a GPU",
        ),
    ] = None,
    gpu: Annotated[
        str | None, f"By size for {' or '.join(SMALLEST)}, not for the one here."
    ] = None,
    device: Annotated[str | None, "Where to measure: cuda (the default), cuda:N or cpu."] = None,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Show for each linear layer of a model whether float8 makes it faster.

    The output head is left in high precision, as the reference trainer does. GPU time only: what
    the CPU needs to issue kernels is not in it.
    """
    config, shape = Float8LinearConfig.from_recipe_name(recipe), preset(model)
    here = torch.cuda.is_available()
    measuring = here and gpu is None if measure is None else measure
    if measuring and gpu is not None:
        raise ConfigError("--gpu is for judging by size: leave it or --measure out")
    if not measuring and device is not None:
        raise ConfigError("--device is where to measure: leave it or --by-size out")
    how, judged = ("measured", "") if measuring else ("judged by size", _gpu(gpu, here))
    place = Place((device or "cuda") if measuring else "cpu", output)
    settings = {"tokens": tokens, "recipe": recipe, "how": how, "for": judged or place.device}
    bench = Bench("plan", place, model=model, **settings)

    def judge(K: int, N: int) -> str | LinearTimes | None:
        if measuring:
            return measure_linear(tokens, K, N, bench.device, config)
        return too_small(judged, judged_as(config), tokens, K, N)

    with torch.device("meta"):
        rows = plan_conversion(Llama(shape.model, shape.seq_len), tokens, judge)
    title = f"{model}, {recipe}, {tokens} tokens: {how} for {judged or device_name(bench.device)}"
    if not measuring:
        bench.finish(title, rows)
        return
    bf16 = sum(row["count"] * row["bf16_ms"] for row in rows)
    taken = {True: "float8_ms", False: "bf16_ms"}
    gain = bf16 / sum(row["count"] * row[taken[row["fate"] == CONVERT]] for row in rows)
    bench.finish(f"{title}; ms of forward + backward", rows, linear_speedup=gain)
    bench.console.print(f"all linear layers: {gain:.2f}x of bf16")


def _gpu(name: str | None, here: bool) -> str:
    """A GPU whose limits are known: of that name, or the one here, or else `_DEFAULT_GPU`."""
    if name is None:
        name = known_gpu(torch.device("cpu")) if here else _DEFAULT_GPU
    if name is None:
        raise ConfigError("the limits of this GPU are not known: measure, or name another by --gpu")
    if name not in SMALLEST:
        raise ConfigError(f"gpu: got {name!r}, expected one of {', '.join(SMALLEST)}")
    return name
