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
    discarded-N/              what lay here when the run was begun again

Anything that must be whole is written aside, flushed to the disk and then renamed, so that a process that is killed
at any moment leaves either the old state or the new one. Whoever resumes a run locks it before reading it. Nothing is
deleted that this module did not write: names must match exactly, and a checkpoint's manifest says which files are its.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from veritune.core.errors import CheckpointError, ConfigError, DataError

CONFIG, ENVIRONMENT, METRICS = "config.toml", "environment.json", "metrics.jsonl"
MANIFEST, DIVERGED, SPENT = "manifest.json", "diverged.json", "spent.json"
OPTIMIZER = "optimizer.safetensors"
WORK = (
    *("checkpoints", METRICS, "rollouts", "validation", "refused", SPENT, DIVERGED),
    *("report.html", "figures", "tensorboard", "wandb"),
)
"""All that a run leaves beside its settings, in the order in which a restart moves it away: a restart that is killed
leaves no checkpoint without its metrics."""
_STEP = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")


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
        cls.require_new(path)
        run = cls(path)
        with _disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if private:
                path.chmod(0o700)
        run.lock()
        cls.require_new(path)  # another process may have made one before the lock was ours
        _replace_file(path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        _replace_file(path / CONFIG, config_toml)
        return run

    @staticmethod
    def require_new(path: Path) -> None:
        """ConfigError if the folder holds a run already."""
        if (path / CONFIG).exists():
            raise ConfigError(f"run folder {path} already holds a run; resume it, or choose another folder")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path} is no run folder: it has no {CONFIG}")
        return cls(path)

    def environment(self) -> dict[str, Any]:
        """What the run was made with; DataError where the file is missing or damaged."""
        return _read_object(self.path / ENVIRONMENT)

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
        with _disk_errors(self.path / METRICS), (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All rows in order; a last line that a killed process left unfinished is not a row.

        DataError where another line is damaged.
        """
        path = self.path / METRICS
        rows = [] if not path.exists() else _read_lines(path, whole_lines_only=True)
        for number, row in enumerate(rows, 1):
            if not _is_integer(row.get("step")):
                raise DataError(f"{path} row {number} has no step")
            if not _is_integer(row.get("steps", 0)) or not _is_number(row.get("seconds_elapsed", 0)):
                raise DataError(f"{path} row {number} has steps or seconds_elapsed that are no number")
        return rows

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
        """The rows that `write_rows` wrote; DataError where the file is missing or damaged."""
        return _read_lines(self.path / kind / f"step-{step:06d}.jsonl")

    def steps(self, kind: str) -> list[int]:
        """The steps for which `kind` (rollouts, validation, refused) has a file, in order."""
        return sorted(_steps(self.path / kind, ".jsonl"))

    def seconds_spent(self) -> float:
        """Seconds that the run has taken so far, those of steps that a killed process lost included."""
        spent = [row["seconds_elapsed"] for row in self.metrics() if "seconds_elapsed" in row]
        if (self.path / SPENT).exists():
            seconds = _read_object(self.path / SPENT).get("seconds")
            if not _is_number(seconds):
                raise DataError(f"{self.path / SPENT} is damaged: its seconds are {seconds!r}")
            spent.append(seconds)
        return float(max(spent, default=0.0))

    def forget_after(self, step: int) -> None:
        """Drop what a killed process wrote after `step`, the step that a resumed run starts from; not its time."""
        _replace_file(self.path / SPENT, json.dumps({"seconds": self.seconds_spent()}) + "\n")
        rows = [row for row in self.metrics() if row["step"] <= step]
        _replace_file(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        with _disk_errors(self.path):
            for kind in ("rollouts", "validation"):
                for later in (s for s in self.steps(kind) if s > step):
                    (self.path / kind / f"step-{later:06d}.jsonl").unlink()
                for torn in _steps(self.path / kind, ".jsonl.partial", prefix="."):
                    (self.path / kind / f".step-{torn:06d}.jsonl.partial").unlink()

    # --- Beginning again ----------------------------------------------------------------------------------------

    def holds_work(self) -> bool:
        """Whether there is anything that beginning again would lose."""
        return any((self.path / name).exists() for name in WORK)

    def discard(self) -> Path | None:
        """Move all that the run has come to into a new folder discarded-N; returns it, None if there is nothing."""
        return self._discard([self.path / name for name in WORK if (self.path / name).exists()])

    def _discard(self, entries: Iterable[Path]) -> Path | None:
        if not (entries := list(entries)):
            return None
        number = 1
        with _disk_errors(self.path):
            while os.path.lexists(self.path / f"discarded-{number}"):
                number += 1
            folder = self.path / f"discarded-{number}"
            folder.mkdir()
            for entry in entries:
                entry.rename(folder / entry.name)
        return folder

    # --- How it ended -------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether the last step has been taken and, where there was one, its checkpoint is there."""
        rows = self.metrics()
        if not rows or rows[-1]["step"] != rows[-1].get("steps"):
            return False
        return rows[-1]["steps"] in (0, *self.checkpoint_steps())

    def mark_diverged(self, reason: str) -> None:
        """Record that the run is not worth going on with."""
        _replace_file(self.path / DIVERGED, json.dumps({"reason": reason}) + "\n")

    def divergence(self) -> str | None:
        """The reason that the run was given up for, if it was."""
        if not (self.path / DIVERGED).exists():
            return None
        return str(_read_object(self.path / DIVERGED).get("reason"))

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """`write` fills an empty folder, which becomes checkpoints/step-NNNNNN; the newest `keep` are kept."""
        final = self._checkpoint_folder(step)
        partial = final.with_name(f".{final.name}.partial")
        with _disk_errors(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                write(partial)
                files = sorted(file for file in partial.rglob("*") if file.is_file())
                sums = {file.relative_to(partial).as_posix(): _sha256(file) for file in files}
                (partial / MANIFEST).write_text(json.dumps({"step": step, "sha256": sums}, indent=2) + "\n")
                for entry in (*partial.rglob("*"), partial):
                    _flush(entry)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            _delete_checkpoint(final)
            if os.path.lexists(final):  # somebody else's, or somebody else's files are in it
                self._discard([final])
            partial.rename(final)
            _flush(final.parent)
        self.prune_checkpoints(step, keep)
        return final

    def prune_checkpoints(self, step: int, keep: int) -> None:
        """Of the checkpoints up to `step`, a whole one, delete all but the newest `keep`, and what was left unfinished.

        What comes after `step` is damaged, or somebody else's: neither takes the place of one that is kept.
        """
        folders = [self._checkpoint_folder(each) for each in self.checkpoint_steps() if each <= step]
        with _disk_errors(self.path / "checkpoints"):
            for old in [folder for folder in folders if _manifest(folder, _step_of(folder.name))][:-keep]:
                _delete_checkpoint(old)
            for torn in _steps(self.path / "checkpoints", ".partial", prefix="."):
                shutil.rmtree(self.path / "checkpoints" / f".step-{torn:06d}.partial")

    def latest_checkpoint(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; `notify` is told in one line of each that was passed over."""
        for step in reversed(self.checkpoint_steps()):
            folder = self._checkpoint_folder(step)
            fault = _fault(folder, step)
            if fault is None:
                return Checkpoint(step, folder)
            notify(f"checkpoint {folder.name} is damaged ({fault}) and is passed over")
        return None

    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint's folder, whole or not, in order."""
        return sorted(_steps(self.path / "checkpoints"))

    def _checkpoint_folder(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"


def require_intact(folder: Path) -> None:
    """CheckpointError if `folder` is a checkpoint of a run and a file that a policy is loaded from has changed.

    Any other folder, a file that is missing and the optimiser's state are left to whoever loads them.
    """
    manifest = _manifest(folder)
    for name, expected in (manifest["sha256"] if manifest else {}).items():
        if name != OPTIMIZER and (folder / name).is_file() and _sha256(folder / name) != expected:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} does not match its checksum in {MANIFEST}")


# --- Names and manifests -----------------------------------------------------------------------------------------


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _steps(folder: Path, suffix: str = "", *, prefix: str = "") -> Iterator[int]:
    """The steps of the entries that are named exactly as this module names them."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith(prefix) and name.endswith(suffix):
            step = _step_of(name.removeprefix(prefix).removesuffix(suffix))
            if step is not None:
                yield step


def _manifest(folder: Path, step: int | None = None) -> dict[str, Any] | None:
    """A checkpoint's manifest, if it has the form that `save_checkpoint` gives it, and is that of `step`."""
    with contextlib.suppress(DataError):
        found = _read_object(folder / MANIFEST)
        sums = found.get("sha256")
        is_of_step = _is_integer(found.get("step")) and step in (None, found["step"])
        if is_of_step and isinstance(sums, dict) and sums and all(map(_is_inside, sums)):
            return found
    return None


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _fault(folder: Path, step: int) -> str | None:
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    manifest = _manifest(folder, step)
    if manifest is None:
        return f"its {MANIFEST} vouches for no file of step {step}"
    for name, expected in manifest["sha256"].items():
        try:
            if _sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _delete_checkpoint(folder: Path) -> None:
    """Delete the files that the manifest names, itself last, and the folder if nothing else lies in it."""
    manifest = None if folder.is_symlink() else _manifest(folder, _step_of(folder.name))
    if manifest is None:
        return
    for name in (*manifest["sha256"], MANIFEST):
        (folder / name).unlink(missing_ok=True)
    inner = {folder / parent for name in manifest["sha256"] for parent in PurePosixPath(name).parents}
    for emptied in sorted(inner, reverse=True):
        with contextlib.suppress(OSError):  # somebody else's files are left where they are
            emptied.rmdir()


# --- Files -------------------------------------------------------------------------------------------------------


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _parse_object(text: str, told: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{told}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{told}: it holds a {type(value).__name__} where an object belongs")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    return _parse_object(_read_text(path), f"{path} is damaged")


def _read_lines(path: Path, *, whole_lines_only: bool = False) -> list[dict[str, Any]]:
    lines = _read_text(path).split("\n")
    if whole_lines_only or not lines[-1]:
        lines.pop()
    return [_parse_object(line, f"{path} has a broken row: line {number}") for number, line in enumerate(lines, 1)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_file(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.partial")
    with _disk_errors(path):
        try:
            aside.write_text(text, encoding="utf-8")
            _flush(aside)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _flush(path.parent)


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
