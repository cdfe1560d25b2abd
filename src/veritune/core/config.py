"""Frozen configuration dataclasses: to TOML, from TOML, and their documentation.

A recipe's dataclass is the only place of a default and of its one-line docstring (the string under the field). The
command line, the run folder and the experiment files all go through here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from veritune.core.errors import ConfigError, blot_logins
from veritune.core.registry import allowed_words
from veritune.core.tables import NoSettings, flatten, full_names, table, tables
from veritune.core.types import EngineSettings

Config = TypeVar("Config")
Kind = TypeVar("Kind")
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which a path whose bytes are no text has."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Begins a titled section of the help, up to the next one or the class's end: Annotated[int, Section("Loss")]."""

    title: str


Rare = Annotated[Kind, "rare"]
"""The type of a setting that few users need: only the whole help shows it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every recipe is told: which policy, which problems, which machine, which folder."""

    policy: Annotated[str, Section("Policy and problems")] = "embedded"
    """The policy to start from: embedded, a model folder, or a hub id."""
    task: str = "countdown"
    """The problems and their reward: countdown, gsm8k, math, file, an installed one or package.module:Class."""
    task_settings: Any = table("task", "veritune.tasks:settings_class")
    """The settings of the task that was chosen."""
    prompt: str | None = None
    """A template's name (compact, r1_zero, question_only, …) or a file with {question} in it; default: the task's."""
    chat: bool = False
    """Send the prompt as a user's message in the model's own chat template; the default prompt is then plainer."""
    bos: Rare[Literal["auto", "always", "never"]] = "auto"
    """Start prompts with the tokenizer's BOS token; auto does where the tokenizer itself does, but not with chat."""
    reward: tuple[str, ...] = ()
    """The rewards that pay: r1_zero, r1_zero_strict, question_only, task or package.module:function, and a weight
    for each where there are several, as in r1_zero=1.0,my.module:brevity=0.2; default: the task's own."""
    reward_workers: Rare[int] = 2
    """Processes that compute rewards; more are started beside those whose answers take long, up to 16."""
    reward_seconds: Rare[float] = 2.0
    """Time limit of one answer's reward; past it the answer scores 0 and counts as failed."""
    run: Annotated[Path | None, Section("Run and machine")] = None
    """The run folder to write; default: runs/ and a name made of recipe, task, seed and time."""
    seed: int = 0
    """The seed that every random draw of the run is derived from."""
    device: str = "auto"
    """Where the policy lives: auto, cpu, cuda or cuda:index."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The weights' number type; auto is float32 on a CPU and bfloat16 on a GPU."""
    threads: Rare[int | None] = None
    """CPU threads for torch; default: OMP_NUM_THREADS, else one for the embedded policy, and one a core for others."""
    processes: int = 1
    """Processes that share every step's gradient and the native engine's rollouts, each with its threads (CPU)."""
    engine: Annotated[str, Section("Sampling")] = "native"
    """What samples: native (torch), vllm, vllm-server, api (measuring alone), or package.module:Class from outside."""
    engine_settings: EngineSettings = table("engine", "veritune.engines:settings_class")
    """The engine's own settings."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy and cannot be trained on."""
    top_p: Rare[float] = 1.0
    """Nucleus of the sampling distribution; training needs 1."""
    max_tokens: int = 320
    """Most tokens of a response."""
    min_tokens: Rare[int] = 0
    """Tokens that come before one may end the response."""
    validation_examples: Annotated[int, Section("Measuring and logging")] = 512
    """Held-out problems of a validation."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder (extra: tensorboard)."""
    wandb: bool = False
    """Also log to Weights & Biases (extra: wandb)."""

    def __post_init__(self) -> None:
        fill_tables(self)
        require(self, "reward_workers", 1 <= self.reward_workers <= 16, "between 1 and 16")
        require(self, "reward_seconds", 0 < self.reward_seconds < math.inf, "positive and finite")
        require(self, "seed", self.seed >= 0, "0 or more")
        require(self, "threads", self.threads is None or self.threads >= 1, "at least 1")
        require(self, "processes", self.processes >= 1, "at least 1")
        require(self, "temperature", 0 <= self.temperature < math.inf, "0 (greedy) or positive, and finite")
        require(self, "top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require(self, "max_tokens", self.max_tokens >= 1, "at least 1")
        require(self, "min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        require(self, "validation_examples", self.validation_examples >= 1, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(CommonConfig):
    """What every recipe that updates weights is told on top."""

    learning_rate: Annotated[float, Section("Optimiser")]
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    adam_beta1: Rare[float] = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Rare[float] = 0.95
    """AdamW's decay of the gradient's square."""
    weight_decay: float = 0.0
    """AdamW's weight decay of matrices."""
    clip_grad_norm: float = 1.0
    """The gradient is scaled down to this norm where it is larger."""
    microbatch_tokens: Annotated[int, Section("Memory")] = 576
    """Tokens that one forward and backward pass holds, shared prompts counted once; does not change the gradient."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass: far less memory, about a third more time."""
    validate_every: Annotated[int, Section("Validations, checkpoints and time")] = 10
    """Steps between validations; one before the first step and one after the last are always made."""
    checkpoint_every: int = 10
    """Steps between checkpoints; one after the last step is always made."""
    keep_checkpoints: Rare[int] = 2
    """How many of the newest checkpoints are kept."""
    budget_seconds: float | None = None
    """Stop in time for the last validation and checkpoint to end after this many seconds; default: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        trains = self.engine_settings.can_load_weights
        require(self, "engine", trains, "another while training: this one cannot be given weights")
        require(self, "learning_rate", 0 < self.learning_rate < float("inf"), "positive and finite")
        require(self, "warmup_steps", self.warmup_steps >= 0, "0 or more")
        require(self, "adam_beta1", 0 <= self.adam_beta1 < 1, "in [0, 1)")
        require(self, "adam_beta2", 0 <= self.adam_beta2 < 1, "in [0, 1)")
        require(self, "weight_decay", 0 <= self.weight_decay < math.inf, "0 or more, and finite")
        require(self, "clip_grad_norm", self.clip_grad_norm > 0, "positive")
        require(self, "budget_seconds", self.budget_seconds is None or self.budget_seconds > 0, "positive")
        for name in ("microbatch_tokens", "validate_every", "checkpoint_every", "keep_checkpoints"):
            require(self, name, getattr(self, name) >= 1, "at least 1")


def require(config: Any, field: str, holds: bool, allowed: str) -> None:
    """Refuse a config whose `field` is not what is `allowed`, by name and value."""
    if not holds:
        raise ConfigError(f"{field} is {getattr(config, field)!r}; it must be {allowed}")


def fill_tables(config: Any) -> None:
    """Give every table without settings its defaults; refuse one that does not belong to the choice."""
    for each in tables(type(config)):
        chosen, given = getattr(config, each.choice), getattr(config, each.field)
        settings_class = each.settings_class(chosen)
        if given is None or type(given) is NoSettings:
            # The config is frozen against everyone else.
            object.__setattr__(config, each.field, _build(settings_class, {}, each.choice, f"{each.name}."))
        elif type(given) is not settings_class:
            raise ConfigError(f"{each.field} is {given!r}; {each.choice} {chosen!r} takes {settings_class.__name__}")


# --- Documentation and types -------------------------------------------------------------------------------------


def field_documentation(config_class: type) -> dict[str, str]:
    """The docstring under each field, inherited ones included; empty where a class has no source."""
    documentation: dict[str, str] = {}
    for parent in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        except OSError:
            continue
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                documentation[statement.target.id] = " ".join(str(following.value.value).split())
    return documentation


def field_types(config_class: type) -> dict[str, Any]:
    """Each field's resolved type."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting as it is documented: a field of a config, or of one of its tables."""

    name: str
    """Its name, such as seed or engine.max_rows."""
    kind: Any
    default: Any
    """dataclasses.MISSING where it has none."""
    documentation: str
    section: str
    """The title that a command's help shows it under."""
    rare: bool = False
    """Whether only the whole help shows it."""
    is_argument: bool = False
    """Whether it is given without a flag."""


def settings(config_class: type, chosen: Mapping[str, Any]) -> list[Setting]:
    """Every setting of a config, those of the tables that `chosen` (names to values) or the defaults choose last.

    The fields that the class itself declares come first, then its parents': first comes what the class is about.
    """
    nested = {each.field: each for each in tables(config_class)}
    documentation, kinds = field_documentation(config_class), field_types(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    found: dict[str, Setting] = {}
    for parent in config_class.__mro__:
        hints, section = typing.get_type_hints(parent, include_extras=True), ""
        for name in inspect.get_annotations(parent):
            marks = getattr(hints[name], "__metadata__", ())
            section = next((mark.title for mark in marks if isinstance(mark, Section)), section)
            if name in fields and name not in found and name not in nested:
                text, is_argument = documentation.get(name, ""), bool(fields[name].metadata.get("argument"))
                setting = Setting(name, kinds[name], fields[name].default, text, section, "rare" in marks, is_argument)
                found[name] = setting
    of_tables = [
        dataclasses.replace(setting, name=f"{each.name}.{setting.name}", section=f"{each.choice} {choice}")
        for each in nested.values()
        for choice in [chosen.get(each.choice, each.default)]
        for setting in settings(each.settings_class(choice), {})
    ]
    return [*found.values(), *of_tables]


# --- From and to TOML --------------------------------------------------------------------------------------------


def from_mapping(config_class: type[Config], values: Mapping[str, Any], source: str) -> Config:
    """Build a config from plain values, such as TOML's. Raises ConfigError naming `source` and the setting."""
    values, filled = flatten(values), dict[str, Any]()
    for each in tables(config_class):
        convert(str, values.get(each.choice, each.default), f"{source}: {each.choice}")
    values = full_names(config_class, values, values)
    for each in tables(config_class):
        chosen = values.get(each.choice, each.default)
        prefix = f"{each.name}."
        inner = {name.removeprefix(prefix): values.pop(name) for name in list(values) if name.startswith(prefix)}
        filled[each.field] = _build(each.settings_class(chosen), inner, f"{source}: {each.choice} {chosen}", prefix)
    return _build(config_class, values, source, filled=filled)


def _build(
    config_class: type[Config],
    values: Mapping[str, Any],
    source: str,
    prefix: str = "",
    filled: Mapping[str, Any] = types.MappingProxyType({}),
) -> Config:
    """A config of plain `values`, with its tables `filled`; `prefix` stands before every name in an error."""
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.name not in filled}  # type: ignore[arg-type]
    kinds = field_types(config_class)
    for name in values:
        if name not in fields:
            allowed = allowed_words(f"{prefix}{name}", [f"{prefix}{field}" for field in fields])
            raise ConfigError(f"{source}: unknown setting {prefix + name!r}; {allowed}")
    converted = {name: convert(kinds[name], value, f"{source}: {prefix}{name}") for name, value in values.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{source}: setting {prefix + name!r} is missing; it has no default")
    try:
        return config_class(**converted, **filled)
    except ConfigError as error:
        if not prefix:
            raise
        raise ConfigError(f"{prefix}{error}") from None


def convert(kind: Any, value: Any, name: str) -> Any:
    """`value`, from TOML or from Python, as a field of type `kind`; ConfigError if it is of another type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return convert(kind, value, name)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{name} is {value!r}; {allowed_words(value, arguments)}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} is {value!r}; it must be a list")
        kinds = arguments[:1] * len(value) if len(arguments) == 2 and arguments[1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise ConfigError(f"{name} is {value!r}; it must have {len(kinds)} entries")
        return tuple(convert(each, item, name) for each, item in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; ConfigError if it is missing or broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def to_toml(config: Any) -> str:
    """A config as TOML, every field resolved but the logins of addresses; None is left out, and must be a default."""
    own = tables(type(config))
    inside = {each.field for each in own} | {each.choice for each in own if each.choice == each.name}
    text = _toml_lines(config, inside)
    for each in own:
        name = f"name = {_toml_value(getattr(config, each.choice))}\n" if each.choice == each.name else ""
        text += f"\n[{each.name}]\n{name}{_toml_lines(getattr(config, each.field))}"
    return text


def _toml_lines(config: Any, left_out: Collection[str] = ()) -> str:
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            assert field.default is None, f"{field.name} is None, which TOML cannot say"
        elif field.name not in left_out:
            line = f"{field.name} = {_toml_value(value)}\n"
            require(config, field.name, not SURROGATE.search(line), "text that UTF-8 can say")
            lines.append(line)
    return "".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, (str, Path)):  # a JSON string is a TOML basic string
        return json.dumps(blot_logins(str(value)), ensure_ascii=False)
    return repr(value) if isinstance(value, float) else json.dumps(value)  # inf and nan are TOML, Infinity is not
