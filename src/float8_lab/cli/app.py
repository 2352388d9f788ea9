"""The subcommands of `float8`, put together. Each is imported when it is called."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from float8_lab.cli.options import App, Command

COMMANDS = {
    "train": "Train a Llama on bytes of text with a float8 recipe, or in high precision.",
    "compare": "Train high precision and each RECIPE from the same seeds, on the same data.",
    "plan": "Show for each linear layer of a model whether float8 makes it faster.",
    "bench": "Time models, layers and training, each checked first; write tables of pages.",
}
"""Texts of `float8 --help`: the first line of the help of each command."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return an empty command, which stands for it in the list."""
        return Command(name, help=COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        return name, typer.main.get_command(import_module(f"float8_lab.cli.{name}").app), rest


_HELP = "Train PyTorch models with 8-bit floating point matrix multiplies."
app = App(name="float8", cls=_Commands, help=_HELP, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"float8 {import_module('float8').__version__}")
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
