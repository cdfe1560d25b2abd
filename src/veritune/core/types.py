"""The records that cross a stage, and the two protocols that recipes see.

Data moves in one direction: Example -> prompt ids -> Completion -> Score -> Rollout -> tensors. Every record is
frozen and slotted, so that a stage cannot reach back and change what an earlier one said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from veritune.core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "eos", "length"]
REWARD_FAILURES = ("timeout", "worker died", "reward failed")
"""The rules of a Score whose reward ran out of time, lost its process twice, or raised or returned no finite number."""
Pairs = Sequence[tuple[str, Any]]
"""Responses, each with the ground truth of its example."""


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of a task.

    >>> Example("countdown-7", "Use 9, 5, 18 to make 4.", {"numbers": [9, 5, 18], "target": 4})
    """

    id: str
    question: str
    ground_truth: Any
    """What the task's reward compares with: a string, or a dict such as {"numbers": [...], "target": 4}."""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy decoding.

    >>> Sampling(temperature=1.0, max_tokens=256, stop=("</answer>",), n=8, seed=3)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    min_tokens: int = 0
    """Tokens that come before one may end the completion, as transformers and vLLM count them."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion as soon as its text contains one; the string stays in the completion."""
    n: int = 1
    """Completions per prompt; siblings are always drawn differently."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens ({self.max_tokens})"
            )
        if self.n < 1:
            raise ConfigError(f"n is {self.n}; it must be at least 1")
        if any(not string for string in self.stop):
            raise ConfigError(f"stop is {self.stop!r}; every stop string must have at least one character")

    def end_of_stop(self, text: str) -> int | None:
        """Where the first stop string to be completed in `text` ends; None where it holds none."""
        return min((text.find(string) + len(string) for string in self.stop if string in text), default=None)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response, in the very ids that were sampled: training never re-tokenises generated text.

    >>> Completion((5, 9), (17, 3), " 18-9</answer>", (-0.1, -0.7), "stop", 12)
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """Response ids, the stopping token included."""
    text: str
    logprobs: tuple[float, ...]
    """log p(id) of each response id under the distribution it was sampled from (after temperature and top-p)."""
    finish_reason: FinishReason
    weights_version: int


@dataclass(frozen=True, slots=True)
class Score:
    """What a grader says of one response.

    >>> Score(reward=1.0, format_reward=1.0, answer_reward=1.0, extracted="18-9-5", rule="equation")
    """

    reward: float
    format_reward: float
    answer_reward: float
    extracted: str | None = None
    """The text that was judged, or None if there was nothing to judge."""
    rule: str = ""
    """The name of the rule that decided, so that a person can see why an answer was refused."""
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Where the reward is a weighted sum, what each of its rewards gave, by name and without its weight."""

    @property
    def failed(self) -> bool:
        """Whether the reward itself failed on this response, which then scores 0: the rule says how."""
        return self.rule.startswith(REWARD_FAILURES)


RewardFunction = Callable[[Pairs], list[Score]]
"""A batch of (response, ground truth) pairs -> their Scores, in order."""


@dataclass(frozen=True, slots=True)
class Group:
    """One example with its n responses and their scores, side by side."""

    example: Example
    completions: Sequence[Completion]
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored completion and what it is worth within its group. Reward and advantage are two fields."""

    example: Example
    completion: Completion
    score: Score
    advantage: float


class Task(Protocol):
    """Problems, how they are asked, and how a response is paid."""

    name: str
    stop: tuple[str, ...]

    def examples(self, split: str) -> Sequence[Example]:
        """The problems of "train" or "validation", in a fixed order."""
        ...

    def prompt(self, example: Example) -> str:
        """The text that the policy continues."""
        ...

    def rewards(self, pairs: Pairs) -> list[Score]:
        """The Scores of (response text, ground truth) pairs, in their order: pure functions of text.

        A malformed answer scores 0. A run calls it in grading processes, for one pair at a time, so that a pair for
        which it raises or hangs costs no other: `Score.failed`.
        """
        ...


@runtime_checkable
class TracedTask(Task, Protocol):
    """A task that can also write responses to its own training problems, to fine-tune on."""

    def traces(self, seed: int) -> Sequence[tuple[Example, str]]:
        """Training problems with a response each, right and wrong ones, the same for the same seed."""
        ...


class Engine(Protocol):
    """Something that samples completions and can be given new weights."""

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts in, P lists of `sampling.n` completions out, in the same order."""
        ...

    def load_weights(self, model: torch.nn.Module, version: int) -> None:
        """Serve `model`'s weights from now on, as `version`; raises EngineError where that cannot be done."""
        ...

    def close(self) -> None:
        """Free everything; calling it twice is harmless."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, all that is known of it before a model is loaded, and how it is made."""

    exact_log_probs: ClassVar[bool] = False
    """Whether its log-probabilities are the trainer's: the same arithmetic on the same weights."""
    can_load_weights: ClassVar[bool] = True
    """Whether it can be given new weights, so that a policy can be trained on what it samples."""
    shares_device: ClassVar[bool] = True
    """Whether it samples on the trainer's own device, whose memory the two share."""

    @property
    def number_type(self) -> str:
        """The number type that it computes in; "auto" is the policy's."""
        return "auto"

    def create(self, policy: Any, workers: Any) -> Engine:
        """The engine that serves `policy` (model.policy.Policy), with the help of `workers` (model.parallel.Workers)
        if it can.
        """
        raise NotImplementedError


def require_lengths(prompts_ids: Sequence[Sequence[int]], longest: int) -> None:
    """Refuse a prompt that is empty or leaves no room for one response token in `longest` positions."""
    for index, prompt in enumerate(prompts_ids):
        if not 1 <= len(prompt) < longest:
            raise EngineError(
                f"prompt {index} has {len(prompt)} tokens; it must have 1 or more and fewer than the engine's {longest}"
            )
