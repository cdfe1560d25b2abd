"""One side of a comparison, as a process of its own that runs when it is asked to. Standard library alone.

Requests and answers are lines of JSON on the standard streams. A side that waits takes no time from the other, so
that sides can be run in turns; and a process that served one side only has that side's peak memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Json = dict[str, Any]


def take_over_streams() -> tuple[TextIO, TextIO]:
    """The streams for requests and answers; what libraries print from now on goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin, answers


def resident(field: str) -> float:
    """MiB that the kernel counts for this process: VmRSS now, VmHWM at most."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell {field}")


def clock() -> Json:
    """CPU seconds, of all threads of the process together, and wall seconds, each since some moment."""
    return {"cpu": time.process_time(), "wall": time.perf_counter()}


def difference(later: Json, earlier: Json) -> Json:
    return {name: later[name] - earlier[name] for name in later}


def timed(function: Callable[[], Any]) -> tuple[Any, Json]:
    """What `function` returns, and the seconds that it took."""
    began = clock()
    result = function()
    return result, difference(clock(), began)


class Requests:
    """The requests of one case, answered in order: `for request in requests: requests.answer(…)`.

    Everything resident at the first request is imports and policy; answers tell the peak above it.
    """

    def __init__(self) -> None:
        self._requests, self._answers = take_over_streams()
        self._base = 0.0

    def __iter__(self) -> Iterator[Json]:
        with contextlib.suppress(OSError):  # where the kernel lets nobody do it, the peak is that of the imports too
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._base = resident("VmRSS")
        self._send({"ready": True, "base_mib": self._base})
        for line in self._requests:
            yield json.loads(line)

    def answer(self, result: Json) -> None:
        self._send({**result, "peak_mib": resident("VmHWM") - self._base})

    def _send(self, message: Json) -> None:
        self._answers.write(json.dumps(message) + "\n")
