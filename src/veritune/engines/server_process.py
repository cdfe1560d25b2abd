"""A child process that serves on loopback: started, looked at, restarted and stopped with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LAST_LINES = 15


class ServerProcess:
    """`python -m ARGUMENTS` in a process group of its own, with its output in `log`; runs from the start."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.arguments, self.environment, self.log = list(arguments), dict(environment), log
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again once it has ended, with whatever it left behind ended too."""
        self.stop(patience_seconds=0)
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])

    def stop(self, patience_seconds: float = 10.0) -> None:
        """Ask the whole group to end, then end it."""
        if self.process is None:
            return
        for kind, patience in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.process = None


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
