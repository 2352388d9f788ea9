"""Options of the training commands, made of the settings themselves.

Every option is None unless it is given, so that defaults stay in one place, `TrainConfig.create`,
and a resumed run can tell what was asked for now from what it was started with.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from float8_lab.trainer.config import SETTINGS, TrainConfig

INTERRUPTED_EXIT = 130
STOP_NOTICE = "stopping after this step, with a checkpoint (again: stop at once)"


@dataclass
class Session:
    """What one call of the command line carries around.

    Attributes:
        debug: Whether to show tracebacks.
    """

    debug: bool = False


def _set_debug(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.ensure_object(Session).debug = True


Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show tracebacks of errors."),
]


def takes_settings(
    *, but: tuple[str, ...] = (), shown: dict[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting, and `--debug`.

    Args:
        but: Settings that this command has no option for, or one of its own.
        shown: Defaults in words that differ from those of `TrainConfig`.

    Returns:
        A decorator of a function whose parameter `given` receives the settings that were given.
    """
    types = typing.get_type_hints(TrainConfig)
    options = [
        _parameter(name, types[name], (shown or {}).get(name))
        for name, setting in SETTINGS.items()
        if setting.group is not None and name not in but
    ]
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False)
    options.append(debug.replace(annotation=Debug))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(debug: bool, **values: Any) -> None:
            names = [option.name for option in options if option.name in values]
            settings = {name: values.pop(name) for name in names}
            given = {name: value for name, value in settings.items() if value is not None}
            command(given=given, **values)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "given"]
        # Help pages list what comes first first: the command's own options begin the last group.
        last = [p.name for p in options].index("log_interval")
        parameters = [*options[:last], *parameters, *options[last:]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, kind: Any, shown: str | None) -> inspect.Parameter:
    setting = SETTINGS[name]
    default = str(setting.default)
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        default = "yes" if setting.default else "no"
        flag = setting.flag or f"{flag}/--no-{flag.removeprefix('--')}"
    option = typer.Option(
        flag,
        help=setting.text,
        rich_help_panel=setting.group,
        show_default=shown or setting.shown or default,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
