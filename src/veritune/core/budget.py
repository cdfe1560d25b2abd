"""A budget of wall-clock time: which update is the last that leaves room for its validation and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARGIN = 1.25
"""What is still to come may take this much longer than what was seen."""
RECENT = 5
"""Updates change their pace with the length of responses, so that only the last few tell the next one's."""


@dataclass
class Pace:
    """Seconds that the parts of a run took, each in the order in which they came."""

    updates: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    checkpoints: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Pace:
        """The pace of a run that is resumed, from its rows of metrics."""
        not_updates = ("seconds_validate", "seconds_elapsed")
        stages = [[row[key] for key in row if key.startswith("seconds_") and key not in not_updates] for row in rows]
        return cls(
            updates=[sum(seconds) for seconds in stages if seconds],
            validations=[row["seconds_validate"] for row in rows if "seconds_validate" in row],
        )

    def validation(self) -> float:
        """Seconds to allow for a validation."""
        return MARGIN * max(self.validations[-RECENT:], default=0.0)

    def updates_left(self, seconds: float) -> float:
        """How many more updates end early enough for one more validation and checkpoint to end within `seconds`.

        One while none has been seen, if there is time for a validation after it; infinity for infinite seconds.
        """
        if seconds == math.inf:
            return math.inf
        if not self.updates:
            return 1 if seconds > self.validation() else 0
        update = MARGIN * max(self.updates[-RECENT:])
        # Before the first checkpoint, nothing is known of what one takes but the machine's speed.
        checkpoint = MARGIN * max(self.checkpoints[-RECENT:], default=update)
        return max(0, math.floor((seconds - self.validation() - checkpoint) / update))
