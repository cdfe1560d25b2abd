"""`verify_file`: metrics of files, with hostile ones among them."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest

from veritune.core.errors import ConfigError
from veritune.discovery import build_problem, exit_code, verification, verify_file
from veritune.discovery import sandbox as sandbox_module
from veritune.discovery.evaluate import evaluate_program
from veritune.discovery.outputs import scored_by_evaluators
from veritune.discovery.sandbox import REQUIRED_LAYERS, Limits, SandboxLevel, probe_sandbox
from veritune.discovery.verification import VerificationLimits

AXES = [[2 * s if k == i else 0 for k in range(11)] for i in range(11) for s in (1, -1)]


def test_valid_points(tmp_path: Path) -> None:
    for text in (json.dumps(AXES), json.dumps({"points": AXES}), "\ufeff" + json.dumps(AXES)):
        path = tmp_path / "points.json"
        path.write_text(text, encoding="utf-8")
        metrics = verify_file("kissing", path, 11)
        assert metrics == {
            "num_points": 22, "dimension": 11, "validity": True, "combined_score": 22, "error": None,
        }  # fmt: skip
        assert exit_code(metrics) == 0


HOSTILE_FILES = {
    "not UTF-8": (b"\xff\xfe[[1]]", "codec can't decode"),
    "not JSON": (b"[[1, 2", "not JSON"),
    "empty": (b"", "not JSON"),
    "too deep": (b"[" * 200_000, "not JSON"),
    "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00", "codec can't decode"),
    "a number of five thousand digits": (b"[[" + b"9" * 5000 + b"]]", "not readable as JSON"),
    "NaN": (b"[[NaN, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1]]", "coordinate 0 of point 0 is the float nan"),
    "an exponent": (b"[[1e0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1]]", "point 1 has 1 coordinates"),
    "half a point": (b"[[0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0], [1]]", "coordinate 3 of point 0 is the float 0.5"),
    "infinity": (b"[[1e999, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1]]", "coordinate 0 of point 0 is the float inf"),
    "true": (b"[[true, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1]]", "is the boolean True"),
    "its own verdict": (b'{"validity": true, "combined_score": 593}', "must be a list of points"),
    "a number": (b"593", "must be a list of points"),
    "ragged": (json.dumps([*AXES, [1, 1]]).encode(), "point 22 has 2 coordinates; 11 are required"),
    "too many": (json.dumps(AXES * 40).encode(), "880 points exceed 868"),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_files(name: str, tmp_path: Path) -> None:
    data, fault = HOSTILE_FILES[name]
    path = tmp_path / "points.json"
    path.write_bytes(data)
    metrics = verify_file("kissing", path, 11)
    assert fault in metrics["error"]
    assert (metrics["validity"], metrics["combined_score"], exit_code(metrics)) == (False, 0, 1)
    json.dumps(metrics, allow_nan=False)


def test_an_absent_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "absent.py"):
        metrics = verify_file("kissing", path, 11)
        assert str(path) in metrics["error"]
        assert exit_code(metrics) == 1


def test_programs(tmp_path: Path) -> None:
    if not set(REQUIRED_LAYERS) <= set(probe_sandbox().layers):
        pytest.skip("programs need Landlock and seccomp")
    program = tmp_path / "program.py"
    program.write_text(f"points = {AXES}")
    metrics = verify_file("kissing", program, 11)
    assert (metrics["combined_score"], metrics["sandbox"]) == (22, str(probe_sandbox()))
    program.write_text("validity = True\ncombined_score = 593\npoints = [[0.5] * 11] * 2")
    metrics = verify_file("kissing", program, 11)
    assert (metrics["combined_score"], metrics["num_points"], exit_code(metrics)) == (0, 2, 1)
    assert "is the float 0.5" in metrics["error"]
    program.write_text("while True: pass")
    metrics = verify_file("kissing", program, 11, program_seconds=0.5)
    assert "stopped after its limit of 0.5 s" in metrics["error"]
    program.write_bytes(b"points = '\xff'")
    assert "codec can't decode" in verify_file("kissing", program, 11)["error"]


def test_a_program_needs_the_sandbox_and_points_do_not(tmp_path: Path, monkeypatch) -> None:
    weak = SandboxLevel(("limits",), {"landlock": "no", "seccomp": "no", "bubblewrap": "no"})
    monkeypatch.setattr(sandbox_module, "probe_sandbox", lambda: weak)
    (tmp_path / "program.py").write_text(f"points = {AXES}")
    (tmp_path / "points.json").write_text(json.dumps(AXES))
    with pytest.raises(ConfigError, match=r"missing landlock \(no\); seccomp \(no\)"):
        verify_file("kissing", tmp_path / "program.py", 11)
    assert verify_file("kissing", tmp_path / "points.json", 11)["validity"]
    metrics = verify_file("kissing", tmp_path / "program.py", 11, unsafe_no_sandbox=True)
    assert (metrics["validity"], metrics["sandbox"]) == (True, "limits")


PROGRAMS = {
    "a tuple": "def run_code(): return (AXES,)",
    "with its dimension": "def run_code(): return (AXES, 11)",
    "a list with its dimension": "def run_code(): return [AXES, 11]",
    "bare": "def run_code(): return AXES",
    "an array": "def run_code(): return np.array(AXES)",
    "an array in a tuple": "def run_code(): return (np.array(AXES, dtype=float), 11)",
    "get_centers": "def get_centers(): return AXES",
    "get_centers with floats": "def get_centers(): return np.array(AXES, dtype=np.float32)",
    "get_centers in a tuple": "def get_centers(): return (AXES,)",
    "get_centers after nothing": "def run_code(): pass\ndef get_centers(): return AXES",
    "points": "points = AXES",
    "points as floats": "points = [[float(x) for x in row] for row in AXES]",
    "points after nothing": "def run_code(): return None\nget_centers = run_code\npoints = AXES",
    "a set": "def run_code(): return {tuple(row) for row in AXES}",
    "a generator": "def run_code(): yield from AXES",
    "a default argument": "def run_code(points=AXES):\n    return points, len(points[0])",
    "only in a comment": "points = AXES  # run_code",
    "as the handout has it": "def run_code():\n    points = AXES\n    return (points,)",
    "ends with a helper": "def run_code():\n    return AXES\ndef helper(points):\n    return (points,)",
    "two ways out": "def run_code():\n    if AXES:\n        return AXES\n    points = []\n    return (points,)\n",
}


def source_of(name: str) -> str:
    return f"import numpy as np\nAXES = {AXES}\n{PROGRAMS[name]}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_form_that_the_course_knows(name: str, tmp_path: Path) -> None:
    if not set(REQUIRED_LAYERS) <= set(probe_sandbox().layers):
        pytest.skip("programs need Landlock and seccomp")
    program = tmp_path / "program.py"
    program.write_text(source_of(name))
    metrics = verify_file("kissing", program, 11)
    assert (metrics["error"], metrics["combined_score"], metrics["num_points"]) == (None, 22, 22)


def test_an_answer_in_another_encoding_costs_its_sample_and_not_the_run() -> None:
    if not set(REQUIRED_LAYERS) <= set(probe_sandbox().layers):
        pytest.skip("programs need Landlock and seccomp")
    forged = (
        "import os\nanswer = '{\"candidate\": [[7]]}'.encode('utf-16')\nfor fd in range(3, 64):\n"
        "  try: os.write(fd, answer)\n  except OSError: pass\nos._exit(0)"
    )
    evaluation = evaluate_program(build_problem("kissing", 1), forged, Limits(), VerificationLimits(), probe_sandbox())
    assert not evaluation.verdict.valid
    assert "the program's result is not readable as JSON" in evaluation.verdict.message


def homework_score(path: Path) -> int:
    """As the course's evaluator takes a program's points: the first item of a list or tuple, as an array of floats."""
    spec = importlib.util.spec_from_file_location("user_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    points = None
    if callable(getattr(module, "run_code", None)):
        points = module.run_code()
        points = points[0] if isinstance(points, list | tuple) else points
    if points is None and callable(getattr(module, "get_centers", None)):
        points = module.get_centers()
    points = np.around(np.asarray(module.points if points is None else points, dtype=float)).astype(np.int64)
    assert points.ndim == 2
    distances = ((points[:, None] - points[None]) ** 2).sum(axis=2)[~np.eye(len(points), dtype=bool)]
    norms = (points**2).sum(axis=1)
    return len(points) if norms.min() > 0 and distances.min() >= norms.max() else 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_program_scores_at_the_courses_evaluator(name: str, tmp_path: Path) -> None:
    path = tmp_path / "best_program.py"
    path.write_text(scored_by_evaluators(source_of(name), build_problem("kissing", 11)))
    assert homework_score(path) == 22
    if name in ("points", "as the handout has it"):
        assert path.read_text() == source_of(name)


def test_a_ruler_is_handed_over_in_a_tuple_too() -> None:
    for returned in ("[0, 1, 4, 6]", "([0, 1, 4, 6],)", "([0, 1, 4, 6], 4)", "range(4)"):
        scope: dict = {}
        program = f"def run_code():\n    return {returned}"
        exec(scored_by_evaluators(program, build_problem("golomb_ruler", 4)), scope)
        assert scope["run_code"]() == ([0, 1, 2, 3] if "range" in returned else [0, 1, 4, 6],)


def test_a_verification_keeps_its_limits(tmp_path: Path) -> None:
    """The pairs of 40,000 vectors of 200 bits take minutes; 200 MB do not hold them."""
    draw = random.Random(2)
    points = [[draw.getrandbits(200) for _ in range(24)] for _ in range(40_000)]
    path = tmp_path / "points.json"
    path.write_text(json.dumps(points))
    started = time.monotonic()
    metrics = verify_file("kissing", path, 24, verification_seconds=0.5)
    assert time.monotonic() - started < 30  # a hang limit
    assert metrics["error"] == "the verification was stopped after its limit of 0.5 s"
    assert (metrics["validity"], metrics["combined_score"], exit_code(metrics)) == (False, 0, 1)
    metrics = verify_file("kissing", path, 24, verification_memory_mb=200)
    assert metrics["error"] == "the verification needs more than its limit of 200 MB"
    for field, value in (("seconds", 0), ("seconds", math.inf), ("seconds", math.nan), ("memory_mb", 0)):
        with pytest.raises(ConfigError, match=f"{field} is {value}"):
            verify_file("kissing", path, 24, **{f"verification_{field}": value})


def test_a_worker_that_dies_is_a_refusal(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "points.json").write_text(json.dumps(AXES))
    for program, said in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the verification was ended by SIGKILL"),
        ("raise SystemError('broken')", "the verification failed: SystemError: broken"),
    ):
        monkeypatch.setattr(verification, "_PROGRAM", program)
        metrics = verify_file("kissing", tmp_path / "points.json", 11)
        assert (metrics["error"], metrics["validity"]) == (said, False)
