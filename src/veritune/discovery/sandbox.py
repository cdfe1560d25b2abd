"""Runs a candidate program where it can do no harm, and returns its result as data.

The layers, each probed before it is relied upon: `limits` (CPU, memory, files, processes), `landlock` (which paths),
`seccomp` (which system calls, and no capability), and `bubblewrap` on top where it is installed and works (own view of
the file system, of processes and of the network). The parent never believes the child: it bounds what it reads, parses
it as JSON, and leaves it to an exact verifier.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import IO, Any

from veritune.core.errors import ConfigError
from veritune.discovery import seccomp

LAYERS = ("limits", "landlock", "seccomp", "bubblewrap")
REQUIRED_LAYERS = ("limits", "landlock", "seccomp")

_CHILD_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_SYSTEM_PATHS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo"),
)
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""The environment that keeps NumPy's libraries to one core."""
_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.05
_SHOWN_OUTPUT_BYTES = 1000
_SHOWN_ERROR_CHARACTERS = 4000
_MAX_OPEN_FILES = 64
_MAX_SCRATCH_FILES = 1000
_MAX_LISTS = 2_100_000
"""Of a result, two million rows and some: empty lists take twenty times the memory of their text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one candidate program may use."""

    seconds: float = 60.0
    """Wall-clock time; CPU time is bounded by the same."""
    memory_mb: int = 2048
    output_mb: int = 32
    """Each of: what is printed, the result, the files in the scratch folder, unlinked but open ones included."""


@dataclass(frozen=True, slots=True)
class SandboxLevel:
    """Which layers hold on this machine, and why the others don't, such as {"bubblewrap": "bwrap is not installed"}."""

    layers: tuple[str, ...]
    missing: dict[str, str]

    def __str__(self) -> str:
        return "+".join(self.layers) or "none"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a candidate program left behind."""

    candidate: Any
    """JSON data, unverified; None where `error` says why there is none."""
    error: str
    seconds: float
    sandbox: str
    answer: bytes = b""
    """The JSON object that holds the candidate, as the program's process wrote it."""


def require_sandbox(*, unsafe: bool = False) -> SandboxLevel:
    """The level of this machine; below Landlock and seccomp a ConfigError names what is missing, unless `unsafe`."""
    level = probe_sandbox()
    absent = [f"{layer} ({level.missing[layer]})" for layer in REQUIRED_LAYERS if layer not in level.layers]
    if absent and not unsafe:
        raise ConfigError(
            f"the sandbox is incomplete here: missing {'; '.join(absent)}. Candidate programs are not run without it; "
            "--unsafe-no-sandbox runs them with the layers that remain"
        )
    return level


def run_program(source: str, limits: Limits, level: SandboxLevel) -> ProgramResult:
    """The result of the Python program `source` under every layer of `level`.

    Whatever the program does, this returns within `limits.seconds` and about a second more, nothing of the program
    keeps running, and its scratch folder is gone.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        scratch = os.path.realpath(tempfile.mkdtemp(prefix="veritune-scratch-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        read_end, write_end = os.pipe()
        reader, writer = stack.enter_context(open(read_end, "rb")), stack.enter_context(open(write_end, "wb"))
        with tempfile.TemporaryFile() as job:
            job.write(json.dumps(_job(source, limits, level.layers, scratch, writer.fileno())).encode())
            job.seek(0)
            process = _start(job, level.layers, scratch, writer.fileno())
        stack.callback(_kill, process)
        writer.close()
        result, printed, fault = _collect(process, reader.fileno(), limits, scratch)
    candidate, error = (None, fault) if fault else _parse(result, printed, process.returncode, level.layers)
    answer = b"" if error else result.partition(b"\n")[2]
    return ProgramResult(candidate, error, time.monotonic() - started, str(level), answer)


@functools.cache
def probe_sandbox() -> SandboxLevel:
    """Tries each layer alone, on programs that attempt what the layer must prevent. Runs once for each process."""
    with tempfile.TemporaryDirectory(prefix="veritune-probe-") as outside, ThreadPoolExecutor(len(LAYERS)) as pool:
        Path(outside, "sentinel").write_text("outside of the scratch folder")
        faults = dict(zip(LAYERS, pool.map(lambda layer: _layer_fault(layer, outside), LAYERS), strict=True))
    missing = {layer: fault for layer, fault in faults.items() if fault}
    return SandboxLevel(tuple(layer for layer in LAYERS if layer not in missing), missing)


_PROBED_MEMORY_MB = 1024
_FORBIDDEN_ATTEMPTS = {
    "limits": ("allocate",),
    "landlock": ("read_outside", "write_outside", "list_home"),
    "seccomp": ("open_socket", "fork", "signal_parent", "execute"),
    "bubblewrap": ("see_outside",),
}
_PROBE_PROGRAM = """
import os, socket
def fork():
    if os.fork() == 0:
        os._exit(0)
