"""The settings of every recipe, apart from the recipes: a command's help shows them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from veritune.core.config import CommonConfig, Rare, Section, TrainingConfig, require
from veritune.core.errors import ConfigError
from veritune.trainer.config import PolicyGradientConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CommonConfig):
    """Settings of `veritune eval`."""

    split: Annotated[Literal["validation", "train"], Section("Measuring")] = "validation"
    """Which problems to measure on."""
    show: int = 0
    """How many examples to print."""
    category: Literal["all", "correct", "format1", "format0"] = "all"
    """Which to print: right, well-formed but wrong, not well-formed, or all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "show", self.show >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig(CommonConfig):
    """Settings of `veritune best-of-n`."""

    samples: Annotated[tuple[int, ...], Section("Best of N")] = (1, 4, 8, 16)
    """The values of N; the largest is how many responses are sampled for each prompt."""
    reuse: Path | None = None
    """An eval run of the same policy and problems, whose responses are the first sample of each prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "samples", bool(self.samples) and min(self.samples) >= 1, "a list of numbers, each at least 1")
        require(self, "temperature", self.temperature > 0, "positive: greedy samples are all the same")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingConfig):
    """Settings of `veritune sft`; the defaults fine-tune the embedded policy on two CPU cores."""

    traces: Annotated[Path | None, Section("Fine-tuning")] = None
    """A JSONL file of {prompt, response}, with ground_truth for filter_correct; default: the task's own traces.

    With chat, a prompt is sent as a user's message here too."""
    unique_examples: int | None = None
    """How many traces to take, in a seeded random order; default: all."""
    filter_correct: bool = False
    """Keep only traces whose response the task's reward pays in full."""
    epochs: int = 1
    """Passes over the traces."""
    batch_size: int = 64
    """Traces of one optimiser step."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "unique_examples", self.unique_examples is None or self.unique_examples >= 1, "at least 1")
        require(self, "epochs", self.epochs >= 1, "at least 1")
        require(self, "batch_size", self.batch_size >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class ExpertIterationConfig(TrainingConfig):
    """Settings of `veritune expert-iteration`; the defaults train the embedded policy on two CPU cores."""

    steps: Annotated[int, Section("Expert iteration")] = 5
    """Rounds of sampling and fine-tuning."""
    questions_per_step: int = 512
    """Prompts sampled each round (D_b)."""
    group_size: int = 8
    """Responses sampled for each prompt (G)."""
    epochs_per_step: int = 1
    """Passes of fine-tuning over the responses that were right."""
    starting_point: Literal["last", "first"] = "last"
    """Which policy a round fine-tunes: the last round's, or (ReST-EM) the first, by a schedule over its updates."""
    batch_size: int = 64
    """Responses of one optimiser step."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    min_tokens: int = 4
    """Tokens that come before one may end the response: an empty response cannot be trained on."""
    deduplicate: bool = True
    """Of equal right responses to the same prompt, keep one."""
    validate_every: int = 1
    """Rounds between validations."""
    checkpoint_every: int = 1
    """Rounds between checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "temperature", self.temperature > 0, "positive: greedy siblings are all the same")
        rounds = self.starting_point == "last"
        require(self, "warmup_steps", self.warmup_steps <= self.steps or not rounds, f"at most steps ({self.steps})")
        for name in ("steps", "questions_per_step", "group_size", "epochs_per_step", "batch_size"):
            require(self, name, getattr(self, name) >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """Settings of `veritune grpo`; the defaults train the embedded policy on two CPU cores."""

    steps: Annotated[int, Section("GRPO")] = 60
    """Rollout batches to sample and train on."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    rollout_batch_size: int = 256
    """Responses sampled each step: prompts times group_size."""
    group_size: int = 8
    """Responses sampled for each prompt."""
    train_batch_size: int = 256
    """Responses of one optimiser step; smaller than rollout_batch_size makes later steps off-policy."""
    epochs_per_rollout_batch: int = 1
    """Passes over each rollout batch."""
    baseline: Literal["group_mean", "leave_one_out", "max_rl"] = "group_mean"
    """What a response is compared with: its group's mean, the mean of the others (RLOO), or MaxRL's scaled mean."""
    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    advantage_eps: Rare[float] = 1e-6
    """Added to the group's standard deviation."""
    resample_rounds: int = 0
    """How often groups whose rewards are all equal are drawn again with other prompts (dynamic sampling)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "steps", self.steps >= 1, "at least 1")
        require(self, "warmup_steps", self.warmup_steps <= self.steps, f"at most steps ({self.steps})")
        for name in ("rollout_batch_size", "group_size", "train_batch_size", "epochs_per_rollout_batch"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "temperature", self.temperature > 0, "positive: greedy rollouts have nothing to compare")
        require(self, "top_p", self.top_p == 1, "1 while training: the loss scores the whole distribution")
        require(
            self,
            "rollout_batch_size",
            self.rollout_batch_size % self.group_size == 0,
            f"a multiple of group_size ({self.group_size})",
        )
        require(
            self,
            "train_batch_size",
            self.train_batch_size >= self.group_size,
            f"at least group_size ({self.group_size})",
        )
        require(
            self,
            "train_batch_size",
            self.rollout_batch_size % self.train_batch_size == 0,
            f"a divisor of rollout_batch_size ({self.rollout_batch_size})",
        )
        require(self, "advantage_eps", self.advantage_eps >= 0, "0 or more")
        require(self, "resample_rounds", self.resample_rounds >= 0, "0 or more")
        if self.baseline == "max_rl" and self.normalize_by_std:
            raise ConfigError("normalize_by_std is True; baseline max_rl divides by the group's mean and needs it off")
        if self.group_size < 2 and self.loss.baseline:
            raise ConfigError(
                f"group_size is {self.group_size}; loss_type {self.loss_type} compares siblings, at least 2"
            )
        if self.loss.off_policy and not self.off_policy:
            raise ConfigError(
                f"loss_type is {self.loss_type!r}, but every update is on-policy, so there is no old policy; set "
                "epochs_per_rollout_batch above 1 or train_batch_size below rollout_batch_size, or use "
                "reinforce_with_baseline"
            )

    @property
    def off_policy(self) -> bool:
        """Whether some update uses rollouts of weights older than its own."""
        return self.epochs_per_rollout_batch > 1 or self.train_batch_size < self.rollout_batch_size


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of `veritune pretrain-embedded`."""

    output: Path = Path("embedded_policy")
    """The folder that the policy is written to."""
    seed: int = 0
    """Seed of the initial weights, the problems and the traces."""
    tokens: int = 14_000_000
    """Tokens to train on, prompts included."""
    careful: float = 0.6
    """Share of the tokens, at the beginning, whose traces search until they find; the rest are careless."""
    learning_rate: float = 2e-3
    """Peak learning rate: reached after 50 steps, held for 60% of the tokens, then falling linearly."""
    batch_tokens: int = 4096
    """Positions of one optimiser step, padding included."""
    problems: int = 8192
    """Distinct training problems that the traces are written for; none is held out."""
    r1_zero: float = 0.12
    """Share of the traces whose prompt wears the r1_zero wording instead of the compact one."""
    threads: int | None = None
    """CPU threads for torch; default: OMP_NUM_THREADS, or one for each core."""

    def __post_init__(self) -> None:
        require(self, "seed", self.seed >= 0, "0 or more")
        require(self, "learning_rate", self.learning_rate > 0, "positive")
        for name in ("careful", "r1_zero"):
            require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("tokens", "batch_tokens", "problems"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
