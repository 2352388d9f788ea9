"""The subcommands of `float8`, put together."""

from typing import Annotated

import typer

import float8
from float8_lab.cli.bench import app as bench_app
from float8_lab.cli.bench_numerics import numerics_command
from float8_lab.cli.compare import compare_command
from float8_lab.cli.plan import plan_command
from float8_lab.cli.train import train_command

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
bench_app.command("numerics")(numerics_command)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"float8 {float8.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


command = typer.main.get_command(app)
"""Parses the words after `float8` and runs them; always ends in an exception."""
