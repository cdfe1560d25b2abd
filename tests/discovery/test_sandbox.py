"""Hostile programs get nothing out, gain nothing and leave nothing; benign ones just work."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_programs import ENDLESS, HOSTILE

from veritune.core.errors import ConfigError
from veritune.discovery import sandbox
from veritune.discovery.sandbox import Limits, ProgramResult, SandboxLevel, probe_sandbox, require_sandbox, run_program

LIMITS = Limits(seconds=20.0, memory_mb=512, output_mb=4)
SHORT_LIMITS = Limits(seconds=0.7, memory_mb=512, output_mb=4)
"""For programs that would never end by themselves."""


@pytest.fixture(scope="module")
def level() -> SandboxLevel:
    """Landlock and seccomp, without bubblewrap: what the loop insists upon must hold by itself."""
    found = probe_sandbox()
    if not set(sandbox.REQUIRED_LAYERS) <= set(found.layers):
        pytest.skip(f"this kernel offers {found} only: {found.missing}")
    return SandboxLevel(sandbox.REQUIRED_LAYERS, {})


@pytest.fixture(scope="module")
def server():
    """A listening socket that nobody may reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def children() -> list[str]:
    """The command lines of the processes that this process started, directly or not."""
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except (OSError, ValueError):
                continue
    ours = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        if not more:
            return [commands[pid] for pid in ours - {os.getpid()}]
        ours |= more


