"""`kill -9` during a run, then `veritune resume`: the same folder as if nobody had. `benchmarks/kill.py` tries more."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import kill

KINDS = ("grpo on-policy", "sft", "expert iteration", "two processes")
"""The last is off-policy too."""
KIND = KINDS[-1]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("kill")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_the_one_that_nobody_killed(output, kind):
    outcome = kill.kill_and_compare(output, kind, number=1)
    assert outcome["kills"] and outcome["different"] == []


def wait_for_step(place, step, meanwhile=lambda: time.sleep(0.01)):
    deadline = time.monotonic() + 240
    while not (place / kill.RUN / "rollouts" / f"step-{step:06d}.jsonl").exists():
        assert time.monotonic() < deadline
        meanwhile()


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGINT, 130, "; once more stops at once"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_a_stopped_run_saves_once_and_says_how_to_go_on(output, tmp_path, number, code, more):
    whole, _, _ = kill.undisturbed(output, KIND)
    process = kill.start(tmp_path, *kill.KINDS[KIND], "--run", kill.RUN)
    wait_for_step(tmp_path, 3)  # 2 and 4 have a checkpoint in any case
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) >= 2  # a cluster's signal reaches all processes, and may come again
    for receiver in [process.pid, *map(int, workers), *([] if number == signal.SIGINT else [process.pid] * 2)]:
        os.kill(receiver, number)
    _, error = process.communicate(timeout=240)
    assert process.returncode == code
    first, last = error.splitlines()
    assert first == f"stopping after this step{more}"
    step = int(last.removeprefix("error: stopped after step ").split(";")[0])
    assert step in (3, 4) and last.endswith(f"; resume with: veritune resume {kill.RUN}")
    saved = sorted(path.name for path in (tmp_path / kill.RUN / "checkpoints").iterdir())
    assert saved[-1] == f"step-{step:06d}"
    kill.finish(kill.start(tmp_path, "resume", kill.RUN))
    assert kill.differences(tmp_path / kill.RUN, whole / kill.RUN) == []


def test_a_closed_terminal_loses_no_step(output, tmp_path):
    terminal, inside = pty.openpty()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(terminal)
        for stream in (0, 1, 2):
            os.dup2(inside, stream)
        os.ttyname(0)
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that a session's leader opens is its own
        os.chdir(tmp_path)
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", kill.CHILD, *kill.KINDS[KIND], "--run", kill.RUN])
    os.close(inside)

    def read_what_it_shows():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)

    wait_for_step(tmp_path, 3, read_what_it_shows)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    saved = sorted(path.name for path in (tmp_path / kill.RUN / "checkpoints").iterdir())
    assert saved[-1] in ("step-000003", "step-000004")
