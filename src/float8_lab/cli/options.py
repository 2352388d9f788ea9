"""Options that several commands share, said once.

Those of the training commands are the settings themselves, None unless given: so defaults stay in
`TrainConfig.create`, and a resumed run can tell what was asked for now.
"""

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from float8_lab.errors import ConfigError
from float8_lab.trainer.config import OPTIONS, TrainConfig

INTERRUPTED_EXIT = 130

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
T = TypeVar("T")
Callback = TypeVar("Callback", bound=Callable[..., Any])
Words = list[str] | None
"""An option that may be repeated or hold several words with commas between."""


class Command(TyperCommand):
    """Has its options listed by panel, each with its whole name."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first paragraph, all of it."""
        return " ".join((self.help or "").partition("\n\n")[0].split())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and arguments."""
        panels: dict[str, list[Any]] = {}
        for each in self.get_params(ctx):
            panel = getattr(each, "rich_help_panel", None) or each.param_type_name.title() + "s"
            panels.setdefault(panel, []).append(each.get_help_record(ctx))
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class App(typer.Typer):
    """Commands with help in plain text: tables of rich cut long names of options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None, **kwargs)

    def command(self, name: str | None = None, **kwargs: Any) -> Callable[[Callback], Callback]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=Command, **kwargs)


def split(values: Words) -> list[str]:
    """All words of such an option."""
    return [word for value in values or [] for word in value.split(",")]


def one_of(option: str, got: str, choices: Mapping[str, T]) -> T:
    """Return the value that a word stands for; a `ConfigError` if it is not known."""
    if got not in choices:
        raise ConfigError(f"{option}: got {got!r}, expected one of {', '.join(choices)}")
    return choices[got]


def takes(
    defaults: Mapping[str, Any] | None = None, /, **groups: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of whole dataclasses, and `--debug`, which `main` looks for.

    Fields, and the command's own parameters, are annotated as Typer wants it, or with a text alone,
    which is the help: see `_option`. `groups` are the parameters that stand for a dataclass;
    `defaults` are those of options that differ from it.
    """
    fields = {n: typing.get_type_hints(each, include_extras=True) for n, each in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        taken: dict[str, tuple[Any, Any]] = {}  # annotation and default
        for name, own in inspect.signature(command, eval_str=True).parameters.items():
            kinds = fields.get(name, {name: own.annotation})
            for each, kind in kinds.items():
                taken[each] = kind, getattr(groups[name], each) if name in groups else own.default
        taken["debug"] = Debug, False

        @functools.wraps(command)
        def run(debug: bool, **values: Any) -> None:
            from float8_lab.device import explain_out_of_memory

            for name, value in values.items():
                if value == "" or (isinstance(value, list) and "" in value):
                    do = "leave the option out for its default"
                    raise ConfigError(f"{name}: got an empty text, expected a value; {do}")
            for name, group in groups.items():
                values[name] = group(**{each: values.pop(each) for each in fields[name]})
            with explain_out_of_memory("too large for the memory: {error}"):
                command(**values)

        parameters = []
        for name, (kind, default) in taken.items():
            options: Any = {"default": (defaults or {}).get(name, default)}
            options["annotation"] = _option(name, kind)
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **options))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _option(name: str, annotation: Any) -> Any:
    """As Typer wants it: numbers are at least 1, switches have no opposite, words are split."""
    kind, text = typing.get_args(annotation)[:2]
    if not isinstance(text, str):
        return annotation
    names = ["--" + name.replace("_", "-")] if kind is bool else []
    least = 1 if kind in (int, int | None) else None
    callback = split if kind == Words else None
    return Annotated[kind, typer.Option(*names, help=text, min=least, callback=callback)]


def settings(*, but: tuple[str, ...] = (), **shown: str) -> Any:
    """A dataclass for `takes` of all settings `but` some; `shown` are defaults in other words."""
    types = typing.get_type_hints(TrainConfig)
    fields = []
    for name, option in OPTIONS.items():
        if name in shown:
            option = copy.copy(option)
            option.show_default = shown[name]
        if name not in but:
            fields.append((name, Annotated[types[name] | None, option], None))
    return dataclasses.make_dataclass("Settings", fields)


def given(settings: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in vars(settings).items() if value is not None}
