"""`float8 plan`: which layers of a model to convert, and what that gains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from float8.bench.devices import bench_device
from float8.bench.results import Results, check_output
from float8.cli.bench_tables import PLAN, print_table
from float8.cli.options import Debug
from float8.cli.progress import make_console
from float8.config import Float8LinearConfig
from float8.cost import KNOWN, Ceilings, ceilings_of, rest_ms
from float8.models.llama import Llama
from float8.models.presets import PRESETS, preset
from float8.plan import (
    ESTIMATED,
    MEASURED,
    Judge,
    Plan,
    estimator,
    measurer,
    plan_conversion,
)
from float8.trainer.environment import describe_environment, device_name

_DEFAULT_CEILINGS = "h100"


def plan_command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "llama3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per forward on one device.")] = 8192,
    recipe: Annotated[str, typer.Option(help="tensorwise or delayed.")] = "tensorwise",
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--estimate",
            help="Run a layer of each shape, or compute from stored ceilings.",
            show_default="measure if there is a GPU",
        ),
    ] = None,
    ceilings: Annotated[
        str | None,
        typer.Option(
            help=f"Estimate for {' or '.join(KNOWN)}.",
            show_default=f"the GPU's, or {_DEFAULT_CEILINGS} without one",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to measure: cuda, cuda:N or cpu.", show_default="cuda"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan: .json or .csv.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show for each linear layer of a model whether float8 makes it faster.

    The output head is left in high precision, as the reference trainer does. GPU time only: what
    the CPU needs to issue kernels is not in it.
    """
    if output is not None:
        check_output(output)
    config = Float8LinearConfig.from_recipe_name(recipe)
    shape = preset(model)
    measuring = _measures(measure, ceilings)
    known = _ceilings(ceilings, measuring)
    judge, where = _judge(measuring, device, known, tokens, config)
    with torch.device("meta"):
        llama = Llama(shape.model, shape.seq_len)
    plan = plan_conversion(
        llama,
        tokens_per_step=tokens,
        config=config,
        module_filter_fn=_not_the_head,
        judge=judge,
    )
    rows = _rows(plan, tokens)
    how = MEASURED if measuring else ESTIMATED
    console = make_console()
    title = f"{model}, {recipe}, {tokens} tokens: {how} for {where}; ms of forward + backward"
    print_table(console, title, PLAN, rows)
    gain: dict[str, Any] = {"linear_speedup": plan.bf16_ms / plan.planned_ms}
    console.print(f"all linear layers: {gain['linear_speedup']:.2f}x of bf16")
    if known is not None:
        seq_len = min(shape.seq_len, tokens)
        sizes = (shape.model.n_layers, shape.model.dim, shape.model.ffn_dim)
        rest = rest_ms(tokens, seq_len, *sizes, known)
        gain |= {"rest_ms": rest, "step_speedup": plan.step_speedup(rest)}
        console.print(
            f"forward + backward, with {rest:.1f} ms of attention and pointwise work "
            f"({ESTIMATED}): {gain['step_speedup']:.2f}x"
        )
    if output is not None:
        settings = {"model": model, "tokens": tokens, "recipe": recipe, "how": how, "for": where}
        environment = describe_environment(torch.device("cuda" if _has_gpu() else "cpu"))
        Results("plan", environment, settings, rows, gain).write(output)
        console.print(f"results: {output}")


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _measures(measure: bool | None, ceilings: str | None) -> bool:
    if ceilings is not None and measure:
        raise ValueError("--ceilings is for estimates: leave it or --measure out")
    return _has_gpu() and ceilings is None if measure is None else measure


def _ceilings(name: str | None, measuring: bool) -> Ceilings | None:
    """Those asked for; else the GPU's; else, for an estimate without a GPU, the default's."""
    if name is not None:
        if name not in KNOWN:
            raise ValueError(f"ceilings: got {name!r}, expected one of {', '.join(KNOWN)}")
        return KNOWN[name]
    if _has_gpu():
        known = ceilings_of(torch.device("cuda", torch.cuda.current_device()))
        if known is None and not measuring:
            raise ValueError(
                "the ceilings of this GPU are not known: measure, or name others with --ceilings"
            )
        return known
    return None if measuring else KNOWN[_DEFAULT_CEILINGS]


def _judge(
    measuring: bool,
    device: str | None,
    known: Ceilings | None,
    tokens: int,
    config: Float8LinearConfig,
) -> tuple[Judge, str]:
    if measuring:
        place = bench_device(device or "cuda")
        return measurer(tokens, config, place), device_name(place)
    if device is not None:
        raise ValueError("--device is where to measure: leave it or --estimate out")
    assert known is not None
    return estimator(tokens, config, known, known.name), known.name


def _not_the_head(mod: nn.Module, fqn: str) -> bool:
    return fqn != "output"


def _rows(plan: Plan, tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layer in plan.layers:
        if layer.convert:
            fate = "convert"
        else:
            fate = "leave: slower" if not layer.verdict.worthwhile else "leave: output head"
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in layer.names)
        rows.append(
            {
                "M": tokens,
                "K": layer.in_features,
                "N": layer.out_features,
                "count": len(layer.names),
                "layers": " ".join(kinds),
                "bf16_ms": layer.verdict.bf16_ms,
                "float8_ms": layer.verdict.float8_ms,
                "speedup": layer.verdict.speedup,
                "fate": fate,
                "all_bf16_ms": layer.bf16_ms,
                "all_planned_ms": layer.planned_ms,
            }
        )
    sums = {"all_bf16_ms": plan.bf16_ms, "all_planned_ms": plan.planned_ms}
    total = {"layers": "sum", "count": sum(row["count"] for row in rows), **sums}
    return [*rows, {key: total.get(key) for key in rows[0]}]
