"""Processes that share a run's rollouts and gradients between the CPU cores of one machine.

The process that leads holds the run. The others hold the policy in the same memory, so that an update reaches them
without being sent; they are handed a function with its arguments, and leave gradients where the leader adds them up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from veritune.core.errors import ConfigError, EngineError
from veritune.core.signals import TERMINATIONS
from veritune.model.gradients import make_gradients
from veritune.model.packing import siblings_of
from veritune.model.policy import Policy, trained_parameters


@dataclass(frozen=True)
class Worker:
    """One further process, as the leader sees it."""

    process: Any
    connection: Connection
    gradients: list[Tensor]
    """Of the parameters that are trained, in their order; in memory that the worker writes."""

    def send(self, *request: Any) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        try:
            result, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as lost:
            raise self._ended() from lost
        if error is not None:
            raise error
        return result

    def _ended(self) -> EngineError:
        self.process.join(1)
        return EngineError(f"worker process {self.process.pid} has ended (exit code {self.process.exitcode})")


class Workers:
    """The processes that share the work: this one, and those that `start_workers` started beside it."""

    def __init__(self, others: Sequence[Worker] = ()) -> None:
        self._others = list(others)

    @property
    def count(self) -> int:
        """How many share the work, the leader included."""
        return len(self._others) + 1

    def call(self, policy: Policy, function: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`function(policy, *share)` for up to `count` shares side by side, the first with `policy` in this process.

        The function is a module's own, arguments and results can be pickled. The first error in any of them is raised;
        it ends the workers, whose other results nobody waits for.
        """
        with self._asked(function, shares, train=False) as results:
            if shares:
                results.append(function(policy, *shares[0]))
        return results

    def everywhere(self, policy: Policy, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same with the same arguments in every process."""
        return self.call(policy, function, [arguments] * self.count)

    def add_gradients(
        self, policy: Policy, function: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """The same in training mode, for a function that adds to gradients: those of `policy` gain all shares' sum."""
        make_gradients(policy.model)
        with self._asked(function, shares, train=True) as results, training(policy.model):
            if shares:
                results.append(function(policy, *shares[0]))
        for worker, _ in zip(self._others, shares[1:], strict=False):
            for parameter, gradient in zip(trained_parameters(policy.model).values(), worker.gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
        return results

    @contextlib.contextmanager
    def _asked(
        self, function: Callable[..., Any], shares: Sequence[tuple[Any, ...]], *, train: bool
    ) -> Iterator[list[Any]]:
        """Have the others work on all shares but the first; their results follow what is put into the list."""
        if len(shares) > self.count:
            raise EngineError(f"{len(shares)} shares of the work are too many for {self.count} processes")
        asked = self._others[: max(len(shares) - 1, 0)]
        results: list[Any] = []
        try:
            for worker, share in zip(asked, shares[1:], strict=True):
                worker.send(function, share, train)
            yield results
            results += [worker.receive() for worker in asked]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the other processes; calling it twice is harmless."""
        for worker in self._others:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._others = []


ALONE = Workers()
"""This process alone."""


def start_workers(policy: Policy, count: int) -> Workers:
    """`count` processes that share the work on `policy`, this one included; its weights move into shared memory.

    Each has as many threads as this one. They end with `close`, and by themselves when this process does.
    """
    if count == 1:
        return ALONE
    if (device := next(policy.model.parameters()).device).type != "cpu":
        raise ConfigError(f"processes is {count}; it must be 1 on {device}: they share a machine's CPU cores")
    policy.model.share_memory()
    context, others = torch.multiprocessing.get_context("spawn"), []
    for _ in range(count - 1):
        here, there = context.Pipe()
        gradients = [
            torch.zeros_like(parameter).share_memory_() for parameter in trained_parameters(policy.model).values()
        ]
        arguments = (there, policy, gradients, torch.get_num_threads())
        process = context.Process(target=_serve, args=arguments, daemon=True)
        with _ending_signals_blocked():
            process.start()
        there.close()  # so that the worker holds its only copy, and its end is seen here
        others.append(Worker(process, here, gradients))
    return Workers(others)


@contextlib.contextmanager
def _ending_signals_blocked() -> Iterator[None]:
    """What ends a program reaches the whole group, and the leader decides: a child inherits what is blocked here."""
    ending = [signal.SIGINT, *TERMINATIONS]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        resource_tracker.ensure_running()  # it unblocks some of them when it starts the first time
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, policy: Policy, gradients: list[Tensor], threads: int) -> None:
    """What a worker does: call what it is sent, until the leader is gone."""
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, share, train = pickle.loads(connection.recv_bytes())
            if train:
                for parameter, gradient in zip(trained_parameters(policy.model).values(), gradients, strict=True):
                    parameter.grad = gradient.zero_()  # autograd adds to what is there, in place
            result, failure = None, None
            try:
                with training(policy.model) if train else contextlib.nullcontext():
                    result = function(policy, *share)
            except Exception as error:  # whatever it is, the leader is who can say it
                error.add_note(f"in worker process {os.getpid()}:\n{traceback.format_exc()}")
                failure = error
            connection.send_bytes(pickle.dumps((result, failure)))


@contextlib.contextmanager
def training(model: torch.nn.Module) -> Iterator[None]:
    """With the model in training mode."""
    model.train()
    try:
        yield
    finally:
        model.eval()


def share_rows(rows: Sequence[int], prompts_ids: Sequence[Any], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Deal `rows` to at most `count` shares of about as many positions, siblings together, none of them empty.

    `prompts_ids` and `lengths` (of the responses) are those of all rows; within a share the rows keep their order.
    """
    siblings = siblings_of(rows, prompts_ids)
    positions = {prompt: len(prompt) + sum(lengths[row] for row in members) for prompt, members in siblings.items()}
    share_of: dict[int, int] = {}
    filled = [0] * count
    for prompt in sorted(siblings, key=lambda prompt: -positions[prompt]):
        least = filled.index(min(filled))
        share_of |= dict.fromkeys(siblings[prompt], least)
        filled[least] += positions[prompt]
    shares = ([row for row in rows if share_of[row] == share] for share in range(count))
    return [share for share in shares if share]
