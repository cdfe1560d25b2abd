"""The settings of a discovery run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from veritune.core.config import fill_tables, require
from veritune.core.errors import ConfigError
from veritune.core.http import EndpointSettings
from veritune.core.registry import look_up
from veritune.core.tables import table

Strategy = Literal["prompt", "refine", "best-of-n", "islands"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_MAX_ISLANDS = 4
_DEFAULT_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class ModelSettings(EndpointSettings):
    """The model that writes the programs."""

    concurrency: int = 4
    """Requests and candidate programs under way at once."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The shipped search."""

    concurrency: int = 4
    """Candidate programs under way at once."""

    def __post_init__(self) -> None:
        require(self, "concurrency", self.concurrency >= 1, "at least 1")


def engine_settings(proposer: str) -> type:
    """The settings of a proposer by name."""
    return look_up("proposer", proposer, {"model": ModelSettings, "search": SearchSettings})


@dataclass(frozen=True)
class DiscoverConfig:
    """One generate-verify-refine run on one problem; the strategies combine freely."""

    problem: str = field(default="kissing", metadata={"argument": True})
    """The problem's family, with further sizes after a colon where it has them (covering_design:6,5)."""
    dimension: int = 11
    """The problem's size: dimension, side of the grid, marks of the ruler or points of the design."""
    run: Path | None = None
    """The run folder; default: runs/ and a name made of problem, dimension and time."""
    resume: bool = False
    """Continue the run in the run folder: no answered request is asked again."""
    proposer: Literal["model", "search"] = "model"
    """Who writes the programs: a language model, or the shipped search (kissing only, no model needed)."""
    engine_settings: Any = table("proposer", "veritune.discovery.config:engine_settings")
    """The settings of whoever it is."""
    strategy: tuple[Strategy, ...] = ("refine",)
    """prompt: the statement alone; refine: the last verdict and the best program go back; best-of-n; islands."""
    samples: int = 4
    """Answers to each prompt under best-of-n."""
    islands: int = 2
    """Populations under islands, 1 to 4."""
    migration_interval: int = 3
    """Rounds between migrations of each island's best program to the next island."""
    rounds: int | None = None
    """Rounds of the whole run, those before a resume included; default: 10 with refine or islands, else 1."""
    token_budget: int | None = None
    """No request starts once this many tokens (prompts and answers) are used."""
    time_budget_seconds: float | None = None
    """No request starts or goes on after this much wall time, that before a resume included."""
    cost_budget: float | None = None
    """No request starts once this much (US dollars, by the two prices) is spent."""
    input_price: float = 0.0
    """US dollars for a million prompt tokens."""
    output_price: float = 0.0
    """US dollars for a million answer tokens."""
    stop_at_score: int | None = None
    """The run ends after the round that reaches this score."""
    temperature: float = 1.0
    """Of the model's sampling."""
    max_answer_tokens: int = 16384
    """Tokens of one answer at most."""
    program_seconds: float = 60.0
    """Wall-clock limit of one candidate program."""
    program_memory_mb: int = 2048
    """Memory limit of one candidate program."""
    verification_seconds: float = 120.0
    """Wall-clock limit of the verification of one candidate."""
    verification_memory_mb: int = 4096
    """Memory limit of the verification of one candidate."""
    unsafe_no_sandbox: bool = False
    """Run candidate programs also where Landlock or seccomp is missing, with the layers that remain."""
    seed: int = 0
    """Of the choice of parents and of the search."""

    def __post_init__(self) -> None:
        fill_tables(self)
        if self.resume and self.run is None:
            raise ConfigError("resume is set, but run is not; it must name the folder of the run to continue")
        if self.proposer == "search" and self.problem != "kissing":
            raise ConfigError(
                f"proposer is 'search' with problem {self.problem!r}; the shipped search knows kissing only"
            )
        unknown = [name for name in self.strategy if name not in STRATEGIES]
        if unknown or not self.strategy:
            raise ConfigError(f"strategy is {self.strategy!r}; it must name one or more of {', '.join(STRATEGIES)}")
        if not 1 <= self.islands <= _MAX_ISLANDS:
            raise ConfigError(f"islands is {self.islands}; it must lie between 1 and {_MAX_ISLANDS}")
        for name in (
            *("samples", "migration_interval", "max_answer_tokens", "rounds"),
            *("program_memory_mb", "verification_memory_mb"),
        ):
            value = getattr(self, name)
            require(self, name, value is None or value >= 1, "at least 1")
        for name in (
            *("program_seconds", "verification_seconds"),
            *("token_budget", "time_budget_seconds", "cost_budget"),
        ):
            value = getattr(self, name)
            require(self, name, value is None or 0 < value < math.inf, "positive and finite")
        for name in ("temperature", "input_price", "output_price"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")

    @property
    def samples_per_prompt(self) -> int:
        return self.samples if "best-of-n" in self.strategy else 1

    @property
    def rounds_in_all(self) -> int:
        if self.rounds is not None:
            return self.rounds
        return _DEFAULT_ROUNDS if {"refine", "islands"} & set(self.strategy) else 1

    @property
    def populations(self) -> int:
        return self.islands if "islands" in self.strategy else 1
