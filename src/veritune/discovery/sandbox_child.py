"""Runs inside the sandbox: gives up every right it was told to give up, then runs the candidate program.

Started as `python -I sandbox_child.py` with the job as JSON on standard input; imports nothing of the package, so that
nothing of the package need be readable. The first line it writes to the result pipe, before any candidate code runs,
names the layers in force; what follows is the candidate's word, which the parent treats as data.
"""

import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION_FLAG, LANDLOCK_RULE_PATH_BENEATH = 1, 1
CAPABILITY_VERSION_3 = 0x20080522

# Bits of the access rights that Landlock knows, by the version that brought them.
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
FILE_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
NETWORK_RIGHTS, SCOPES = 0b11, 0b11

MESSAGE_CHARACTERS = 4000

Job = dict[str, Any]


def main() -> None:
    with os.fdopen(0, "rb", closefd=False) as stdin:
        job = json.loads(stdin.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    result_pipe = job["result_pipe"]
    for layer in job["layers"]:
        LAYERS[layer](job)
    send(result_pipe, json.dumps({"layers": job["layers"]}).encode() + b"\n")
    sys.path += [path for path in job["import_paths"] if path not in sys.path]
    sys.argv = ["program.py"]
    try:
        answer = {"candidate": plain(run_candidate(job["source"]))}
        data = json.dumps(answer, separators=(",", ":")).encode()
    except BaseException as error:  # a candidate may raise anything, SystemExit and its own BaseExceptions included
        data = json.dumps({"error": explain(error, job["source"])}).encode()
    send(result_pipe, data)
    os._exit(0)  # no atexit handler or finalizer of the candidate's runs


def run_candidate(source: str) -> Any:
    """The candidate of a program: what run_code() returns, else get_centers(), else the global `points`.

    None is no candidate: after a function that returns it the next place is looked at.
    """
    module = types.ModuleType("program")
    sys.modules["program"] = module
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    for function_name in ("run_code", "get_centers"):
        function = getattr(module, function_name, None)
        if callable(function) and (candidate := function()) is not None:
            return candidate
    if not hasattr(module, "points"):
        raise NameError("the program gives no points by run_code(), get_centers() or the global `points`")
    return module.points


def explain(error: BaseException, source: str) -> str:
    """The traceback from the program's own first line on, with its source lines."""
    linecache.cache["program.py"] = (len(source), None, source.splitlines(keepends=True), "program.py")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != "program.py":
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-MESSAGE_CHARACTERS:]


def plain(value: Any) -> Any:
    """Lists and numbers for JSON; NumPy values become Python numbers of their own kind, so a float stays a float."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "__iter__"):
        return [plain(item) for item in value]
    raise TypeError(f"the result holds a value of type {type(value).__name__}; it must be lists of integers")


def send(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def limit_resources(job: Job) -> None:
    for name, value in job["limits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowered, lowered))
    if sys.platform == "linux":
        check(libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        if job["parent"] is not None and os.getppid() != job["parent"]:
            os._exit(1)  # the parent died before it could be watched


def restrict_files(job: Job) -> None:
    """Landlock: read what is listed, write into the scratch folder, and nothing else, network included."""
    library = libc()
    version = library.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG)
    check(version, "landlock_create_ruleset")
    handled = (1 << FILE_RIGHTS_BY_VERSION[min(version, 5)]) - 1
    attributes = struct.pack("=QQQ", handled, NETWORK_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = library.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    check(ruleset, "landlock_create_ruleset")
    for path in job["readable"]:
        allow_path(ruleset, path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0))
    for path in job["devices"]:
        allow_path(ruleset, path, READ_FILE | WRITE_FILE)
    # No folder can be made, so the scratch folder stays flat: its size is cheap to watch and it is sure to be removed.
    scratch_rights = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    allow_path(ruleset, job["scratch"], scratch_rights & handled)
    forbid_new_privileges(library)
    check(library.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def allow_path(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, descriptor)
    check(
        libc().syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}"
    )
    os.close(descriptor)


def restrict_calls(job: Job) -> None:
    """Seccomp, and no capability left: a root user keeps root's files, which Landlock guards, and no power of root."""
    library = libc()
    forbid_new_privileges(library)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(library.capset(header, bytes(24)), "capset")
    code = ctypes.create_string_buffer(bytes.fromhex(job["filter"]))
    program = struct.pack("@HP", len(code.raw) // 8, ctypes.addressof(code))
    check(library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "PR_SET_SECCOMP")


def forbid_new_privileges(library: ctypes.CDLL) -> None:
    check(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def check(status: int, what: str) -> None:
    if status < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


LAYERS = {"limits": limit_resources, "landlock": restrict_files, "seccomp": restrict_calls}

if __name__ == "__main__":
    main()
