"""`verify_file`: metrics of files, with hostile ones among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veritune.core.errors import ConfigError
from veritune.discovery import exit_code, verify_file
from veritune.discovery import sandbox as sandbox_module
from veritune.discovery.sandbox import REQUIRED_LAYERS, SandboxLevel, probe_sandbox

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
    "an exponent": (b"[[1e0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1]]", "is the float 1.0"),
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
