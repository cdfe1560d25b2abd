"""Signals that end a program, sent to this one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from veritune.core.signals import Terminated, signal_of, silence_lost_streams, stop_requests, terminations_raised


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_is_raised_once_and_clean_up_is_left_alone(number):
    before = signal.getsignal(number)
    cleaned = []
    with pytest.raises(Terminated) as raised, terminations_raised():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)
    assert cleaned and signal_of(raised.value) == number
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request_and_only_a_second_control_c_stops_at_once(number, capfd):
    with stop_requests() as requested:
        assert requested() == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert requested() == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and ("once more" in said) == (number == signal.SIGINT)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminations_raised(), stop_requests() as requested:
            os.kill(os.getpid(), signal.SIGHUP)
            assert requested() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_asks_for_nothing():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def ask():
        with stop_requests() as requested:
            seen.append((requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


def test_words_to_a_pipe_that_is_gone_end_nothing():
    code = (
        "import sys; from veritune.core.signals import silence_lost_streams as silence\n"
        "sys.stdin.read(); silence(); print('lost', flush=True); print('heard', file=sys.stderr); silence()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "heard\n" and process.wait() == 0


def test_streams_that_are_there_are_left_alone(capfd):
    silence_lost_streams()
    os.write(1, b"heard")
    assert capfd.readouterr().out == "heard"
