"""The prompts of one call, shared among servers that may be lost on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from veritune.core.errors import EngineError
from veritune.core.types import Completion, Sampling

MOST_ATTEMPTS = 5
"""How often a prompt's request may be the one that a server is dropped for."""


@dataclass(eq=False)
class Claim:
    index: int
    server: object


@dataclass
class SharedPrompts:
    """Which prompts wait, which are under way and where, and what has come back: each is answered exactly once."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    results: dict[int, list[Completion]] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._waiting = list(reversed(range(len(self.prompts))))
        self._claims: dict[int, Claim] = {}
        self._failures: Counter[int] = Counter()

    @property
    def over(self) -> bool:
        return self.failure is not None or len(self.results) == len(self.prompts)

    def wait_over(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.over, seconds)

    def claim(self, server: object, may_work: Callable[[], bool]) -> Claim | None:
        """The next prompt for `server`, waited for as long as another server may give one back; None to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or not may_work() or bool(self._waiting))
            if self.over or not may_work():
                return None
            claim = Claim(self._waiting.pop(), server)
            self._claims[claim.index] = claim
            return claim

    def deliver(self, claim: Claim, group: list[Completion]) -> None:
        """Take an answer, unless the claim was given back in the meantime."""
        with self._changed:
            if self._claims.get(claim.index) is claim:
                del self._claims[claim.index]
                self.results[claim.index] = group
                self._changed.notify_all()

    def give_back(self, server: object, reason: str, failed: Claim | None) -> None:
        """Let others have every prompt that `server` has not answered, unless `failed` is what kills servers."""
        with self._changed:
            for claim in [claim for claim in self._claims.values() if claim.server is server]:
                del self._claims[claim.index]
                self._waiting.append(claim.index)
                self._failures[claim.index] += claim is failed
                if self._failures[claim.index] == MOST_ATTEMPTS:
                    self.fail(EngineError(f"prompt {claim.index} failed {MOST_ATTEMPTS} times, at last: {reason}"))
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def collect(self) -> list[list[Completion]]:
        if self.failure is not None:
            raise self.failure
        return [self.results[index] for index in range(len(self.prompts))]
