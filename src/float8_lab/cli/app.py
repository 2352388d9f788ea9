"""The subcommands of `float8`, put together."""

from __future__ import annotations

from typing import Annotated

import torch.distributed as dist
import typer

from float8_lab.cli.bench import app as bench_app
from float8_lab.cli.compare import compare_command
from float8_lab.cli.options import Session
from float8_lab.cli.plan import plan_command
from float8_lab.cli.train import train_command
from float8_lab.trainer.environment import float8_version

app = typer.Typer(
    name="float8",
    help="Train PyTorch models with 8-bit floating point matrix multiplies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.add_typer(bench_app, name="bench")
if dist.is_available():  # not in every build of torch
    from float8_lab.cli.bench_fsdp import fsdp_command

    bench_app.command("fsdp")(fsdp_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"float8 {float8_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str], session: Session, *, show_usage: bool = True) -> None:
    """Parse and run; always ends in an exception, `SystemExit` unless something went wrong.

    Args:
        arguments: Words after `float8`.
        session: What the call carries around.
        show_usage: Whether to say what is wrong with the arguments; all ranks get the same ones.
    """
    command = typer.main.get_command(app)
    call = {"args": arguments, "prog_name": "float8", "obj": session}
    if show_usage:
        command(**call)
    try:
        code = command(**call, standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "exit_code"):  # not one of the parser's
            raise
        raise SystemExit(error.exit_code) from None
    raise SystemExit(code)
