"""`kill -9` while runs change their folders and at random times, resume, and compare with the run that nobody killed.

    python benchmarks/kill.py --output runs/kill

100 kills (20 of each kind of run; 70 of them just before a change of the folder, 30 at any time; every fourth resume is
killed too), four resumes at once, and 12 file systems that are too small (these need root). Each is a cell with a file
of its own under OUTPUT/cells, which a second call skips. Two folders are the same if they hold the same files with the
same bytes, times left out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMMON = [
    *("--max-tokens", "120", "--validation-examples", "6", "--validate-every", "2", "--checkpoint-every", "2"),
    *("--threads", "1", "--learning-rate", "1e-3"),
]
GRPO = ["grpo", *COMMON, "--steps", "5", "--rollout-batch-size", "32", "--group-size", "8"]
OFF_POLICY = [*GRPO, "--train-batch-size", "16", "--loss-type", "grpo_clip"]
KINDS = {
    "grpo on-policy": [*GRPO, "--train-batch-size", "32"],
    "grpo off-policy": OFF_POLICY,
    "sft": ["sft", *COMMON, "--unique-examples", "40", "--batch-size", "8"],
    "expert iteration": [
        *("expert-iteration", *COMMON, "--steps", "5"),
        *("--questions-per-step", "16", "--group-size", "4", "--batch-size", "2"),
    ],
    "two processes": [*OFF_POLICY, "--processes", "2"],
}
RUN = "run"
"""Every run's folder, below a folder of its own that its process runs in, so that all have the same settings."""
PATIENCE_SECONDS = 600
DISK_KIB = (16, 64, 112, 144, 192, 3_700, 7_000, 10_900, 14_500, 18_000, 21_900, 30_000)
"""Room for a few rows, or for none, one or two checkpoints and a part of the next: the whole run takes 33,000."""
VOLATILE = ("second", "started")
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
"""Python's audit events of what changes a folder, besides flushing."""
CHILD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import kill
kill.watch_changes()
from veritune.cli import main
main()
"""


# --- In the process that is killed -------------------------------------------------------------------------------


def watch_changes() -> None:
    """Count the changes of the run folder, and end this process just before number KILL_AT, with no word to anybody."""
    folder, kill_at, changes = os.path.abspath(RUN), int(os.environ.get("KILL_AT", "0")), 0
    flush = os.fsync

    def count() -> None:
        nonlocal changes
        changes += 1
        if changes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if event in CHANGES and not isinstance(arguments[0], int):
            # Deleting a tree names the last part alone, beside its folder's descriptor.
            inside = event in ("os.remove", "os.rmdir") and arguments[-1] != -1
            if inside or os.path.abspath(os.fsdecode(arguments[0])).startswith(folder):
                count()

    def counted_flush(descriptor: int) -> None:
        count()
        flush(descriptor)

    os.fsync = counted_flush
    sys.addaudithook(audit)
    if "KILL_COUNT" in os.environ:
        import atexit

        atexit.register(lambda: Path(os.environ["KILL_COUNT"]).write_text(str(changes)))


# --- Runs --------------------------------------------------------------------------------------------------------


def start(place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`veritune ARGUMENTS` in `place`. A worker that outlived its leader would hold standard error open."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it said on standard error; RuntimeError where it failed."""
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {error.strip()}")
    return error


def go_on(place: Path, settings: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """The process that continues the run in `place`, or begins it again where it has come to no checkpoint."""
    if not (place / RUN / "config.toml").exists():
        return start(place, *settings, "--run", RUN, **environment)
    whole = [path for path in (place / RUN / "checkpoints").glob("step-*") if (path / "manifest.json").exists()]
    begun = (place / RUN / "metrics.jsonl").exists() or (place / RUN / "validation").exists()
    return start(place, "resume", RUN, *(["--restart"] if begun and not whole else []), **environment)


def undisturbed(output: Path, kind: str) -> tuple[Path, int, float]:
    """A run that nobody kills, made once: its place, the changes of its folder, and the seconds that it took."""
    place = output / "whole" / kind.replace(" ", "-")
    facts = place / "facts.json"
    if not facts.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        began = time.monotonic()
        finish(start(place, *KINDS[kind], "--run", RUN, KILL_COUNT="count"))
        rows = [json.loads(line) for line in (place / RUN / "metrics.jsonl").read_text().splitlines()]
        if sum(row.get("grad_norm", 0) > 0 for row in rows) < 4:
            raise RuntimeError(f"{kind}: too few steps change the weights, so that nothing would be compared")
        facts.write_text(json.dumps([int((place / "count").read_text()), time.monotonic() - began]))
    changes, seconds = json.loads(facts.read_text())
    return place, changes, seconds


# --- Comparing ---------------------------------------------------------------------------------------------------


def steady(value: Any) -> Any:
    """JSON without what no two runs share: times, and what is made of them."""
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items() if not any(mark in key for mark in VOLATILE)}
    return [steady(each) for each in value] if isinstance(value, list) else value


