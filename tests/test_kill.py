"""`kill -9` at random moments of a run, then `veritune resume`: the same weights and metrics as if nobody had.

VERITUNE_KILLS=20 python -m pytest tests/test_kill.py   # more moments than the default suite tries
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

KILLS = int(os.environ.get("VERITUNE_KILLS", "2"))
VERITUNE = [sys.executable, "-c", "from veritune.cli import main; main()"]
SETTINGS = [
    *("--steps", "10", "--rollout-batch-size", "16", "--group-size", "4", "--train-batch-size", "8"),
    *("--loss-type", "grpo_clip", "--max-tokens", "40", "--validation-examples", "8", "--validate-every", "3"),
    *("--checkpoint-every", "2", "--threads", "1", "--learning-rate", "1e-3"),
]


def start(*arguments):
    return subprocess.Popen(
        [*VERITUNE, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error


def final_weights(run):
    return hashlib.sha256((run / "checkpoints" / "step-000010" / "model.safetensors").read_bytes()).hexdigest()


def steady_metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


@pytest.fixture(scope="module", params=[1, 2], ids="processes={}".format)
def whole(request, tmp_path_factory):
    """An uninterrupted run, how long it took, and its settings. A child that outlived its leader would hang a test:
    it holds the other end of the leader's stderr, which `communicate` reads to the end."""
    run, settings = tmp_path_factory.mktemp("whole") / "run", [*SETTINGS, "--processes", request.param]
    began = time.monotonic()
    finish(start("grpo", "--run", run, *settings))
    return run, time.monotonic() - began, settings


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_run_ends_as_the_one_that_nobody_killed(whole, tmp_path, number):
    uninterrupted, seconds, settings = whole
    run = tmp_path / "run"
    process = start("grpo", "--run", run, *settings)
    deadline = time.monotonic() + 120
    while not (run / "config.toml").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(random.Random(number).random() * seconds * 0.6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start("resume", run))
    assert final_weights(run) == final_weights(uninterrupted)
    assert steady_metrics(run) == steady_metrics(uninterrupted)
    assert [row["step"] for row in steady_metrics(run)] == list(range(11))


def test_control_c_saves_and_says_how_to_go_on(whole, tmp_path):
    uninterrupted, _, settings = whole
    run = tmp_path / "run"
    process = start("grpo", "--run", run, *settings)
    deadline = time.monotonic() + 120
    while not (run / "rollouts" / "step-000003.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.startswith("stopping after this step; once more stops at once\n")
    assert f"resume with: veritune resume {run}" in " ".join(error.split())
    assert "Traceback" not in error
    finish(start("resume", run))
    assert final_weights(run) == final_weights(uninterrupted)
