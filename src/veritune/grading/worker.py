"""The program that a pool's worker process runs: JSON lines in, JSON lines out, one answer at a time.

The kernel ends it at an answer's time limit: the alarm signal keeps its default action, which works even inside one
long C call. It ends itself when its parent is gone.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

from veritune.grading.math.numeric import precise_context
from veritune.grading.scores import Grader, score_safely


def serve(grader: Grader, seconds_per_answer: float, requests: Iterator[bytes], replies: BinaryIO) -> None:
    """Say that the worker is ready, then grade every request until the input ends or the parent is gone."""
    _reply(replies, None, None)
    for line in requests:
        number, response, ground_truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds_per_answer)
        score = score_safely(grader, response, ground_truth)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _reply(replies, number, asdict(score))


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


def _reply(replies: BinaryIO, number: int | None, outcome: Any) -> None:
    replies.write(json.dumps([number, outcome]).encode() + b"\n")
    replies.flush()


def main() -> None:
    """Arguments: the seconds per answer, the memory limit in bytes. The first line of the input is the grader."""
    seconds, memory_bytes = sys.argv[1:3]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these are the parent's: it ends its workers itself
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what a grader prints is no reply
        requests = _lines(0)
        try:
            grader = pickle.loads(base64.b64decode(next(requests)))  # the parent's own
        except Exception as error:
            _reply(replies, None, f"{type(error).__name__}: {error}")
            return
        precise_context(60)  # the judge's one slow import, before any answer's time runs
        serve(grader, float(seconds), requests, replies)
