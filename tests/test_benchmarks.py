"""The GPU's script, on a CPU and a small model: every part runs, and its exactness checks see what they should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
SMALL = "--device cpu --shape small --groups 2 --siblings 4 --prompt-tokens 9 --response-tokens 12 --rounds 1"


def run(tmp_path, *arguments):
    output = tmp_path / "figures.json"
    command = [sys.executable, str(GPU), *SMALL.split(), "--head-tokens", "16", "--microbatch-tokens", "60", *arguments]
    subprocess.run([*command, "--output", str(output)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(output.read_text())["rows"]


def test_every_part_runs(tmp_path):
    rows = run(tmp_path, "--parts", "head", "rollout", "training", "step")
    assert {row["part"] for row in rows} == {"head", "rollout", "training", "step"}
    for row in rows:
        assert row["seconds"] > 0, row
    for row in rows:
        if row["part"] in ("rollout", "training"):  # 2 prompts of 4 responses of 12 tokens
            assert row["tokens/s"] * row["seconds"] == pytest.approx(96)


def test_the_packed_path_loses_no_more_to_bfloat16_than_the_plain_one(tmp_path):
    rows = {row["what"]: row for row in run(tmp_path, "--dtype", "bfloat16", "--parts", "exactness")}
    mean, most, gradient = "log-probabilities' mean distance", "most", "gradient's, relative"
    assert rows["ours, float32"][most] < 2e-5
    assert rows["ours, float32"][gradient] < 1e-5
    plain, ours = rows["plain, as trained"], rows["ours, as trained"]
    assert 1e-3 < plain[gradient] < 0.05  # bfloat16 has eight bits
    assert ours[gradient] < 1.5 * plain[gradient]
    assert ours[mean] < 1.5 * plain[mean]
