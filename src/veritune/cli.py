"""The command line: every command is a config dataclass and a function, and its flags are generated from the class."""

from __future__ import annotations

import os

# Idle OpenMP threads must sleep: on shared cores two spinning threads are slower than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import dataclasses
import importlib
import io
import itertools
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from veritune import __version__
from veritune.core import config as configs
from veritune.core.errors import VerituneError, blot_logins
from veritune.core.signals import signal_of, terminations_raised
from veritune.core.tables import flatten, overlay, short_names, tables


@dataclass(frozen=True)
class Command:
    """One command: its config class and its function by name. Both are imported only when it is called."""

    help: str
    config: str
    """module:class, below veritune."""
    function: str
    """module:function, below veritune; takes the config, and returns an exit code or None."""


COMMANDS = {
    "demo": Command("Watch the embedded policy learn Countdown.", "recipes.config:GRPOConfig", "commands.train:grpo"),
    "eval": Command("Measure a policy as it is.", "recipes.config:EvalConfig", "commands.train:evaluate"),
    "best-of-n": Command(
        "Measure pass@N, Best@N and majority vote.", "recipes.config:BestOfNConfig", "commands.train:best_of_n"
    ),
    "sft": Command("Fine-tune a policy on traces.", "recipes.config:SFTConfig", "commands.train:sft"),
    "expert-iteration": Command(
        "Train on a policy's own right answers.",
        "recipes.config:ExpertIterationConfig",
        "commands.train:expert_iteration",
    ),
    "grpo": Command("Train with GRPO or one of its variants.", "recipes.config:GRPOConfig", "commands.train:grpo"),
    "leaderboard": Command(
        "Train with GRPO for a given time, by rules.",
        "commands.leaderboard:LeaderboardConfig",
        "commands.train:leaderboard",
    ),
    "plan": Command(
        "Plan memory and time of GRPO before anything is loaded.",
        "commands.plan:PlanConfig",
        "commands.plan:print_plan",
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
        "Make the embedded policy from nothing.", "recipes.config:PretrainConfig", "recipes.pretrain:pretrain"
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """The entry point of `veritune`.

    Exit codes: 2 for settings, 1 for failures, 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text, as on standard error
    build_app().main(sys.argv[1:] if arguments is None else arguments, prog_name="veritune")


def build_app() -> click.Group:
    """The app. A command gets its flags when it is parsed, so that `veritune --help` imports none of them."""
    app = App(
        help="Post-train reasoning language models with verified rewards.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    click.version_option(__version__, message="%(version)s", help="Print the version and exit.")(app)
    for name, command in COMMANDS.items():
        app.add_command(ConfigCommand(name, command))
    return app


class App(click.Group):
    """Lists the commands in the table's order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)


class ConfigCommand(click.Command):
    """A command with one flag for each setting of its config, those of the chosen tables included."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name, help=command.help, callback=self._call)
        self.command = command
        self.settings: dict[str, configs.Setting] = {}
        """Each setting by the name of its parameter, which has no dots."""
        self.short_flags: dict[str, str] = {}
        """Flags that leave out the table's name, and the whole ones."""
        self.shows_all = False
        """Whether the help shows the rare settings too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _exit_cleanly(lambda: self._read_settings(args), "--debug" in args)
        return super().parse_args(ctx, [self._whole_flag(arg) for arg in args])

    def _whole_flag(self, arg: str) -> str:
        """`--max-rows=64` as `--engine-max-rows=64`; what is no short flag as it is."""
        flag, equals, value = arg.partition("=")
        return self.short_flags.get(flag, flag) + equals + value

    def _read_settings(self, args: Sequence[str]) -> None:
        config_class = _load(self.command.config)
        file = _last_given(args, "--config")
        chosen = flatten(configs.read_toml(Path(file))) if file else {}
        for table in tables(config_class):
            if given := _last_given(args, _flag(table.choice)):
                chosen[table.choice] = given
        found = configs.settings(config_class, chosen)
        self.short_flags = {
            _flag(no + short): _flag(no + full)
            for short, full in short_names(config_class, chosen).items()
            for no in ("", "no-")
        }
        self.settings = {setting.name.replace(".", "__"): setting for setting in found}
        self.params = [
            *(_parameter(name, setting) for name, setting in self.settings.items()),
            click.Option(["--config"], help="A TOML file of these settings; flags go over it.", metavar="FILE"),
            click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
        ]
        if any(setting.rare for setting in found):
            self.params.append(_help_all_option())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Titled sections of settings; the rare ones only where they are asked for."""
        sections: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for parameter in self.get_params(ctx):
            setting, record = self.settings.get(parameter.name or ""), parameter.get_help_record(ctx)
            if setting and setting.rare and not self.shows_all:
                hidden += 1
            elif record and isinstance(parameter, click.Option):
                sections.setdefault(setting.section if setting else "", []).append(record)
        options = sections.pop("", [])
        for title, records in [*sections.items(), ("Options", options)]:
            with formatter.section(title):
                formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more settings: veritune {self.name} --help-all")

    def _call(self, debug: bool, config: str | None = None, **flags: Any) -> None:
        given = {
            self.settings[name].name: _from_flag(self.settings[name].kind, value)
            for name, value in flags.items()
            if value not in (None, ())
        }
        _exit_cleanly(lambda: _load(self.command.function)(self._resolve(config, given)), debug)

    def _resolve(self, file: str | None, given: Mapping[str, Any]) -> Any:
        """The file's settings with the flags over them, as a config."""
        config_class = _load(self.command.config)
        values = overlay(config_class, flatten(configs.read_toml(Path(file))) if file else {}, given)
        return configs.from_mapping(config_class, values, file if file and not given else str(self.name))


def _help_all_option() -> click.Option:
    def show(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            assert isinstance(ctx.command, ConfigCommand)
            ctx.command.shows_all = True
            click.echo(ctx.get_help())
            ctx.exit()

    words = "Show this message with every setting, and exit."
    return click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=words)


def _load(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"veritune.{module}"), attribute)


def _last_given(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before there is a parser to ask."""
    values = [after for arg, after in itertools.pairwise(args) if arg == flag]
    values += [arg.removeprefix(f"{flag}=") for arg in args if arg.startswith(f"{flag}=")]
    return values[-1] if values else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-').replace('.', '-')}"


def _parameter(name: str, setting: configs.Setting) -> click.Parameter:
    kind, text, required = _without_none(setting.kind), setting.documentation, setting.default is dataclasses.MISSING
    many = typing.get_origin(kind) is tuple
    if setting.is_argument:
        metavar = setting.name.upper() + ("..." if many else "")
        return click.Argument([name], required=required, nargs=-1 if many else 1, help=text, metavar=metavar)
    flag = _flag(setting.name)
    shown = f"{text}{_allowed(kind)} [{_shown_default(setting.default)}]"
    if kind is bool:
        return click.Option([name, f"{flag}/{_flag('no-' + setting.name)}"], default=None, help=shown)
    # Every value is read here and not by the option parser, whose errors do not say what was given.
    return click.Option([name, flag], multiple=many, help=shown, metavar=_metavar(kind))


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    return kind


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "A,B,…"
    return {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(kind, "NAME")


def _allowed(kind: Any) -> str:
    return f" One of {', '.join(map(str, typing.get_args(kind)))}." if typing.get_origin(kind) is typing.Literal else ""


def _shown_default(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "unset" if default in (None, "") else str(default)


def _from_flag(kind: Any, value: Any) -> Any:
    """Text from the command line as plain data of the field's kind, as far as it reads as such."""
    kind = _without_none(kind)
    if typing.get_origin(kind) is tuple:  # a flag may be given several times, and each time hold several
        item = typing.get_args(kind)[0]
        parts = [part.strip() for each in value for part in ([each] if item is Path else each.split(","))]
        return [_from_flag(item, part) for part in parts if part]
    if typing.get_origin(kind) is typing.Literal:
        return next((allowed for allowed in typing.get_args(kind) if str(allowed) == value), value)
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            return value
    return value


def _exit_cleanly(action: Callable[[], int | None], debug: bool) -> None:
    """Run a command; its errors become one line and an exit code, or a traceback with --debug."""
    try:
        with terminations_raised():
            code = action()
    except KeyboardInterrupt as stopped:
        click.echo("stopped", err=True)
        raise click.exceptions.Exit(128 + signal_of(stopped)) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        message = str(error) if isinstance(error, VerituneError) else f"{type(error).__name__}: {error} (see --debug)"
        click.echo(f"error: {blot_logins(' '.join(message.split()))}", err=True)
        raise click.exceptions.Exit(error.exit_code if isinstance(error, VerituneError) else 1) from None
    if code:
        raise click.exceptions.Exit(code)
