"""A task whose rewards are right only if eight of them are being computed at once."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from veritune.core.types import Score


@dataclass(frozen=True)
class MeetingTask:
    """Every reward waits until as many as eight processes have left their number in the folder."""

    folder: str

    def rewards(self, pairs):
        Path(self.folder, str(os.getpid())).touch()
        while len(os.listdir(self.folder)) < 8:
            time.sleep(0.01)
        return [Score(1.0, 1.0, 1.0) for _ in pairs]
