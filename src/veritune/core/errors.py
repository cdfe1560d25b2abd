"""The package's own errors.

Each is also the standard library type that a caller would expect, so `except ValueError` keeps working. The
command line prints their message on one line and exits with `exit_code`: 2 for settings, 1 for failures, 128 and the
signal's number for what was stopped.
"""

from __future__ import annotations

import re
import signal

HIDDEN_LOGIN = "***"


def blot_logins(text: str) -> str:
    """`text` with http://***@host for every http://user:password@host."""
    return re.sub(r"(?<=://)(?:(?!://)\S)*@", f"{HIDDEN_LOGIN}@", text)


class VerituneError(Exception):
    """Base of every error that Veritune raises on purpose; its message is meant for the person at the keyboard."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(blot_logins(message))


class ConfigError(VerituneError, ValueError):
    """A setting that cannot work: names the field, the value given and what is allowed."""

    exit_code = 2


class DataError(VerituneError, ValueError):
    """Data that cannot be used: names the file, the row and the column."""


class EngineError(VerituneError, RuntimeError):
    """An engine that cannot generate, or cannot prove which weights it generates with."""


class TrainingError(VerituneError, RuntimeError):
    """A training step that was refused, such as one whose loss is not finite."""


class RewardError(VerituneError, RuntimeError):
    """Rewards that all fail: there is nothing to measure or to train on."""


class CheckpointError(VerituneError, OSError):
    """A checkpoint or run folder that cannot be written, read or trusted."""


class Interrupted(VerituneError):
    """A run that a signal stopped; its state is saved, and the message says how to go on."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
