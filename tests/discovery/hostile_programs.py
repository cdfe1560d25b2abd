"""Programs that try to break out of the sandbox, to outlive it, to exhaust the machine, or to lie.

Each is (source, what the error says): "" where that depends on the machine, None where there need be no error, because
the program gains nothing. `{outside}` is a
folder that the program must not reach, `{pid}` the process that runs the sandbox, `{port}` a listening server.
"""

ENDLESS = "stopped after its limit"

HOSTILE: dict[str, tuple[str, str | None]] = {
    "infinite loop": ("while True: pass", ENDLESS),
    "sleep": ("import time; time.sleep(1000)", ENDLESS),
    "ignores signals": (
        "import signal\nfor s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        ENDLESS,
    ),
    "swallows exceptions": ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", ENDLESS),
    "memory bomb": ("x = 'a' * (1 << 40)", "MemoryError"),
    "creeping memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    "anonymous mappings": ("import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(100)]", "Cannot allocate memory"),
    "fork bomb": ("import os\nwhile True: os.fork()", "Operation not permitted"),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(1000)",
        "Operation not permitted",
    ),
    "grandchild holds stdout": (
        "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '1000'])\npoints = [[1]]",
        "PermissionError",
    ),
    "thread bomb": (
        "import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(1000,)).start()",
        "can't start new thread",
    ),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "Error"),
    "shell": ("import os\npoints = os.system('touch {outside}/escaped')\nassert points == 0", "Error"),
    "exec": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'touch {outside}/escaped'])", "PermissionError"),
    "reads the key": ("import os\nprint(os.environ['OPENAI_API_KEY'])", "KeyError"),
    "reads the parent's environment": ("print(open('/proc/{pid}/environ').read())", "PermissionError"),
    "reads the parent's memory": ("print(open('/proc/{pid}/mem', 'rb').read(1))", "PermissionError"),
    "lists the home folder": ("import os\nprint(os.listdir('{home}'))", "PermissionError"),
    "reads a file": ("points = open('{outside}/secret').read()", "PermissionError"),
    "reads accounts": ("points = open('/etc/passwd').read()", "PermissionError"),
    "writes outside": ("open('{outside}/escaped', 'w').write('x')", "PermissionError"),
    "empties a file outside": ("import os\nos.open('{outside}/secret', os.O_RDONLY | os.O_TRUNC)", "PermissionError"),
    "truncates a file outside": ("import os\nos.truncate('{outside}/secret', 0)", "PermissionError"),
    "deletes outside": ("import os\nos.unlink('{outside}/secret')", "PermissionError"),
    "renames outside": ("import os\nos.rename('{outside}/secret', '{outside}/escaped')", "PermissionError"),
    "changes rights": ("import os\nos.chmod('{outside}/secret', 0o777)", "PermissionError"),
    "links outside": (
        "import os\nos.symlink('{outside}/secret', 'link')\nprint(open('link').read())",
        "PermissionError",
    ),
    "hard link": ("import os\nos.link('{outside}/secret', 'link')", "PermissionError"),
    "climbs out": ("import os\nos.chdir('{outside}')\nopen('escaped', 'w')", "PermissionError"),
    "poisons the libraries": ("import os\nopen(os.__file__, 'a').write('#')", "PermissionError"),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port})).send(b'out')",
        "PermissionError",
    ),
    "datagram": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', {port}))",
        "PermissionError",
    ),
    "web request": (
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
        "Operation not permitted",
    ),
    "kills the parent": ("import os, signal\nos.kill({pid}, signal.SIGKILL)", "PermissionError"),
    "kills everyone": ("import os, signal\nos.kill(-1, signal.SIGKILL)", "PermissionError"),
    "signals through fcntl": ("import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, {pid})", "PermissionError"),
    "limits the parent": ("import resource\nresource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))", "PermissionError"),
    "lifts its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)",
        "Error",
    ),
    "ptrace": (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        "assert l.ptrace(16, {pid}, 0, 0) == 0, ctypes.get_errno()",
        "AssertionError: 1",
    ),
    "becomes root": ("import os\nos.setuid(0)", "PermissionError"),
    "shared memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=1 << 20)",
        "Error",
    ),
    "memory file": ("import os\nos.memfd_create('x')", "PermissionError"),
    "floods stdout": ("import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)", "writing more than"),
    "floods stderr": ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", "writing more than"),
    "floods the result": ("points = [list(range(1000))] * 2000", "writing more than"),
    "floods every descriptor": (
        "import os\nwhile True:\n  for fd in range(3, 64):\n    try: os.write(fd, b'x' * 10**6)\n"
        "    except OSError: pass",
        "writing more than",
    ),
    "fills the disk": (
        "for i in range(10**6):\n  with open(f'f{i}', 'wb') as f: f.write(b'x' * 10**6)",
        "stopped for keeping more than",
    ),
    "fills the disk unseen": (
        "import os\nfor fd in range(1, 64):\n  try: os.close(fd)\n  except OSError: pass\n"
        "for i in range(10**6):\n  with open(f'f{i}', 'wb') as f: f.write(b'x' * 10**6)",
        "stopped for keeping more than",
    ),
    "unlinked but open": (
        "import os\nkept = []\nfor i in range(55):\n  f = open('f', 'wb'); f.write(b'x' * 4 * 10**6); f.flush()\n"
        "  os.unlink('f'); kept.append(f)\nimport time\ntime.sleep(1)\npoints = [[1]]",
        "stopped for keeping more than",
    ),
    "replaced but open": (
        "import os, time\nkept = []\nfor i in range(9):\n  f = open(f'f{i}', 'wb'); f.write(b'x' * 10**6); f.flush()\n"
        "  os.replace(f'f{i}', 'f'); kept.append(f)\ntime.sleep(1)\npoints = [[1]]",
        "stopped for keeping more than",
    ),
    "without a name from the start": (
        "import tempfile, time\nkept = [tempfile.TemporaryFile() for _ in range(9)]\n"
        "for f in kept: f.write(b'x' * 10**6); f.flush()\ntime.sleep(1)\npoints = [[1]]",
        "stopped for keeping more than",
    ),
    "unlinked but mapped": (
        "import mmap, os, time\nkept = []\nfor i in range(9):\n  with open('f', 'w+b') as f:\n"
        "    f.truncate(4 * 10**6); kept.append(mmap.mmap(f.fileno(), 4096))\n  os.unlink('f')\n"
        "time.sleep(1)\npoints = [[1]]",
        "stopped for keeping more than",
    ),
    "one huge file": ("f = open('f', 'wb')\nwhile True: f.write(b'x' * 10**6)", "Error"),
    "many files": ("for i in range(10**9): open(f'f{i}', 'w').close()", "stopped for keeping more than"),
    "not UTF-8": ("import os\nos.write(1, bytes(range(256)) * 9)\nos._exit(3)", "exit status 3"),
    "a lone surrogate": ("points = [['\\ud800']]", None),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
    "deep result": ("points = []\nfor _ in range(10**5): points = [points]", "RecursionError"),
    "deep source": ("points = " + "(" * 100_000, "Error"),
    "an endless result": ("import itertools\npoints = itertools.count()", ""),
    "a null byte": ("\0", "Error"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "exits": ("import os\nos._exit(0)", "left no result"),
    "raises SystemExit": ("raise SystemExit(0)", "SystemExit"),
    "a hostile exception": (
        "class E(BaseException):\n  def __str__(self): raise E()\nraise E()",
        "exception str() failed",
    ),
    "closes everything": ("import os\nos.closerange(0, 64)\npoints = [[1]]", "left no result"),
}
