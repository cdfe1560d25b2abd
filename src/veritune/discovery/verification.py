"""Verification in a process of its own, under limits: a candidate may be of any size, and its verdict still comes.

The worker gets a candidate as JSON on standard input and writes the verdict to standard output. At its time limit the
kernel ends it: the alarm signal keeps its default action, which works inside one long matrix product, and also where
the parent is gone.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from veritune.core.config import require
from veritune.discovery.problem import Judgement, Problem, Verdict
from veritune.discovery.problems import build_problem
from veritune.discovery.sandbox import ONE_THREAD

_PROGRAM = "from veritune.discovery.verification import main; main()"
_PATIENCE_SECONDS = 60.0
"""How long beyond its limit a worker may take, to start and to hand over its verdict."""


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """What the verification of one candidate may use."""

    seconds: float = 120.0
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        require(self, "seconds", 0 < self.seconds < math.inf, "positive and finite")
        require(self, "memory_mb", self.memory_mb >= 1, "at least 1")


class UnreadableCandidate(Exception):
    """The text is not JSON."""


def judge_apart(problem: Problem, text: bytes, limits: VerificationLimits) -> Judgement:
    """`problem.judge` of a candidate in a worker; where the worker passes a limit, the verdict says so.

    `text` is JSON: the candidate itself, or an object with it as its `candidate` or `points`. Raises
    UnreadableCandidate for any other text.
    """
    arguments = (problem.name, str(problem.dimension), str(limits.seconds), str(limits.memory_mb))
    import_path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        worker = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            check=False,
            input=text,
            capture_output=True,
            timeout=limits.seconds + _PATIENCE_SECONDS,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": import_path},
            start_new_session=True,  # Ctrl-C must not end it: what it cut short would pass for a verdict
        )
        returncode = worker.returncode
    except subprocess.TimeoutExpired:
        returncode = -signal.SIGALRM
    if returncode == -signal.SIGALRM:
        return _refused(f"the verification was stopped after its limit of {limits.seconds:g} s")
    if returncode < 0:
        return _refused(f"the verification was ended by {signal.Signals(-returncode).name}")
    if returncode > 0:
        last_line = worker.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return _refused(f"the verification failed: {last_line}")
    reply = json.loads(worker.stdout)
    if "unreadable" in reply:
        raise UnreadableCandidate(reply["unreadable"])
    return Judgement(Verdict(*reply["verdict"]), reply["points"], reply["num_points"])


def _refused(message: str) -> Judgement:
    return Judgement(Verdict(False, 0, message), None, 0)


def main() -> None:
    """Arguments: the problem's name and dimension, and the seconds and megabytes that its verification may take."""
    name, dimension, seconds, memory_mb = sys.argv[1:]
    problem = build_problem(name, int(dimension))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_mb) << 20, int(memory_mb) << 20))
    try:
        verdict, points, num_points = problem.judge(_read(sys.stdin.buffer.read()))
        reply = _text([verdict.valid, verdict.score, verdict.message], points, num_points)
    except UnreadableCandidate as error:
        reply = json.dumps({"unreadable": str(error)})
    except MemoryError:
        reply = _text([False, 0, f"the verification needs more than its limit of {memory_mb} MB"], None, 0)
    sys.stdout.write(reply)


def _text(verdict: list[Any], points: list[Any] | None, num_points: int) -> str:
    return json.dumps({"verdict": verdict, "points": points, "num_points": num_points}, separators=(",", ":"))


def _read(text: bytes) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableCandidate(f"not JSON ({error})") from error
    except ValueError as error:  # no UTF-8, or an integer of more digits than Python agrees to read
        raise UnreadableCandidate(f"not readable as JSON ({error})") from error
    if isinstance(value, dict):
        return value.get("candidate", value.get("points", value))
    return value
