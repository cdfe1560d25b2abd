"""From a program or a file to an exact verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veritune.discovery.problem import Judgement, Problem, Verdict
from veritune.discovery.problems import build_problem
from veritune.discovery.sandbox import Limits, SandboxLevel, require_sandbox, run_program
from veritune.discovery.verification import UnreadableCandidate, VerificationLimits, judge_apart

_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A verdict, what it is about, and how the program ran."""

    verdict: Verdict
    points: list[Any] | None
    """What was verified, in plain integers; None where it was refused."""
    num_points: int
    """Of the points that the program left, valid or not."""
    sandbox: str
    seconds: float
    """Of the program, without the verification."""


def evaluate_program(
    problem: Problem, source: str, limits: Limits, verification: VerificationLimits, level: SandboxLevel
) -> Evaluation:
    """Runs `source` in the sandbox and verifies what it left, exactly and in a worker."""
    result = run_program(source, limits, level)
    if result.error:
        return Evaluation(Verdict(False, 0, result.error), None, 0, result.sandbox, result.seconds)
    try:
        judgement = judge_apart(problem, result.answer, verification)
    except UnreadableCandidate as error:
        judgement = Judgement(Verdict(False, 0, f"the program's result is {error}"), None, 0)
    return Evaluation(*judgement, result.sandbox, result.seconds)


def verify_file(
    problem_name: str,
    path: Path | str,
    dimension: int,
    *,
    program_seconds: float = 60.0,
    verification_seconds: float = 120.0,
    verification_memory_mb: int = 4096,
    unsafe_no_sandbox: bool = False,
) -> dict[str, Any]:
    """The metrics of a candidate file: a `.py` program, run in the sandbox, or else JSON points.

    `validity` is true only for a valid candidate, and `exit_code` of these metrics is 0 only then. The JSON is the list
    itself, or an object whose `points` is the list. Raises ConfigError for an unknown problem, an impossible size, or a
    program where the sandbox is incomplete; every fault of the file or its candidate is in `error`.
    """
    problem = build_problem(problem_name, dimension)
    verification = VerificationLimits(verification_seconds, verification_memory_mb)
    path = Path(path)
    level = require_sandbox(unsafe=unsafe_no_sandbox) if path.suffix == ".py" else None
    ran: dict[str, Any] = {}
    num_points = 0
    try:
        if level is not None:
            source = _read(path).decode("utf-8-sig")
            evaluation = evaluate_program(problem, source, Limits(seconds=program_seconds), verification, level)
            verdict, num_points = evaluation.verdict, evaluation.num_points
            ran = {"sandbox": evaluation.sandbox, "seconds": round(evaluation.seconds, 3)}
        else:
            verdict, _, num_points = judge_apart(problem, _read(path), verification)
    except (OSError, UnicodeDecodeError, UnreadableCandidate) as error:
        verdict = Verdict(False, 0, f"{path}: {error}")
    return {
        "num_points": num_points,
        "dimension": dimension,
        "validity": verdict.valid,
        "combined_score": verdict.score,
        "error": None if verdict.valid else verdict.message,
        **ran,
    }


def exit_code(metrics: dict[str, Any]) -> int:
    """0 only for a valid candidate."""
    return 0 if metrics["validity"] is True else 1


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise UnreadableCandidate(f"larger than {_MAX_FILE_BYTES >> 20} MB")
    return data
