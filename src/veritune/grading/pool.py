"""A pool of grading processes that can be killed: per-answer time and memory limits for graders that one can't trust.

Cheap answers are settled here, without a process. The rest go to workers. An answer that is slow never holds up the
others: those behind it are taken away from its worker, and further workers are started while it runs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from veritune.core.errors import ConfigError, DataError
from veritune.core.types import Pairs, Score
from veritune.grading.rewards import r1_zero_score, settle_r1_zero
from veritune.grading.scores import Grader, failed

_POLL_SECONDS = 0.05
_SLOW_SECONDS = 0.15
"""A worker that needs longer than this for its answer is taken to be stuck, and another is started beside it."""
_CHUNK = 16
"""Answers handed to a worker at a time: a process switch each would cost more than the grading."""
_CHUNK_BYTES = 1 << 15
"""Half of what a pipe holds, so that handing out never waits for a worker that is grading."""
_GRACE_SECONDS = 0.5
"""How long after its limit a worker that its own alarm has not ended is killed."""
_START_SECONDS = 60.0
"""How long a worker may take to start."""
_PROGRAM = "from veritune.grading.worker import main; main()"
_MAX_ATTEMPTS = 2
"""A worker that dies within its limit may have been killed by someone else: its answer is tried once more."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process and the answers that it is grading."""

    process: subprocess.Popen[bytes]
    jobs: deque[int] = field(default_factory=deque)
    """The answers handed to it, the one it is grading first."""
    since: float = 0.0
    """When it began with that one."""
    received: bytes = b""
    ready: bool = False
    """Whether its program has started; only then does the time of its answer run."""
    slow: bool = False
    """Whether its answer takes long: others are started beside it."""
    robbed: bool = False
    """Whether answers that it was handed have gone to another worker: it ends after the one it is grading."""


