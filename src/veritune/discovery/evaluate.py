"""From a program or a file to an exact verdict."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veritune.discovery.problem import Problem, Verdict
from veritune.discovery.problems import build_problem
from veritune.discovery.sandbox import Limits, SandboxLevel, require_sandbox, run_program

_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A verdict, the candidate it is about (None where a program left none), and how the program ran."""

    verdict: Verdict
    candidate: Any
    sandbox: str
    seconds: float
    """Of the program, without the verification."""


def evaluate_program(problem: Problem, source: str, limits: Limits, level: SandboxLevel) -> Evaluation:
    """Runs `source` in the sandbox and verifies what it left, in this process and exactly."""
    result = run_program(source, limits, level)
    if result.error:
        return Evaluation(Verdict(False, 0, result.error), None, result.sandbox, result.seconds)
    return Evaluation(problem.verify(result.candidate), result.candidate, result.sandbox, result.seconds)


def verify_file(
    problem_name: str,
    path: Path | str,
    dimension: int,
    *,
    program_seconds: float = 60.0,
    unsafe_no_sandbox: bool = False,
) -> dict[str, Any]:
    """The metrics of a candidate file: a `.py` program, run in the sandbox, or else JSON points.

    `validity` is true only for a valid candidate, and `exit_code` of these metrics is 0 only then. The JSON is the list
    itself, or an object whose `points` is the list. Raises ConfigError for an unknown problem, an impossible size, or a
    program where the sandbox is incomplete; every fault of the file or its candidate is in `error`.
    """
    problem = build_problem(problem_name, dimension)
    path = Path(path)
    ran: dict[str, Any] = {}
    candidate = None
    try:
        if path.suffix == ".py":
            level = require_sandbox(unsafe=unsafe_no_sandbox)
            evaluation = evaluate_program(problem, _read(path), Limits(seconds=program_seconds), level)
            verdict, candidate = evaluation.verdict, evaluation.candidate
            ran = {"sandbox": evaluation.sandbox, "seconds": round(evaluation.seconds, 3)}
        else:
            candidate = _points(path)
            verdict = problem.verify(candidate)
    except (OSError, UnicodeDecodeError, _UnreadableFile) as error:
        verdict = Verdict(False, 0, f"{path}: {error}")
    return {
        "num_points": len(candidate) if isinstance(candidate, list) else 0,
        "dimension": dimension,
        "validity": verdict.valid,
        "combined_score": verdict.score,
        "error": None if verdict.valid else verdict.message,
        **ran,
    }


def exit_code(metrics: dict[str, Any]) -> int:
    """0 only for a valid candidate."""
    return 0 if metrics["validity"] is True else 1


class _UnreadableFile(Exception):
    pass


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise _UnreadableFile(f"larger than {_MAX_FILE_BYTES >> 20} MB")
    return data.decode("utf-8-sig")


def _points(path: Path) -> Any:
    try:
        value = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _UnreadableFile(f"not JSON ({error})") from error
    except UnicodeDecodeError:
        raise
    except ValueError as error:  # an integer of more digits than Python agrees to read
        raise _UnreadableFile(f"not readable as JSON ({error})") from error
    return value["points"] if isinstance(value, dict) and "points" in value else value