ACTIONS = {
    "allocate": lambda: bytearray(MEMORY),
    "read_outside": lambda: open(OUTSIDE + "/sentinel").close(),
    "write_outside": lambda: open(OUTSIDE + "/written", "w").close(),
    "list_home": lambda: os.listdir(HOME),
    "open_socket": lambda: socket.socket().close(),
    "fork": fork,
    "signal_parent": lambda: os.kill(os.getppid(), 0),
    "see_outside": lambda: os.stat(OUTSIDE),
    "execute": lambda: os.execv("/bin/true", ["true"]),
}
def succeeds(name):
    try:
        ACTIONS[name]()
    except (OSError, MemoryError):
        return False
    return True
points = [name for name in ATTEMPTS if succeeds(name)]
"""


def _layer_fault(layer: str, outside: str) -> str:
    """Why `layer` cannot be relied upon, or "" where it prevents everything that it must."""
    if layer == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if layer == "seccomp" and not seccomp.supported():
        return "only on Linux on x86_64 and aarch64"
    settings = {
        "OUTSIDE": outside,
        "HOME": os.path.expanduser("~"),
        "MEMORY": 2 * _PROBED_MEMORY_MB << 20,
        "ATTEMPTS": _FORBIDDEN_ATTEMPTS[layer],
    }
    source = "".join(f"{name} = {value!r}\n" for name, value in settings.items()) + _PROBE_PROGRAM
    limits = Limits(seconds=20.0, memory_mb=_PROBED_MEMORY_MB, output_mb=1)
    result = run_program(source, limits, SandboxLevel((layer,), {}))
    if result.error:
        return result.error.strip().splitlines()[-1]
    return f"it did not prevent: {', '.join(map(str, result.candidate))}" if result.candidate else ""


def _job(source: str, limits: Limits, layers: tuple[str, ...], scratch: str, result_pipe: int) -> dict[str, Any]:
    output_bytes = limits.output_mb << 20
    return {
        "source": source.encode("utf-8", "replace").decode(),
        "layers": [layer for layer in layers if layer != "bubblewrap"],
        "scratch": scratch,
        "result_pipe": result_pipe,
        "parent": None if "bubblewrap" in layers else os.getpid(),
        "readable": _readable_paths(),
        "devices": _DEVICES,
        "import_paths": _import_paths(),
        "filter": seccomp.filter_program().hex() if "seccomp" in layers else "",
        "limits": {
            "RLIMIT_CPU": ceil(limits.seconds) + 1,
            "RLIMIT_AS": limits.memory_mb << 20,
            "RLIMIT_FSIZE": output_bytes,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_NPROC": 0,
            "RLIMIT_CORE": 0,
        },
    }


@functools.cache
def _import_paths() -> list[str]:
    """Where NumPy lies, in case that `python -I` would not look there."""
    numpy = find_spec("numpy")
    return [] if numpy is None or numpy.origin is None else [str(Path(numpy.origin).parents[1])]


@functools.cache
def _readable_paths() -> list[str]:
    """The interpreter's and the system's libraries; never the home folder itself nor a folder that holds it."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = {*folders, os.path.join(sys.base_prefix, "lib"), *_import_paths(), *_SYSTEM_PATHS}
    home = Path(os.path.expanduser("~")).resolve()
    return sorted(path for path in paths if not home.is_relative_to(Path(path).resolve()))


def _start(job: IO[bytes], layers: tuple[str, ...], scratch: str, result_pipe: int) -> subprocess.Popen[bytes]:
    environment = {"HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"} | ONE_THREAD
    command = [sys.executable, "-I", "-B", str(_CHILD_SCRIPT)]
    if "bubblewrap" in layers:
        command = _bubblewrap(scratch) + command
    return subprocess.Popen(
        command,
        stdin=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=scratch,
        env=environment,
        pass_fds=(result_pipe,),
        start_new_session=True,
    )


