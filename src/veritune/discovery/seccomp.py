"""The system call filter of the sandbox, assembled as classic BPF: what is not listed is refused with EPERM.

A list of what is allowed, rather than of what is forbidden, also covers the calls that kernels will grow. What is left
is memory, clocks, the process's own signals and waiting, and files, whose paths Landlock decides about. There is no
socket, fork, thread, exec, kill, ptrace, chmod, mount, shared memory or io_uring.
"""

from __future__ import annotations

import errno
import platform
import struct

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (number on x86_64, number on aarch64); None where the architecture has no such call.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "close": (3, 57), "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "msync": (26, 227), "brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "membarrier": (324, 283), "getcpu": (309, 168), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "alarm": (37, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128),
}  # fmt: skip
_OPEN, _OPENAT, _FCNTL, _IOCTL, _PRLIMIT = (2, None), (257, 56), (72, 25), (16, 29), (302, 261)

_LOAD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERRNO | errno.EPERM

_O_ACCMODE_OR_TRUNC, _O_TRUNC = 0o3 | 0o1000, 0o1000
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC


def supported() -> bool:
    """Whether this machine is Linux on an architecture whose call numbers are known here."""
    return platform.system() == "Linux" and platform.machine() in _AUDIT_ARCHITECTURE


def filter_program() -> bytes:
    """The filter for this machine as an array of `struct sock_filter`."""
    machine = platform.machine()
    column = 0 if machine == "x86_64" else 1
    program = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # a 32-bit call on a 64-bit machine would have other numbers
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
    ]
    for numbers in _ALLOWED.values():
        program += _when(numbers[column], [(_RETURN, 0, 0, _ALLOW)])
    # Opening read-only with O_TRUNC empties a file, and Landlock before its third version lets that pass.
    program += _when(_OPENAT[column], _refuse_flags(2))
    program += _when(_OPEN[column], _refuse_flags(1))
    program += _when(_FCNTL[column], _allow_values(1, _FCNTL_COMMANDS))  # F_SETOWN could signal the parent
    program += _when(_PRLIMIT[column], _allow_own_getrlimit())
    program += _when(_IOCTL[column], [(_RETURN, 0, 0, _ERRNO | errno.ENOTTY)])  # what isatty() expects of a file
    program.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instructions = list[tuple[int, int, int, int]]


def _when(number: int | None, body: _Instructions) -> _Instructions:
    """`body`, which must return, for the call `number`; falls through for every other."""
    return [] if number is None else [(_JUMP_EQUAL, 0, len(body), number), *body]


def _argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
    return (_LOAD_WORD, 0, 0, _ARGUMENTS_OFFSET + 8 * index + (4 if high else 0))


def _refuse_flags(index: int) -> _Instructions:
    return [
        _argument(index),
        (_AND, 0, 0, _O_ACCMODE_OR_TRUNC),
        (_JUMP_EQUAL, 0, 1, _O_TRUNC),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _allow_values(index: int, values: tuple[int, ...]) -> _Instructions:
    tests = [(_JUMP_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [_argument(index), *tests, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]


def _allow_own_getrlimit() -> _Instructions:
    """prlimit64(0, resource, NULL, old): reading one's own limits, never setting them nor another process's."""
    zero_words = [_argument(0), _argument(2), _argument(2, high=True)]
    body: _Instructions = []
    for position, load in enumerate(zero_words):
        remaining = len(zero_words) - position - 1
        body += [load, (_JUMP_EQUAL, 0, 2 * remaining + 1, 0)]
    return [*body, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
