"""What ends a program: Ctrl-C, and SIGTERM and SIGHUP, which clusters and closed terminals send."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised wherever the program is, as Ctrl-C is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def signal_of(stop: KeyboardInterrupt) -> int:
    """The number of the signal that `stop` was raised for."""
    return stop.number if isinstance(stop, Terminated) else signal.SIGINT


@contextlib.contextmanager
def terminations_raised() -> Iterator[None]:
    """Raise Terminated at the first SIGTERM or SIGHUP, and leave the rest of the program alone with its clean-up."""

    def end(number: int, _frame: object) -> None:
        for each in TERMINATIONS:
            signal.signal(each, signal.SIG_IGN)
        silence_lost_streams()
        raise Terminated(number)

    with _handled(TERMINATIONS, end):
        yield


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request, whose signal's number is asked for between steps.

    0 is none. A later Ctrl-C raises KeyboardInterrupt; a later SIGTERM or SIGHUP changes nothing.
    """
    requested: list[int] = []

    def request(number: int, _frame: object) -> None:
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if requested:
            return
        requested.append(number)
        silence_lost_streams()
        more = b"; once more stops at once" if number == signal.SIGINT else b""
        os.write(2, b"stopping after this step" + more + b"\n")  # print could have been interrupted, and cannot wait

    with _handled((signal.SIGINT, *TERMINATIONS), request):
        yield lambda: requested[0] if requested else 0


@contextlib.contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, object], None]) -> Iterator[None]:
    """With a handler for the signals; what nohup had ignored stays ignored, and only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in numbers}
    for number, before in previous.items():
        if number == signal.SIGINT or before != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def silence_lost_streams() -> None:
    """Send standard output and error nowhere if their terminal or pipe is gone, so that a last word ends nothing."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    lost = select.POLLERR | select.POLLHUP
    for stream, events in poll.poll(0):
        if events & lost:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
