"""Options that several commands share, said once.

Those of the training commands are made of the settings themselves. Each is None unless it is given,
so that defaults stay in one place, `TrainConfig.create`, and a resumed run can tell what was asked
for now from what it was started with.
"""

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from float8.convert.measure import WrongResultError
from float8_lab.device import explain_out_of_memory
from float8_lab.errors import FailedError
from float8_lab.trainer.config import OPTIONS, TrainConfig

INTERRUPTED_EXIT = 130
STOP_NOTICE = "stopping after this step, with a checkpoint (again: stop at once)"

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


def takes(
    defaults: Mapping[str, Any] | None = None, /, **groups: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of whole dataclasses: their fields that are annotated.

    Annotated as Typer wants it, or with a text alone, which is the help; the number is at least 1
    then, and the switch has no opposite. So are the command's own parameters. `groups` are those
    that stand for a dataclass; `defaults` are those of options that differ from it.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields: dict[str, list[str]] = {}
        parameters = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name not in groups:
                parameters.append(own)
                continue
            group = groups[own.name]
            hints = typing.get_type_hints(group, include_extras=True)
            options = {name: kind for name, kind in hints.items() if hasattr(kind, "__metadata__")}
            fields[own.name] = list(options)
            for name, kind in options.items():
                new = own.replace(name=name, annotation=kind, default=getattr(group, name))
                parameters.append(new)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = {
                group: groups[group](**{name: values.pop(name) for name in names})
                for group, names in fields.items()
            }
            try:
                with explain_out_of_memory("too large for the memory: {error}"):
                    command(**made, **values)
            except WrongResultError as error:
                raise FailedError(str(error)) from error

        changed = defaults or {}
        parameters = [
            p.replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                default=changed.get(p.name, p.default),
                annotation=_option(p.name, p.annotation),
            )
            for p in parameters
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _option(name: str, annotation: Any) -> Any:
    """As Typer wants it."""
    text, *_ = getattr(annotation, "__metadata__", [None])
    if not isinstance(text, str):
        return annotation
    kind = typing.get_args(annotation)[0]
    names = ["--" + name.replace("_", "-")] if kind is bool else []
    return Annotated[kind, typer.Option(*names, help=text, min=1 if kind is int else None)]


def settings(*, but: tuple[str, ...] = (), **shown: str) -> Any:
    """A dataclass for `takes` of an option for each setting of the trainer, `but` some.

    `shown` are defaults in words that differ from those of `TrainConfig`.
    """
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
