"""The event log: the one record of a run, append-only, flushed to the disk before anything depends on it.

Every other output is derived from it. A line is one JSON object with `type`, `time` (Unix) and `elapsed` (seconds of
the run, across resumes).
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from veritune.core.errors import ConfigError, DataError

EVENTS_FILE = "events.jsonl"
Event = dict[str, Any]


def read_events(folder: Path) -> list[Event]:
    """The events of a run; a last line that a crash tore off is no event.

    Raises DataError for any other line that is not a JSON object.
    """
    return _parse((folder / EVENTS_FILE).read_bytes(), folder / EVENTS_FILE)


def _parse(data: bytes, path: Path) -> list[Event]:
    events = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(event, dict) or "type" not in event:
            raise DataError(f"{path}, line {number}: not an event")
        events.append(event)
    return events


class EventLog:
    """The open log of one run, safe to append to from several threads; only one process can hold it."""

    def __init__(self, folder: Path, *, resume: bool, secrets: Sequence[str] = ()) -> None:
        """Creates the log, or with `resume` continues it. The `secrets` are blotted out of whatever is written."""
        path = folder / EVENTS_FILE
        if resume and not path.exists():
            raise ConfigError(f"resume is set, but {path} does not exist; there is no run to continue")
        if not resume and path.exists():
            raise ConfigError(f"run is {folder}, which already holds a run; resume it, or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # prompts and answers are nobody else's
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"run is {folder}, which is being written by another process") from None
        self._file.seek(0)
        data = self._file.read()
        self._file.truncate(data.rfind(b"\n") + 1)
        self.events = _parse(data, path)
        self._secrets = [json.dumps(secret)[1:-1].encode() for secret in secrets]
        self.lock = threading.RLock()
        """Held while an event depends on what the log says."""
        self._elapsed_before = self.events[-1]["elapsed"] if self.events else 0.0
        self._opened = time.monotonic()

    def elapsed(self) -> float:
        """Seconds that the run has taken, those before a resume included."""
        return float(self._elapsed_before + time.monotonic() - self._opened)

    def append(self, event_type: str, **fields: Any) -> None:
        """Writes one event; on return it is on the disk."""
        with self.lock:
            event = {"type": event_type, "time": time.time(), "elapsed": self.elapsed(), **fields}
            line = json.dumps(event).encode()
            for secret in self._secrets:
                line = line.replace(secret, b"[key]")
            self._file.write(line + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.events.append(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
