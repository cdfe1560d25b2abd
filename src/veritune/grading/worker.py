"""The program that a pool's worker process runs: JSON lines in, JSON lines out, one answer at a time.

The kernel ends it at an answer's time limit: the alarm signal keeps its default action, which works even inside one
long C call. It ends itself when its parent is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from veritune.core.errors import ConfigError
from veritune.grading.math.numeric import precise_context

Grader = Callable[[str, Any], Any]


def load_grader(dotted_name: str) -> Grader:
    """The function `package.module:name`; raises ConfigError where there is none."""
    module, _, name = dotted_name.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"grader is {dotted_name!r}; it must name a function as package.module:function") from error


def serve(grader: Grader, seconds_per_answer: float, requests: int, replies: BinaryIO) -> None:
    """Say that the worker is ready, then grade every request until the input ends or the parent is gone."""
    _reply(replies, None, None)
    for line in _lines(requests):
        number, response, ground_truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds_per_answer)
        outcome = _grade(grader, response, ground_truth)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _reply(replies, number, outcome)


def _lines(requests: int) -> Iterator[bytes]:
    """The lines of a file descriptor, until it ends or the process that started this one is gone."""
    parent = os.getppid()
    pending = b""
    while True:
        while not select.select([requests], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        data = os.read(requests, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n") if b"\n" in data else (pending + data,)
        yield from lines


def _reply(replies: BinaryIO, number: int | None, outcome: list[Any] | None) -> None:
    replies.write(json.dumps([number, outcome]).encode() + b"\n")
    replies.flush()


def _grade(grader: Grader, response: str, ground_truth: Any) -> list[Any]:
    try:
        score = grader(response, ground_truth)
    except Exception as error:  # a grader must never end a run: its failure is a score of 0 that says why
        return [0.0, 0.0, 0.0, None, f"grader failed: {type(error).__name__}", 0.0]
    return [score.reward, score.format_reward, score.answer_reward, score.extracted, score.rule, score.seconds]


def main() -> None:
    """Arguments: the grader's dotted name, the seconds per answer, the memory limit in bytes."""
    grader_name, seconds, memory_bytes = sys.argv[1:4]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its workers itself
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grader = load_grader(grader_name)
    precise_context()  # the one slow import, before any answer's time runs
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what a grader prints is no reply
        serve(grader, float(seconds), 0, replies)
