"""The command line: every command is a config dataclass and a function, and its flags are generated from the class."""

from __future__ import annotations

import os

# Idle OpenMP threads must sleep: on shared cores two spinning threads are slower than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import dataclasses
import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from veritune import __version__
from veritune.core import config as configs
from veritune.core.errors import VerituneError


@dataclass(frozen=True)
class Command:
    """One command: its config class and its function by name. Both are imported only when it is called."""

    help: str
    config: str
    """module:class, below veritune."""
    function: str
    """module:function, below veritune; takes the config, and returns an exit code or None."""


COMMANDS = {
    "demo": Command("Watch the embedded policy learn Countdown.", "recipes.grpo:GRPOConfig", "commands.train:grpo"),
    "eval": Command("Measure a policy as it is.", "recipes.eval:EvalConfig", "commands.train:evaluate"),
    "best-of-n": Command(
        "Measure pass@N, Best@N and majority vote.", "recipes.best_of_n:BestOfNConfig", "commands.train:best_of_n"
    ),
    "sft": Command("Fine-tune a policy on traces.", "recipes.sft:SFTConfig", "commands.train:sft"),
    "expert-iteration": Command(
        "Train on a policy's own right answers.",
        "recipes.expert_iteration:ExpertIterationConfig",
        "commands.train:expert_iteration",
    ),
    "grpo": Command("Train with GRPO or one of its variants.", "recipes.grpo:GRPOConfig", "commands.train:grpo"),
    "leaderboard": Command(
        "Train with GRPO for a given time, by rules.",
        "commands.leaderboard:LeaderboardConfig",
        "commands.train:leaderboard",
    ),
    "plan": Command(
        "Plan memory and time of GRPO before anything is loaded.",
        "commands.plan:PlanConfig",
        "commands.plan.command:print_plan",
    ),
    "experiment": Command(
        "Answer a question by a sweep over settings and seeds.",
        "commands.experiment.command:ExperimentConfig",
        "commands.experiment.command:run_experiment",
    ),
    "grade": Command("Grade a file of answers, and say why.", "commands.grade:GradeConfig", "commands.grade:grade"),
    "resume": Command(
        "Continue a run that was stopped or killed.", "commands.train:ResumeConfig", "commands.train:resume_run"
    ),
    "report": Command(
        "Write report.html and figures of runs.", "commands.report:ReportConfig", "commands.report:report"
    ),
    "discover": Command(
        "Search for mathematical constructions with a model.",
        "discovery.config:DiscoverConfig",
        "commands.discover:run_discovery",
    ),
    "verify": Command("Judge one construction exactly.", "commands.discover:VerifyConfig", "commands.discover:verify"),
    "pretrain-embedded": Command(
        "Make the embedded policy from nothing.", "recipes.pretrain:PretrainConfig", "recipes.pretrain:pretrain"
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """The entry point of `veritune`. Exit codes: 2 for settings, 1 for failures, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    build_app(chosen)(arguments, prog_name="veritune")


def build_app(chosen: str | None = None) -> typer.Typer:
    """The app. Only the `chosen` command gets its flags, so that `veritune --help` imports none of them."""
    app = typer.Typer(
        help="Post-train reasoning language models with verified rewards.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version_option)
    for name, command in COMMANDS.items():
        function = _with_flags(name, command) if name == chosen else _placeholder
        app.command(name, help=command.help)(function)
    return app


def _version_option(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _placeholder() -> None:
    raise AssertionError("a command that was not chosen cannot run")


def _with_flags(name: str, command: Command) -> Callable[..., None]:
    """A function whose signature has one flag a field, from which Typer makes the command."""
    config_class, function = _load(command.config), _load(command.function)

    def call(debug: bool, config: Path | None = None, **flags: Any) -> None:
        given = {field: value for field, value in flags.items() if value is not None}
        _exit_cleanly(lambda: function(_resolve(name, config_class, config, given)), debug)

    call.__signature__ = inspect.Signature(_parameters(config_class))  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters(config_class)}
    return call


def _load(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"veritune.{module}"), attribute)


def _parameters(config_class: type) -> list[inspect.Parameter]:
    documentation, kinds = configs.field_documentation(config_class), configs.field_types(config_class)
    parameters = []
    for field in _nearest_first(config_class):
        kind, text = kinds[field.name], documentation[field.name]
        if field.metadata.get("argument"):
            required = field.default is dataclasses.MISSING
            default: Any = typer.Argument(... if required else field.default, help=text, metavar=field.name.upper())
        else:
            default = typer.Option(
                None,
                *_flag_names(field.name, kind),
                help=f"{text}{_allowed(kind)} [{_shown_default(field)}]",
                metavar=_metavar(kind),
                show_default=False,
            )
        parameters.append(_parameter(field.name, _flag_type(kind, bool(field.metadata.get("argument"))), default))
    from_file = typer.Option(None, "--config", help="A TOML file of these settings; flags go over it.", metavar="FILE")
    debug = typer.Option(False, "--debug", help="Show the traceback of an error.")
    return [*parameters, _parameter("config", Path | None, from_file), _parameter("debug", bool, debug)]


def _nearest_first(config_class: type) -> list[dataclasses.Field]:
    """The fields that the class itself declares, then its parents': what a command is about comes first in its help."""
    distance: dict[str, int] = {}
    for steps, parent in enumerate(config_class.__mro__):
        for name in inspect.get_annotations(parent):
            distance.setdefault(name, steps)
    return sorted(dataclasses.fields(config_class), key=lambda field: distance[field.name])


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    return kind


def _flag_type(kind: Any, is_argument: bool) -> Any:
    kind = _without_none(kind)
    if is_argument:
        return list[Path] if typing.get_origin(kind) is tuple else kind
    # Numbers are read here and not by the option parser, whose errors do not say what was given.
    return kind | None if kind in (bool, Path) else str | None


def _flag_names(name: str, kind: Any) -> list[str]:
    flag = name.replace("_", "-")
    return [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]


def _metavar(kind: Any) -> str | None:
    kind = _without_none(kind)
    if typing.get_origin(kind) is tuple:
        return "A,B,…"
    names = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return None if kind is bool else names.get(kind, "NAME")


def _allowed(kind: Any) -> str:
    kind = _without_none(kind)
    return f" One of {', '.join(map(str, typing.get_args(kind)))}." if typing.get_origin(kind) is typing.Literal else ""


def _shown_default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(map(str, field.default)) or "none"
    return "unset" if field.default in (None, "") else str(field.default)


def _resolve(name: str, config_class: type, file: Path | None, flags: Mapping[str, Any]) -> Any:
    """The file's settings with the flags over them, as a config."""
    kinds = configs.field_types(config_class)
    values = configs.read_toml(file) if file else {}
    for field, value in flags.items():
        values[field] = _from_flag(kinds[field], value)
    return configs.from_mapping(config_class, values, str(file) if file and not flags else name)


def _from_flag(kind: Any, value: Any) -> Any:
    """Text from the command line as plain data of the field's kind, as far as it reads as such."""
    kind = _without_none(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, str):
        item = typing.get_args(kind)[0]
        return [_from_flag(item, part.strip()) for part in value.split(",") if part.strip()]
    if typing.get_origin(kind) is typing.Literal:
        return next((allowed for allowed in typing.get_args(kind) if str(allowed) == value), value)
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            return value
    return value


def _exit_cleanly(action: Callable[[], int | None], debug: bool) -> None:
    """Run a command; its errors become one line and an exit code, or a traceback with --debug."""
    try:
        code = action()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        message = str(error) if isinstance(error, VerituneError) else f"{type(error).__name__}: {error} (see --debug)"
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        raise typer.Exit(error.exit_code if isinstance(error, VerituneError) else 1) from None
    if code:
        raise typer.Exit(code)