def contents(run: Path) -> dict[str, str]:
    """A digest of every file of a run folder; of the report and its figures, which show times, the names alone."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir() or name in (".lock", "spent.json") or name.startswith("discarded-"):
            continue
        data = path.read_bytes()
        if name == "report.html" or name.startswith("figures/"):
            data = b""
        elif path.suffix == ".jsonl":
            data = json.dumps([steady(json.loads(line)) for line in data.splitlines()]).encode()
        elif name == "environment.json":
            data = json.dumps(steady(json.loads(data))).encode()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def differences(run: Path, whole: Path) -> list[str]:
    """The files in which two run folders differ."""
    ours, theirs = contents(run), contents(whole)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


# --- Cells -------------------------------------------------------------------------------------------------------


def kill_and_compare(output: Path, kind: str, number: int) -> dict[str, Any]:
    """Kill a run of a kind at a moment that `number` says, resume it to its end, compare."""
    whole, changes, seconds = undisturbed(output, kind)
    draw = random.Random(f"{kind} {number}")
    kills: list[str] = []
    with fresh_place(output, f"{kind}-{number}".replace(" ", "-")) as place:
        for attempt in range(2 if number % 4 == 3 else 1):
            at_change = draw.random() < 0.7 if attempt else number % 10 < 7
            at = draw.randint(1, changes)
            process = go_on(place, KINDS[kind], **({"KILL_AT": str(at)} if at_change else {}))
            if not at_change:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds * draw.uniform(0.3, 1.0))
                process.kill()
            process.communicate(timeout=PATIENCE_SECONDS)
            if process.returncode == -signal.SIGKILL:
                kills.append(f"before change {at}" if at_change else "at a random time")
        finish(go_on(place, KINDS[kind]))
        return {"kills": kills, "different": differences(place / RUN, whole / RUN)}


def four_resumes(output: Path) -> dict[str, Any]:
    """Four resumes of one killed run at once: one runs, three are refused, and the folder is as if nothing had been."""
    kind = "grpo off-policy"
    whole, changes, _ = undisturbed(output, kind)
    with fresh_place(output, "four-resumes") as place:
        start(place, *KINDS[kind], "--run", RUN, KILL_AT=str(changes * 2 // 3)).communicate(timeout=PATIENCE_SECONDS)
        processes = [start(place, "resume", RUN) for _ in range(4)]
        said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
        codes = sorted(process.returncode for process in processes)
        refused = sum("is being written by another process" in each for each in said)
        wrong = [] if codes == [0, 2, 2, 2] and refused == 3 else [f"exit codes {codes}, {refused} refused"]
        return {"exit codes": codes, "different": wrong + differences(place / RUN, whole / RUN)}


def fill_disk(output: Path, number: int) -> dict[str, Any]:
    """A run on a file system that is too small ends in one line; with more room it ends as one that had it always."""
    kind, size = "grpo off-policy", DISK_KIB[number] << 10
    whole, _, _ = undisturbed(output, kind)
    with fresh_place(output, f"disk-{number}") as place:
        mount = ["mount", "-t", "tmpfs", "-o"]
        subprocess.run([*mount, f"size={size}", "tmpfs", str(place)], check=True)
        try:
            process = start(place, *KINDS[kind], "--run", RUN)
            shown, error = process.communicate(timeout=PATIENCE_SECONDS)
            rows = place / RUN / "metrics.jsonl"
            kept = rows.read_text().count("\n") if rows.exists() else 0
            told = len({line.split()[1] for line in shown.splitlines() if line.startswith("step ")})
            wrong = [] if process.returncode == 1 and error.count("\n") == 1 else [f"{process.returncode}: {error}"]
            wrong += [] if kept >= told else [f"{told} steps were shown, {kept} rows kept"]
            subprocess.run([*mount, "remount,size=256m", str(place)], check=True)
            again = finish(go_on(place, KINDS[kind]))
            wrong += [again.strip()] if "is damaged" in again else []
            wrong += differences(place / RUN, whole / RUN)
            return {"bytes": size, "rows kept": kept, "error": error.strip(), "different": wrong}
        finally:
            subprocess.run(["umount", str(place)], check=True)


@contextlib.contextmanager
def fresh_place(output: Path, name: str) -> Iterator[Path]:
    """An empty folder, deleted again if all went well."""
    place = output / "runs" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    shutil.rmtree(place)


def measured(output: Path, name: str, cell: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The outcome of a cell, made now or by an earlier call."""
    file = output / "cells" / f"{name.replace(' ', '-')}.json"
    if not file.exists():
        try:
            outcome = cell()
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            outcome = {"different": [str(error)]}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(outcome, indent=2) + "\n")
    outcome = json.loads(file.read_text())
    print(
        f"{name}: {'DIFFERENT ' + '; '.join(outcome['different']) if outcome['different'] else 'the same'}", flush=True
    )
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/kill"), help="where the cells go")
    parser.add_argument("--kills", type=int, default=100, help="runs to kill, a multiple of 5")
    parser.add_argument("--jobs", type=int, default=2, help="cells side by side")
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    for kind in KINDS:
        undisturbed(output, kind)
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for number in range(arguments.kills // len(KINDS)):
        for kind in KINDS:
            cells[f"{kind} {number}"] = lambda kind=kind, number=number: kill_and_compare(output, kind, number)
    cells["four resumes"] = lambda: four_resumes(output)
    if os.geteuid() == 0:
        cells |= {f"disk {number}": lambda number=number: fill_disk(output, number) for number in range(len(DISK_KIB))}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda item: measured(output, *item), cells.items()))
    kills = sum(len(outcome.get("kills", ())) for outcome in outcomes)
    same = sum(not outcome["different"] for outcome in outcomes)
    print(f"{kills} kills; {same} of {len(outcomes)} cells ended the same")
    return 0 if same == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
