"""The pool under graders that hang, die, eat memory and print, under Ctrl-C, threads and forks."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from veritune.core.errors import ConfigError, DataError
from veritune.grading import GradingPool, question_only_score, settle_question_only

from . import graders


def faulty_pool(**settings: object) -> GradingPool:
    return GradingPool(grader=graders.faulty, settle=None, **settings)  # type: ignore[arg-type]


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process_id}/stat").read_text().split(") ")[1][0] != "Z" if Path("/proc").exists() else True


@pytest.mark.parametrize("fault", ["sleep", "spin", "one long C call"])
def test_hanging_answers_score_zero_and_all_others_are_right(fault: str) -> None:
    pairs = [(str(n), str(n) if n % 2 else "other") for n in range(64)]
    hanging = {3, 4, 40, 63}
    for index in hanging:
        pairs[index] = (fault, "5")
    with faulty_pool(seconds_per_answer=0.5) as pool:
        scores = pool.score(pairs)
        assert pool.grader_timeouts == len(hanging)
        assert [score.rule == "timeout" for score in scores] == [index in hanging for index in range(64)]
        for index, score in enumerate(scores):
            assert score.reward == (0.0 if index in hanging else float(index % 2))


def test_hanging_answers_overlap() -> None:
    with faulty_pool(seconds_per_answer=1.0) as pool:
        started = time.monotonic()
        pool.score([("sleep", "5")] * 8)
        assert time.monotonic() - started < 6.0  # one after another on two workers takes 4 s, on one worker 8 s
        assert pool.grader_timeouts == 8
        assert [score.reward for score in pool.score([("5", "5"), ("6", "5")])] == [1.0, 0.0]


def test_slow_answers_are_graded_side_by_side(tmp_path: Path) -> None:
    """Eight gradings that each wait for the other seven all end: one after another, all would run out of time."""
    with GradingPool(graders.meet, None, seconds_per_answer=30.0) as pool:
        assert [score.reward for score in pool.score([("8", str(tmp_path))] * 8)] == [1.0] * 8


def test_the_processes_of_slow_rewards_are_kept(tmp_path: Path) -> None:
    """After the first batch has taught the pool how slow they are, no answer costs a new process."""
    with GradingPool(graders.deliberate, None, max_workers=4, seconds_per_answer=30.0) as pool:
        pool.score([("", str(tmp_path))] * 12)
        known = {worker.process.pid for worker in pool._workers}
        assert len(known) == 4
        pool.score([("", str(tmp_path))] * 12)
        assert {worker.process.pid for worker in pool._workers} == known


def test_a_ground_truth_that_is_no_json_is_one_error() -> None:
    with (
        faulty_pool() as pool,
        pytest.raises(DataError, match=r"ground truth is \{1, 2\}; it must be JSON .*: Object of type set is not JSON"),
    ):
        pool.score([("5", {1, 2})])


def test_a_reward_that_its_process_cannot_load_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_only.py").write_text("def reward(response, ground_truth):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = importlib.import_module("here_only").reward
    (tmp_path / "here_only.py").unlink()
    with (
        GradingPool(reward, None) as pool,
        pytest.raises(ConfigError, match="cannot load the reward: ModuleNotFoundError: No module named 'here_only'"),
    ):
        pool.score([("", "")])


def test_a_fault_of_one_answer_costs_only_that_answer() -> None:
    pairs = [("5", "5"), ("memory", "5"), ("die", "5"), ("raise", "5"), ("print", "5"), ("6", "6")]
    with faulty_pool(workers=1) as pool:
        scores = pool.score(pairs)
        assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
        assert [score.rule for score in scores[1:4]] == [
            "reward failed: MemoryError",
            "worker died",
            "reward failed: ValueError: a fault",
        ]
        assert pool.grader_timeouts == 0


def test_an_answer_whose_worker_was_killed_by_someone_else_is_graded_again(tmp_path: Path) -> None:
    with faulty_pool(workers=1) as pool:
        assert [score.reward for score in pool.score([(f"die once {tmp_path}/marker", "5"), ("5", "5")])] == [1.0, 1.0]


def test_the_pool_survives_killed_workers_and_reuses_living_ones() -> None:
    pairs = [(str(n), str(n)) for n in range(20)]
    with faulty_pool() as pool:
        pool.score(pairs)
        first = {worker.process.pid for worker in pool._workers}
        pool.score(pairs)
        assert {worker.process.pid for worker in pool._workers} == first
        for process_id in first:
            os.kill(process_id, signal.SIGKILL)
        assert all(score.reward == 1.0 for score in pool.score(pairs))
        assert not first & {worker.process.pid for worker in pool._workers}


def test_closing_leaves_no_process_behind() -> None:
    pool = faulty_pool(seconds_per_answer=0.3)
    pool.score([("sleep", "5"), ("5", "5"), ("6", "6")])
    process_ids = [worker.process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert process_ids
    assert not any(is_alive(process_id) for process_id in process_ids)
    with pytest.raises(ConfigError, match="closed"):
        pool.score([("5", "5")])


PROGRAM = """
import sys
from tests.grading.graders import faulty
from veritune.grading import GradingPool
pool = GradingPool(grader=faulty, settle=None, seconds_per_answer=30.0)
pool.score([("5", "5")])
print(*(worker.process.pid for worker in pool._workers), flush=True)
if sys.argv[1] == "hang":
    pool.score([("spin", "5")])
