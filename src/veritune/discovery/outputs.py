"""What a person reads of a run, all of it derived from its event log and from nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veritune.core.errors import DataError
from veritune.discovery.events import Event, read_events
from veritune.discovery.history import Attempt, attempts, best
from veritune.discovery.problem import Problem
from veritune.discovery.problems import build_problem
from veritune.discovery.prompts import extract_program
from veritune.discovery.report import draw_scores, report_text, rounds_of

CONVERSATION_FILE = "conversation_log.json"
_RETURNS_A_TUPLE = re.compile(
    r"^def run_code\(\)[^\n]*:\n(?:[ \t][^\n]*\n|\n)*[ \t]+return \(points,\)\s*\Z", re.MULTILINE
)
_TUPLE_FUNCTION = """

def run_code(run_code=globals().get("run_code"), get_centers=globals().get("get_centers")):
    # Evaluators score the first item of what run_code() returns.
    found = run_code() if callable(run_code) else None
    if found is None and callable(get_centers):
        found = get_centers()
    if found is None:
        found = points
    try:
        len({first_number})  # a number has no length, and then these are the points themselves
        found = found[0]
    except (IndexError, TypeError):
        found = found if hasattr(found, "shape") else list(found)
    return (found,)
"""


def write_outputs(folder: Path) -> None:
    """Derives `conversation_log.json`, `best_program.py`, `best_points.json` and `report.md` with its figure.

    Each file is written aside and renamed, so a reader never sees half of one.
    """
    events = read_events(folder)
    starts = [event for event in events if event["type"] == "start"]
    if not starts:
        raise DataError(f"{folder}: the event log has no start; nothing was run")
    described = starts[0]["problem"]
    problem = build_problem(described["name"], described["dimension"])
    played = list(attempts(events).values())
    leader = best(played, problem)
    rounds = rounds_of(played, problem)
    figure = draw_scores(rounds, problem)
    _write(folder / CONVERSATION_FILE, json.dumps(_conversation(events, played, leader), indent=1))
    if leader is not None and leader.program is not None:
        _write(folder / "best_program.py", scored_by_evaluators(leader.program, problem))
        _write(folder / "best_points.json", json.dumps(leader.candidate))
    if figure is not None:
        _write(folder / "score_by_round.png", figure)
    _write(folder / "report.md", report_text(events, played, rounds, problem, figure is not None))


def scored_by_evaluators(program: str, problem: Problem) -> str:
    """`program`, whose functions hand over (points,) in the end; one that has a global `points` alone needs nothing."""
    last = _RETURNS_A_TUPLE.search(program)
    if not re.search("run_code|get_centers", program) or (last and last[0].count("return") == 1):
        return program
    first_number = "found[0]" if problem.depth == 1 else "found[0][0]"
    return program.rstrip("\n") + "\n" + _TUPLE_FUNCTION.format(first_number=first_number)


def _conversation(events: Sequence[Event], played: Sequence[Attempt], leader: Attempt | None) -> dict[str, Any]:
    """The whole conversation: every prompt with its answer, the program in it and the verdict on it, in order."""
    start = events[0]
    return {
        "problem": start["problem"],
        "config": start["config"],
        "sandbox": start["sandbox"],
        "best": None if leader is None else {"id": leader.id, "score": leader.score, "program": leader.program},
        "exchanges": [_exchange(attempt) for attempt in played],
    }


def _exchange(attempt: Attempt) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(attempt, candidate=None))
    del fields["candidate"]
    sandbox = fields.pop("sandbox")
    return fields | {"verdict": fields["verdict"] and {**fields["verdict"], "sandbox": sandbox}}


def replay_conversation(path: Path) -> tuple[str, int] | None:
    """(program, score) of the best exchange in a `conversation_log.json`, read anew from its answers and verdicts."""
    log = json.loads(path.read_text())
    problem = build_problem(log["problem"]["name"], log["problem"]["dimension"])
    found = [
        (program, exchange["verdict"]["score"])
        for exchange in log["exchanges"]
        if exchange["verdict"] and exchange["verdict"]["valid"] and (program := extract_program(exchange["answer"]))
    ]
    return max(found, key=lambda each: problem.rank(each[1]), default=None)


def _write(path: Path, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    aside = path.with_name(f".{path.name}.writing")
    aside.write_bytes(data)
    os.replace(aside, path)