def _bubblewrap(scratch: str) -> list[str]:
    executable = str(shutil.which("bwrap"))
    interpreter = [sys.executable, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")]
    command = [executable, "--unshare-all", "--die-with-parent", "--dev", "/dev"]
    for path in [*_readable_paths(), *interpreter, str(_CHILD_SCRIPT)]:
        command += ["--ro-bind-try", path, path]
    return [*command, "--bind", scratch, scratch, "--chdir", scratch, "--"]


def _collect(
    process: subprocess.Popen[bytes], result_pipe: int, limits: Limits, scratch: str
) -> tuple[bytes, bytes, str]:
    """(result, printed output, fault) once the process has ended or has passed a limit.

    The end of the process ends the reading, not the end of the pipes: a grandchild could hold those open.
    """
    assert process.stdout is not None
    received = {result_pipe: bytearray(), process.stdout.fileno(): bytearray()}
    most = limits.output_mb << 20
    deadline = time.monotonic() + limits.seconds
    fault = ""
    with selectors.DefaultSelector() as selector:
        for descriptor in received:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while not fault:
            ended = process.poll() is not None
            if time.monotonic() >= deadline and not ended:
                fault = f"the program was stopped after its limit of {limits.seconds:g} s"
                break
            if not selector.get_map() and not ended:  # at its end both pipes close a moment before it can be reaped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            ready = selector.select(0 if ended or not selector.get_map() else _POLL_SECONDS)
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK_BYTES)
                received[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
            if any(len(data) > most for data in received.values()):
                fault = f"the program was stopped for writing more than {limits.output_mb} MB"
            elif _scratch_exceeds(scratch, most, process.pid):
                fault = f"the program was stopped for keeping more than {limits.output_mb} MB or 1000 files"
            if ended and not ready:
                break
    result, printed = (bytes(data) for data in received.values())
    return result, printed[-_SHOWN_OUTPUT_BYTES:], fault


def _scratch_exceeds(scratch: str, most_bytes: int, process: int) -> bool:
    total = sum(_unlisted_sizes(process, Path(scratch).name, most_bytes).values())
    with contextlib.suppress(FileNotFoundError), os.scandir(scratch) as entries:
        for count, entry in enumerate(entries):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
            if count >= _MAX_SCRATCH_FILES:
                return True
    return total > most_bytes


def _unlisted_sizes(process: int, scratch_name: str, most_bytes: int) -> dict[int, int]:
    """Sizes, by inode, of the scratch files that `process` and its children use and no folder lists.

    A deleted file lives on while it is open, or mapped into memory. The size of one that is only mapped cannot be seen:
    it counts as the largest that a file may be.
    """
    sizes: dict[int, int] = {}
    folder = Path("/proc", str(process))
    with contextlib.suppress(OSError):  # it has ended, or there is no /proc
        for line in (folder / "maps").read_text(errors="replace").splitlines():
            if scratch_name in line and line.endswith(" (deleted)"):
                sizes[int(line.split(maxsplit=5)[4])] = most_bytes
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                status = link.stat()
                if status.st_nlink == 0 and scratch_name in os.readlink(link):
                    sizes[status.st_ino] = status.st_size
        for thread in (folder / "task").iterdir():
            for child in (thread / "children").read_text().split():
                sizes |= _unlisted_sizes(int(child), scratch_name, most_bytes)
    return sizes


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group, whether or not its leader has ended, and reaps the leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _parse(result: bytes, printed: bytes, returncode: int, layers: tuple[str, ...]) -> tuple[Any, str]:
    """(candidate, error) from what came through the result pipe, which is the child's word and nothing more."""
    header, _, body = result.partition(b"\n")
    wanted = json.dumps({"layers": [layer for layer in layers if layer != "bubblewrap"]}).encode()
    words = _printable(printed.decode(errors="replace"))
    if header != wanted:
        return None, f"the sandbox did not start: {_ending(returncode)}\n{words}"
    if not body:
        return None, f"the program left no result: {_ending(returncode)}\n{words}"
    if body.count(b"[") + body.count(b"{") > _MAX_LISTS:
        return None, f"the program's result holds more than {_MAX_LISTS} lists"
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        return None, f"the program's result is not JSON data: {str(error)[:200]}"
    if not isinstance(answer, dict) or len(answer) != 1 or not {"candidate", "error"} & answer.keys():
        return None, "the program's result is not in the form that the sandbox writes"
    if "error" in answer:
        return None, _printable(str(answer["error"])[-_SHOWN_ERROR_CHARACTERS:])
    return answer["candidate"], ""


def _printable(text: str) -> str:
    """`text` without control characters: it goes into logs, reports and terminals."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    if returncode > 128 and returncode - 128 in set(signal.Signals):  # how bubblewrap passes a signal on
        return f"exit status {returncode} ({signal.Signals(returncode - 128).name})"
    return f"exit status {returncode}"