"""


@pytest.mark.parametrize(("mode", "sent"), [("exit", None), ("hang", signal.SIGINT)])
def test_no_process_outlives_the_program(mode: str, sent: signal.Signals | None) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert program.stdout is not None
    process_ids = [int(text) for text in program.stdout.readline().split()]
    assert process_ids
    if sent is not None:
        time.sleep(0.5)
        program.send_signal(sent)
    program.wait(timeout=30)
    program.stdout.close()
    deadline = time.monotonic() + 10.0
    while any(map(is_alive, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, process_ids))


def test_an_orphaned_worker_is_ended_by_its_own_alarm() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("30.0", "1.0"), "hang"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert program.stdout is not None
    process_ids = [int(text) for text in program.stdout.readline().split()]
    time.sleep(0.2)
    program.kill()
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 15.0
    while any(map(is_alive, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, process_ids))


def test_threads_share_a_pool() -> None:
    wrong: list[int] = []
    with faulty_pool() as pool:

        def grade(offset: int) -> None:
            scores = pool.score([(str(n), str(offset)) for n in range(30)])
            if [score.reward for score in scores] != [float(n == offset) for n in range(30)]:
                wrong.append(offset)

        threads = [threading.Thread(target=grade, args=(offset,)) for offset in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_forked_child_starts_workers_of_its_own() -> None:
    with faulty_pool() as pool:
        pool.score([("5", "5")])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if [score.reward for score in pool.score([("7", "7"), ("8", "7")])] == [1.0, 0.0] else 1
                pool.close()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert [score.reward for score in pool.score([("5", "5"), ("6", "5")])] == [1.0, 0.0]


def test_cheap_answers_start_no_process() -> None:
    with GradingPool() as pool:
        scores = pool.score(
            [
                ("</think> <answer>72</answer>", "72"),
                ("</think> <answer>73</answer>", 72),
                ("</think> <answer>x = 1/2 or 7</answer>", ["7", "0.5, 7"]),
                ("no format", "72"),
                ("</think> <answer>" + "9" * 100_000 + "</answer>", "72"),
            ]
        )
        assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 0.0, 0.0]
        assert pool._workers == []


def test_costly_answers_are_graded_by_workers_as_they_are_here() -> None:
    pairs = [
        (r"</think> <answer>2\sqrt{3}</answer>", r"\sqrt{12}"),
        (r"</think> <answer>3\sqrt{3}</answer>", r"\sqrt{12}"),
        (r"</think> <answer>9^{9^9}</answer>", "9"),
        (r"</think> <answer>x^2</answer>", ["x", "x^2"]),
    ]
    with GradingPool(workers=1) as pool:
        assert [score.reward for score in pool.score(pairs)] == [1.0, 0.0, 0.0, 1.0]
        assert len(pool._workers) == 1
        boxed = GradingPool(
            grader=question_only_score,
            settle=settle_question_only,
            workers=1,
        )
        with boxed:
            assert [score.reward for score in boxed.score([(r"\boxed{2\sqrt{3}}", r"\sqrt{12}"), ("", "5")])] == [
                1.0,
                0.0,
            ]


def test_an_empty_batch_is_no_work() -> None:
    with faulty_pool() as pool:
        assert pool.score([]) == []
        assert pool._workers == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 9, "max_workers": 8}, "workers is 9"),
        ({"seconds_per_answer": 0.0}, "seconds_per_answer is 0.0"),
        ({"memory_bytes": 5}, "memory_bytes is 5"),
        ({"grader": lambda response, ground_truth: 1.0}, "reward is <function <lambda>.*cannot be sent to a grading"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradingPool(**settings)  # type: ignore[arg-type]