@pytest.fixture
def contained(server: socket.socket, tmp_path: Path, monkeypatch):
    """Runs a hostile program at a level and checks that nothing got out, nothing was gained and nothing is left."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    (tmp_path / "secret").write_text("very-secret")
    settings = {"outside": tmp_path, "pid": os.getpid(), "port": server.getsockname()[1], "home": Path.home()}

    def run(name: str, level: SandboxLevel) -> ProgramResult:
        source, expected = HOSTILE[name]
        limits = SHORT_LIMITS if expected in (ENDLESS, "") else LIMITS
        for key, value in settings.items():
            source = source.replace("{" + key + "}", str(value))
        started = time.monotonic()
        result = run_program(source, limits, level)
        assert time.monotonic() - started < limits.seconds + 2
        assert "very-secret" not in result.error + json.dumps(result.candidate)
        assert result.sandbox == str(level)
        assert [path.name for path in tmp_path.iterdir()] == ["secret"]
        assert (tmp_path / "secret").read_text() == "very-secret"
        with pytest.raises(BlockingIOError):
            server.accept()
        assert not [command for command in children() if "sandbox_child" in command]
        return result

    return run


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, level: SandboxLevel, contained) -> None:
    expected = HOSTILE[name][1]
    result = contained(name, level)
    if expected is not None:
        assert result.error
        assert expected in result.error
        assert result.candidate is None


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_with_bubblewrap_on_top(name: str, contained) -> None:
    level = probe_sandbox()
    if level.layers != sandbox.LAYERS:
        pytest.skip(f"not every layer works here: {level.missing}")
    result = contained(name, level)
    assert HOSTILE[name][1] is None or result.error  # its words differ: what is hidden is not even found


def test_no_scratch_folder_stays(level: SandboxLevel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for source in ("open('kept', 'w').write('x')\npoints = [[1]]", "import time\nopen('kept', 'w')\ntime.sleep(99)"):
        run_program(source, Limits(seconds=0.5), level)
    assert list(tmp_path.iterdir()) == []


FORGERIES = {
    "the form of the sandbox": "os.write(pipe, b'{\"candidate\": [[7]]}')",
    "a verdict": 'os.write(pipe, b\'{"candidate": [[7]], "valid": true, "score": 9999}\')',
    "a header and a result": 'os.write(pipe, b\'{"layers": []}\\n{"candidate": [[7]]}\')',
    "no JSON": "os.write(pipe, b'\\x80\\x04\\x95pickle')",
    "a JSON bomb": "os.write(pipe, b'[' * 10**6)",
    "a long number": "os.write(pipe, b'{\"candidate\": ' + b'9' * 10**6 + b'}')",
    "a bare number": "os.write(pipe, b'7')",
    "words for the terminal": 'os.write(pipe, b\'{"error": "\\\\u001b[2J\' + b"x" * 10**6 + b\'\\\\ud800"}\')',
}


@pytest.mark.parametrize("name", FORGERIES)
def test_the_result_channel_carries_data_and_nothing_else(name: str, level: SandboxLevel) -> None:
    find_pipe = "import os, stat\npipe = max(fd for fd in range(3, 64) if _is_pipe(fd))\n"
    helper = (
        "def _is_pipe(fd):\n  import os, stat\n  try: return stat.S_ISFIFO(os.fstat(fd).st_mode)\n"
        "  except OSError: return False\n"
    )
    result = run_program(f"{helper}{find_pipe}{FORGERIES[name]}\nos._exit(0)", LIMITS, level)
    if name == "words for the terminal":
        assert result.error == "x" * 3999 + "\ufffd"
    elif name == "the form of the sandbox":
        assert (result.candidate, result.error) == ([[7]], "")  # exactly what a global `points` would have given
    else:
        assert result.candidate is None
        assert "not JSON data" in result.error or "not in the form" in result.error


def test_patching_json_gains_nothing(level: SandboxLevel) -> None:
    source = 'import json\njson.dumps = lambda *a, **k: \'{"candidate": "forged"}\'\npoints = [[1]]'
    assert run_program(source, LIMITS, level).candidate == "forged"  # data, which no verifier accepts


INTERFACES = {
    "def run_code(): return [[1]]\ndef get_centers(): return [[2]]\npoints = [[3]]": [[1]],
    "def get_centers(): return ((2,),)\npoints = [[3]]": [[2]],
    "points = [[3]]": [[3]],
    "import numpy as np\npoints = np.array([[3, 4]])": [[3, 4]],
    "import numpy as np\npoints = [np.array([3], dtype=np.int8), (np.int64(4),)]": [[3], [4]],
    "import numpy as np\npoints = np.array([[3.0]])": [[3.0]],
    "import numpy as np\npoints = [[np.bool_(True)]]": [[True]],
    "print('hello')\nimport sys\nsys.stdout.flush()\npoints = [[2**300]]": [[2**300]],
    "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\npoints = [[P(5).x]]": [[5]],
    "if __name__ == '__main__': points = 1\nelse: points = [[6]]": [[6]],
    "import tempfile, time\nf = tempfile.TemporaryFile()\nf.write(b'x' * 10**6)\ntime.sleep(0.2)\npoints = [[8]]": [
        [8]
    ],
    "import numpy as np, os, time\nm = np.memmap('f', dtype=np.int8, mode='w+', shape=10**6)\nos.unlink('f')\n"
    "time.sleep(0.2)\npoints = [[9]]": [[9]],
    "def run_code(): return ([[1]], 1)": [[[1]], 1],
    "def run_code(): pass\ndef get_centers(): return [[2]]\npoints = [[3]]": [[2]],
    "def run_code(): pass\npoints = [[3]]": [[3]],
    "open('note', 'w').write('7')\npoints = [[int(open('note').read())]]": [[7]],
}


@pytest.mark.parametrize("source", INTERFACES)
def test_interfaces(source: str, level: SandboxLevel) -> None:
    result = run_program(source, LIMITS, level)
    assert result.error == ""
    assert json.dumps(result.candidate) == json.dumps(INTERFACES[source])  # json tells 3 from 3.0 and True from 1


def test_a_small_text_of_many_lists_is_not_unfolded(level: SandboxLevel) -> None:
    """Seven megabytes of text would take a hundred and forty in this process; of two million rows it is enough."""
    result = run_program("points = [[]] * 2_200_000", Limits(), level)
    assert (result.candidate, result.error) == (None, "the program's result holds more than 2100000 lists")
    assert len(run_program("points = [[]] * 2_000_000", Limits(), level).candidate) == 2_000_000


def test_numpy_computes(level: SandboxLevel) -> None:
    source = "import numpy as np\na = np.arange(9.0).reshape(3, 3) + np.eye(3)\npoints = [int(round(np.linalg.det(a)))]"
    result = run_program(source, LIMITS, level)
    assert (result.candidate, result.error) == ([-5], "")  # [[1,1,2],[3,5,5],[6,7,9]]: 10 + 3 - 18


def test_an_error_names_the_line(level: SandboxLevel) -> None:
    error = run_program("a = 1\nb = a / 0\n", LIMITS, level).error
    assert "line 2" in error
    assert "b = a / 0" in error
    assert "ZeroDivisionError" in error
    assert "sandbox_child" not in error


def test_each_layer_alone_prevents_what_the_probe_tries() -> None:
    level = probe_sandbox()
    for layer in sandbox.LAYERS:
        assert (layer in level.layers) != (layer in level.missing)


def test_a_layer_that_does_not_hold_is_found_out(monkeypatch, tmp_path: Path) -> None:
    """A seccomp filter that allows everything must not pass for a layer."""
    allow_everything = bytes.fromhex("0600000000000000")[:4] + (0x7FFF0000).to_bytes(4, sys.byteorder)
    monkeypatch.setattr(sandbox.seccomp, "filter_program", lambda: allow_everything)
    fault = sandbox._layer_fault("seccomp", str(tmp_path))
    assert "left no result" in fault or "open_socket, fork, signal_parent" in fault


def test_below_landlock_and_seccomp_the_loop_refuses(monkeypatch) -> None:
    weak = SandboxLevel(("limits", "seccomp"), {"landlock": "not in this kernel", "bubblewrap": "not installed"})
    monkeypatch.setattr(sandbox, "probe_sandbox", lambda: weak)
    with pytest.raises(ConfigError, match=r"missing landlock \(not in this kernel\).*--unsafe-no-sandbox"):
        require_sandbox()
    assert require_sandbox(unsafe=True) is weak


def test_without_layers_the_limits_still_hold() -> None:
    """What --unsafe-no-sandbox leaves: the process group dies although a child holds the standard output."""
    bare = SandboxLevel((), {})
    started = time.monotonic()
    result = run_program("import subprocess\nsubprocess.Popen(['sleep', '987'])\npoints = [[1]]", LIMITS, bare)
    assert time.monotonic() - started < 2
    assert result.candidate == [[1]]
    assert result.sandbox == "none"
    assert not [command for command in children() if "sleep 987" in command]


def test_the_parent_dies_and_so_does_the_program(level: SandboxLevel, tmp_path: Path) -> None:
    code = (
        "from veritune.discovery.sandbox import *\n"
        "run_program('import time; time.sleep(600)', Limits(seconds=600), probe_sandbox())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 30
    while not (found := _descendants_with_scratch(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    parent.kill()
    parent.wait()
    while _descendants_with_scratch(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _descendants_with_scratch(tmp_path)


def _descendants_with_scratch(folder: Path) -> list[str]:
    """Processes that work in a scratch folder under `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if str(os.readlink(process / "cwd")).startswith(str(folder / "veritune-scratch")):
                    found.append(process.name)
            except OSError:
                continue
    return found


def test_an_ordinary_user_is_contained_too() -> None:
    """As root: the same hostile programs, run by nobody, with an interpreter that nobody may read."""
    setpriv, interpreter = shutil.which("setpriv"), "/usr/bin/python3"
    if os.geteuid() != 0 or setpriv is None or not Path(interpreter).exists():
        pytest.skip("needs root, setpriv and a system Python")
    root = Path(__file__).parents[2]
    packages = Path(sandbox.find_spec("numpy").origin).parents[1]
    user = [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", interpreter]
    environment = {"PYTHONPATH": f"{root / 'src'}:{packages}", "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    importable = [*user, "-c", "import numpy, veritune.discovery"]
    if subprocess.run(importable, env=environment, capture_output=True, check=False).returncode:
        pytest.skip("that user's Python does not find this package and numpy")
    names = [
        "fork bomb",
        "reads a file",
        "writes outside",
        "network",
        "kills the parent",
        "memory bomb",
        "floods stdout",
    ]
    report = subprocess.run(
        [*user, str(Path(__file__).with_name("as_user.py")), *names],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert report.returncode == 0, report.stderr
    lines = json.loads(report.stdout)
    assert {"limits", "landlock", "seccomp"} <= set(lines["level"])
    assert lines["numpy"] == [3, 5]
    for name in names:
        assert HOSTILE[name][1] in lines["errors"][name], name
