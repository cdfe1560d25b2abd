"""Servers and folders that end with the process that owns them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

LAST_LINES = 15
PATIENCE_SECONDS = 10.0
"""How long a server may take to end once it is asked to."""
FOLDER_PREFIX = "veritune-weights-"


class ServerProcess:
    """`python -m ARGUMENTS` in a process group of its own, with its output in `log`; runs from the start.

    The group is led by a watcher, which ends it when this process is gone.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.arguments, self.environment, self.log = list(arguments), dict(environment), log
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again once it has ended, with whatever it left behind ended too."""
        self.stop(patience_seconds=0)
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(os.getpid()), str(PATIENCE_SECONDS), *self.arguments],
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

    def stop(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Ask the whole group to end, then end it."""
        if self.process is None:
            return
        for kind, patience in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.process = None


def watch(owner: int, patience_seconds: float, arguments: Sequence[str]) -> None:
    """Run `python -m ARGUMENTS` until it ends or the process `owner`, the parent, is gone; then end the whole group.

    The parent's number is looked at, as a death signal would come when the thread ends that started this process.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # meant for the server, which is waited for
    server = subprocess.Popen([sys.executable, "-m", *arguments])
    while server.poll() is None and os.getppid() == owner:
        time.sleep(0.25)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(patience_seconds)
    os.killpg(0, signal.SIGKILL)


class WeightsFolder:
    """A new folder for weights in `parent` (default: the system's temporary one), removed by `close`.

    It is locked while its owner lives, so that folders which a killed process left are known and removed here.
    """

    def __init__(self, parent: Path | None = None) -> None:
        folder = parent or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=folder))
        if parent is not None:
            self.path.chmod(0o755)  # for servers of other users
        self._lock = (self.path / "lock.partial").open("w")
        with contextlib.suppress(OSError):  # a file system without locks, where nobody's folder is removed
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "lock.partial").rename(self.path / "lock")

    def close(self) -> None:
        """Remove the folder; calling it twice is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        # No lock file: it is being made. A lock that is held, or another user's folder: not ours to remove.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
                shutil.rmtree(folder)
            print(f"removed {folder}: {megabytes:.1f} MB that a killed run left", file=sys.stderr, flush=True)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
