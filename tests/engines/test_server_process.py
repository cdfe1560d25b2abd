"""Servers and weights of a process that is killed: the servers end, and the next start removes the weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from veritune.engines import server_process
from veritune.engines.server_process import ServerProcess, WeightsFolder

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[1:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("process", os.getpid(), flush=True)
time.sleep(600)
"""
OWNER = """
import sys, threading, time
from pathlib import Path
import server_process  # by its folder: the package would import torch
from server_process import ServerProcess, WeightsFolder
server_process.PATIENCE_SECONDS = 1.0
folder = WeightsFolder(Path(sys.argv[1]))
(folder.path / "model.safetensors").write_bytes(bytes(2_500_000))
def start():
    ServerProcess(["server_of_test", *sys.argv[2:]], {}, folder.path / "server.log")
thread = threading.Thread(target=start)
thread.start()
thread.join()  # the server outlives the thread that started it
print(folder.path, flush=True)
time.sleep(600)
"""


def members(group):
    """The processes of a process group."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return sum(line.split()[0] == str(group) and "Z" not in line for line in found.splitlines())


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_owner(tmp_path, *arguments):
    (tmp_path / "server_of_test.py").write_text(STUBBORN)
    folders = [str(tmp_path), str(Path(server_process.__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", OWNER, str(tmp_path / "weights"), *arguments]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    folder = Path(owner.stdout.readline().strip())
    wait_until(lambda: "process" in (folder / "server.log").read_text())
    pid = int((folder / "server.log").read_text().split()[1])
    return owner, folder, os.getpgid(pid)


def test_servers_end_with_the_process_that_was_killed_and_its_weights_at_the_next_start(tmp_path, capsys):
    owner, folder, group = start_owner(tmp_path)
    assert members(group) == 3  # the watcher, the server and the server's own process
    with WeightsFolder(tmp_path / "weights") as other:
        assert folder.exists() and "removed" not in capsys.readouterr().err  # its owner lives
    assert not other.path.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: members(group) == 0)
    (tmp_path / "weights" / "veritune-weights-unlocked").mkdir()  # as if it were being made
    with WeightsFolder(tmp_path / "weights"):
        assert capsys.readouterr().err == f"removed {folder}: 2.5 MB that a killed run left\n"
        assert not folder.exists() and (tmp_path / "weights" / "veritune-weights-unlocked").exists()


def test_a_server_that_will_not_end_is_killed(tmp_path):
    owner, _, group = start_owner(tmp_path, "stubborn")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: members(group) == 0)


def test_a_server_is_stopped_and_started_again_with_all_its_processes(tmp_path, monkeypatch):
    (tmp_path / "server_of_test.py").write_text(STUBBORN)
    monkeypatch.setattr(server_process, "PATIENCE_SECONDS", 1.0)
    server = ServerProcess(["server_of_test"], {"PYTHONPATH": str(tmp_path)}, tmp_path / "server.log")
    wait_until(lambda: server.last_words().count("process") == 1)
    group = server.process.pid
    assert server.is_running() and members(group) == 3
    os.kill(int(server.last_words().split()[-1]), signal.SIGKILL)
    wait_until(lambda: not server.is_running())
    assert members(group) == 0
    server.start()
    wait_until(lambda: server.last_words().count("process") == 2)
    group = server.process.pid
    assert server.is_running() and members(group) == 3
    server.stop()
    assert members(group) == 0 and not server.is_running()
