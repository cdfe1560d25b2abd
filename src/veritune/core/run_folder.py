"""The run folder: its only writer and its only reader.

    config.toml               every setting, resolved
    environment.json          versions, git revision, hardware
    metrics.jsonl             one row a step
    rollouts/step-NNNNNN.jsonl       every group that was trained on
    validation/step-NNNNNN.jsonl     every response of a validation
    checkpoints/step-NNNNNN/         a policy folder, optimiser state, and a manifest of checksums
    refused/                  the batch of a step that was refused
    diverged.json             why a sweep took the run for diverged and let it be
    spent.json                the seconds that the run had taken when it was resumed, lost steps included

Anything that must be whole is written aside, flushed to the disk and then renamed, so that a process that is killed
at any moment leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from veritune.core.errors import CheckpointError, ConfigError

MANIFEST, DIVERGED, SPENT = "manifest.json", "diverged.json", "spent.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums hold: the policy and optimiser after `step` updates."""

    step: int
    folder: Path


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. Every method that writes raises CheckpointError where the disk refuses."""

    path: Path
    _locks: list[IO[str]] = field(default_factory=list, repr=False, compare=False)

    # --- Creation -----------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: Path, config_toml: str, environment: Mapping[str, Any], *, private: bool = False
    ) -> RunFolder:
        """Start a new run. A folder that already holds a run is refused: nothing is ever overwritten.

        Nobody else may read a `private` folder.
        """
        if (path / "config.toml").exists():
            raise ConfigError(f"run folder {path} already holds a run; resume it, or choose another folder")
        run = cls(path)
        with _disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if private:
                path.chmod(0o700)
        run.lock()
        _replace_file(path / "environment.json", json.dumps(environment, indent=2) + "\n")
        _replace_file(path / "config.toml", config_toml)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is no run folder: it has no config.toml")
        return cls(path)

    def lock(self) -> None:
        """Refuse a second writer. The lock dies with the process, however it dies."""
        with _disk_errors(self.path):
            handle = (self.path / ".lock").open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.close()
            raise ConfigError(f"run folder {self.path} is being written by another process") from error
        self._locks.append(handle)

    def unlock(self) -> None:
        while self._locks:
            self._locks.pop().close()

    # --- Rows ---------------------------------------------------------------------------------------------------

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with _disk_errors(self.path / "metrics.jsonl"), (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All rows in order; a last line that a killed process left unfinished is not a row."""
        path = self.path / "metrics.jsonl"
        return [] if not path.exists() else list(_whole_rows(path.read_text()))

    def write_rows(self, kind: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write `kind`/step-NNNNNN.jsonl whole, for `kind` in rollouts, validation, refused."""
        # A lone surrogate, which sampled bytes can become, is no UTF-8: it is written as its JSON escape.
        lines = (
            json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n" for row in rows
        )
        with _disk_errors(self.path / kind):
            (self.path / kind).mkdir(exist_ok=True)
        _replace_file(self.path / kind / f"step-{step:06d}.jsonl", "".join(lines))

    def read_rows(self, kind: str, step: int) -> list[dict[str, Any]]:
        path = self.path / kind / f"step-{step:06d}.jsonl"
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def steps(self, kind: str) -> list[int]:
        """The steps for which `kind` (rollouts, validation, refused) has a file."""
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.path / kind).glob("step-*.jsonl"))

    def seconds_spent(self) -> float:
        """Seconds that the run has taken so far, those of steps that a killed process lost included."""
        spent = [row["seconds_elapsed"] for row in self.metrics() if "seconds_elapsed" in row]
        with contextlib.suppress(FileNotFoundError):
            spent.append(float(json.loads((self.path / SPENT).read_text())["seconds"]))
        return max(spent, default=0.0)

    def forget_after(self, step: int) -> None:
        """Drop what a killed process wrote after `step`, the step that a resumed run starts from; not its time."""
        _replace_file(self.path / SPENT, json.dumps({"seconds": self.seconds_spent()}) + "\n")
        rows = [row for row in self.metrics() if row["step"] <= step]
        _replace_file(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        with _disk_errors(self.path):
            for kind in ("rollouts", "validation"):
                for later in (s for s in self.steps(kind) if s > step):
                    (self.path / kind / f"step-{later:06d}.jsonl").unlink()

    # --- How it ended -------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether the last step has been taken and, where there was one, its checkpoint is there."""
        rows = self.metrics()
        if not rows or rows[-1]["step"] != rows[-1]["steps"]:
            return False
        return rows[-1]["steps"] in (0, *self.checkpoint_steps())

    def mark_diverged(self, reason: str) -> None:
        """Record that the run is not worth going on with."""
        _replace_file(self.path / DIVERGED, json.dumps({"reason": reason}) + "\n")

    def divergence(self) -> str | None:
        """The reason that the run was given up for, if it was."""
        with contextlib.suppress(FileNotFoundError):
            return str(json.loads((self.path / DIVERGED).read_text())["reason"])
        return None

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """`write` fills an empty folder, which becomes checkpoints/step-NNNNNN; the newest `keep` are kept."""
        final = self.path / "checkpoints" / f"step-{step:06d}"
        partial = final.with_name(f".{final.name}.partial")
        with _disk_errors(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                write(partial)
                sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
                (partial / MANIFEST).write_text(json.dumps({"step": step, "sha256": sums}, indent=2) + "\n")
                for file in (*partial.iterdir(), partial):
                    _flush(file)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _flush(final.parent)
            for old in sorted(self._checkpoint_folders())[:-keep]:
                shutil.rmtree(old)
        return final

    def latest_checkpoint(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; `notify` is told in one line of each that was passed over."""
        for folder in sorted(self._checkpoint_folders(), reverse=True):
            fault = _fault(folder)
            if fault is None:
                return Checkpoint(int(folder.name.removeprefix("step-")), folder)
            notify(f"checkpoint {folder.name} is damaged ({fault}); using the one before it")
        return None

    def _checkpoint_folders(self) -> list[Path]:
        return list((self.path / "checkpoints").glob("step-*"))

    def checkpoint_steps(self) -> list[int]:
        return sorted(int(folder.name.removeprefix("step-")) for folder in self._checkpoint_folders())


def _whole_rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _fault(folder: Path) -> str | None:
    try:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        for name, expected in sums.items():
            if _sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_file(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.partial")
    with _disk_errors(path):
        aside.write_text(text, encoding="utf-8")
        _flush(aside)
        aside.replace(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