class GradingPool:
    """Scores (response, ground truth) pairs in processes that are killed at a limit.

    `grader(response, ground_truth)` runs in the workers and returns a Score, a dict with `reward` or a number; it is
    pickled, so it is a function of a module, or a method of an object of a module's class. `settle(response,
    ground_truth) -> Score | None` runs here and must be cheap for every input; None sends the answer to a worker. Pairs
    must be JSON: strings, numbers, lists and dicts.

    An answer past `seconds_per_answer` scores 0 with the rule "timeout" and is counted in `grader_timeouts`; one whose
    worker dies twice scores 0 with the rule "worker died"; one for which the grader raises, or returns no finite
    number, 0 with the rule "reward failed: ...". The pool may be used from several threads, and after a fork the child
    starts workers of its own. Use it as a context manager, or `close()` it; it also closes with the interpreter.
    """

    def __init__(
        self,
        grader: Grader = r1_zero_score,
        settle: Callable[[str, Any], Score | None] | None = settle_r1_zero,
        workers: int = 2,
        max_workers: int = 16,
        seconds_per_answer: float = 2.0,
        memory_bytes: int = 1 << 30,
    ) -> None:
        if not 1 <= workers <= max_workers:
            raise ConfigError(f"workers is {workers}; it must lie between 1 and max_workers ({max_workers})")
        if not seconds_per_answer > 0:
            raise ConfigError(f"seconds_per_answer is {seconds_per_answer}; it must be positive")
        if memory_bytes < 1 << 26:
            raise ConfigError(f"memory_bytes is {memory_bytes}; it must be at least 64 MiB ({1 << 26})")
        self._grader = _packed(grader)
        self._settle = settle
        self._chunk = _CHUNK
        self._workers_wanted = workers
        self._max_workers = max_workers
        self._seconds = seconds_per_answer
        self._memory_bytes = memory_bytes
        self.grader_timeouts = 0
        """Answers that ran past their limit, over the life of the pool."""
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end, self._workers, self._owner)

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; calling it twice is harmless."""
        self._closed = True
        _end(self._workers, self._owner)

    def score(self, pairs: Pairs) -> list[Score]:
        """The Scores of (response, ground truth) pairs, in their order."""
        if self._closed:
            raise ConfigError("this GradingPool is closed; make a new one")
        scores: list[Score | None] = [
            self._settle(response, ground_truth) if self._settle else None for response, ground_truth in pairs
        ]
        waiting = deque(index for index, score in enumerate(scores) if score is None)
        if waiting:
            self._adopt_after_fork()
            with self._lock:
                try:
                    self._run(pairs, scores, waiting)
                except BaseException:  # Ctrl-C in the middle: answers under way must not meet the next batch
                    _end(self._workers, self._owner)
                    raise
        return [score for score in scores if score is not None]

    def _adopt_after_fork(self) -> None:
        """A forked child leaves its parent's workers alone; it closes its own ends of their pipes."""
        if self._owner == os.getpid():
            return
        for worker in self._workers:
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    os.close(pipe.fileno())
            worker.process.returncode = 0
        self._inherited = self._workers  # kept, so that no finaliser touches the closed pipes' numbers
        self._workers = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._workers, self._owner)

    # One batch -------------------------------------------------------------------------------------------------

    def _run(self, pairs: Pairs, scores: list[Score | None], waiting: deque[int]) -> None:
        attempts = dict.fromkeys(waiting, 0)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(_output(worker), selectors.EVENT_READ, worker)
            while waiting or any(worker.jobs for worker in self._workers):
                self._hand_out(pairs, waiting, selector)
                for key, _ in selector.select(timeout=_POLL_SECONDS):
                    self._receive(key.data, scores, waiting, attempts, selector)
                self._watch(scores, waiting, selector)
            if self._chunk > 1:  # where every answer is slow, the further workers are wanted in the next batch too
                for worker in self._workers[self._workers_wanted :]:
                    self._remove(worker, selector)

    def _hand_out(self, pairs: Pairs, waiting: deque[int], selector: selectors.BaseSelector) -> None:
        """Give the idle workers their share of the waiting answers; start workers in the place of slow ones."""
        idle = [worker for worker in self._workers if not worker.jobs]
        slow = sum(worker.slow for worker in self._workers)
        wanted = min(self._workers_wanted + 6 * slow, self._max_workers, len(self._workers) + len(waiting))
        while len(self._workers) < wanted and len(idle) < len(waiting):
            worker = self._start()
            idle.append(worker)
            selector.register(_output(worker), selectors.EVENT_READ, worker)
        for position, worker in enumerate(idle):
            share = min(-(-len(waiting) // (len(idle) - position)), self._chunk)
            message = b""
            while waiting and len(worker.jobs) < share and len(message) < _CHUNK_BYTES:
                job = waiting.popleft()
                worker.jobs.append(job)
                message += _request(job, *pairs[job])
            worker.since = time.monotonic()
            if message:
                _write(worker, message)

    def _receive(
        self,
        worker: _Worker,
        scores: list[Score | None],
        waiting: deque[int],
        attempts: dict[int, int],
        selector: selectors.BaseSelector,
    ) -> None:
        data = os.read(_output(worker), 1 << 16)
        if not data:
            self._bury(worker, scores, waiting, attempts, selector)
            return
        *lines, worker.received = (worker.received + data).split(b"\n")
        for line in lines:
            job, outcome = json.loads(line)
            if job is None and outcome is not None:
                raise ConfigError(f"the grading process cannot load the reward: {outcome}")
            worker.ready, worker.since = True, time.monotonic()
            if worker.jobs and job == worker.jobs[0]:
                scores[worker.jobs.popleft()] = Score(**outcome)
                self._chunk = 1 if worker.slow else min(2 * self._chunk, _CHUNK)
                worker.slow = False
        if worker.robbed and not worker.jobs:
            self._remove(worker, selector)

    def _bury(
        self,
        worker: _Worker,
        scores: list[Score | None],
        waiting: deque[int],
        attempts: dict[int, int],
        selector: selectors.BaseSelector,
    ) -> None:
        """A worker has ended: by its alarm (a timeout) or for another reason (its answer is tried again)."""
        self._remove(worker, selector)
        if not worker.jobs:
            return
        job = worker.jobs.popleft()
        waiting.extendleft(reversed(worker.jobs))
        attempts[job] += 1
        if worker.process.returncode == -signal.SIGALRM:
            self._time_out(job, scores)
        elif attempts[job] < _MAX_ATTEMPTS:
            waiting.appendleft(job)
        else:
            scores[job] = failed("worker died")

    def _watch(self, scores: list[Score | None], waiting: deque[int], selector: selectors.BaseSelector) -> None:
        """Take the answers behind a slow one away from its worker, and kill a worker whose alarm did not."""
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.jobs:
                continue
            elapsed = now - worker.since
            if worker.ready and elapsed > _SLOW_SECONDS and not worker.slow:
                worker.slow, self._chunk = True, 1
                while len(worker.jobs) > 1:
                    worker.robbed = True
                    waiting.appendleft(worker.jobs.pop())
            if elapsed > (self._seconds + _GRACE_SECONDS if worker.ready else _START_SECONDS):
                self._remove(worker, selector)
                self._time_out(worker.jobs[0], scores)
                waiting.extendleft(reversed(list(worker.jobs)[1:]))

    def _remove(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(_output(worker))
        self._workers.remove(worker)
        _kill(worker)

    def _time_out(self, job: int, scores: list[Score | None]) -> None:
        self.grader_timeouts += 1
        scores[job] = failed("timeout", self._seconds)

    def _start(self) -> _Worker:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self._seconds), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends its workers
        )
        worker = _Worker(process)
        self._workers.append(worker)
        _write(worker, self._grader)
        return worker


def _packed(grader: Grader) -> bytes:
    """The grader as the line that tells a worker of it; ConfigError where another process could not load it."""
    try:
        packed = pickle.dumps(grader)
    except Exception as error:  # whatever an object's own pickling raises
        raise ConfigError(f"reward is {grader!r:.200}, which cannot be sent to a grading process: {error}") from error
    if b"__main__" in packed:
        raise ConfigError(f"reward is {grader!r:.200}; define it in a module, which grading processes can import")
    return base64.b64encode(packed) + b"\n"


def _request(job: int, response: str, ground_truth: Any) -> bytes:
    try:
        return json.dumps([job, response, ground_truth]).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"ground truth is {ground_truth!r:.80}; it must be JSON for a grading process: {error}"
        ) from error


def _output(worker: _Worker) -> int:
    assert worker.process.stdout is not None
    return worker.process.stdout.fileno()


def _write(worker: _Worker, message: bytes) -> None:
    assert worker.process.stdin is not None
    with contextlib.suppress(OSError):  # a worker that has died is found by its end of file
        worker.process.stdin.write(message)
        worker.process.stdin.flush()


def _kill(worker: _Worker) -> None:
    worker.process.kill()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    worker.process.wait()


def _end(workers: list[_Worker], owner: int) -> None:
    """Kill all workers; only in the process that started them."""
    if os.getpid() != owner:
        return
    while workers:
        _kill(workers.pop())
