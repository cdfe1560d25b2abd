"""The conversation with the model: what it is told, and where the program stands in its answer."""

from __future__ import annotations

import re

from veritune.discovery.config import DiscoverConfig
from veritune.discovery.history import Attempt, Message
from veritune.discovery.problem import Problem

_SYSTEM = (
    "You are a research mathematician and programmer who looks for record constructions. You answer with a short idea "
    "and then one complete Python program in a fenced code block. An exact verifier judges what the program produces; "
    "nothing that the program says of itself counts."
)
_MESSAGE_CHARACTERS = 3000
_PROGRAM_CHARACTERS = 60_000


def build_messages(
    problem: Problem, config: DiscoverConfig, parent: Attempt | None, last: Attempt | None
) -> list[Message]:
    """The messages of one request: the statement, then the program to improve on and the last verdict, if any."""
    parts = [_statement(problem, config)]
    if parent is not None and parent.program is not None:
        title = "A program to improve on" if "islands" in config.strategy else "The best program so far"
        parts.append(f"## {title} (score {parent.score})\n\n{_fenced(parent.program)}\n\n{_said(parent)}")
    if last is not None and (parent is None or last.id != parent.id):
        shown = f"\n\n{_fenced(last.program)}" if last.program else ""
        parts.append(f"## Your last attempt{shown}\n\n{_said(last)}")
    if len(parts) > 1:
        parts.append(
            "Write a complete new program that does better. Change the idea where small changes are exhausted."
        )
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n\n".join(parts)}]


def _statement(problem: Problem, config: DiscoverConfig) -> str:
    known = ""
    if problem.best_known is not None:
        known = f"Best known: {problem.best_known.value} ({problem.best_known.source}, {problem.best_known.date}). "
    limit = "upper" if problem.goal == "maximize" else "lower"
    return (
        f"## The problem\n\n{problem.statement}\n\n{known}Proven {limit} bound: {problem.bound}.\n\n"
        "## The program\n\nYour program is imported, not run as a script. Its function run_code() ends with "
        "`return (points,)`, where `points` is the candidate; without it, the candidate is what get_centers() returns; "
        "without that, the value of the global `points`. "
        f"It must be {problem.schema}. It may use the standard library and numpy, and has {config.program_seconds:g} "
        f"seconds on one core and {config.program_memory_mb} MB of memory, no network, no threads, no other processes "
        "and no files but in its working folder. Set a time limit inside of it and return the best candidate found "
        "until then."
    )


def _said(attempt: Attempt) -> str:
    assert attempt.verdict is not None
    word = "accepted" if attempt.verdict.valid else "refused"
    return f"The verifier {word} it: {attempt.verdict.message[-_MESSAGE_CHARACTERS:]}"


def _fenced(text: str) -> str:
    shown = text[:_PROGRAM_CHARACTERS]
    fence = fence_for(shown)
    return f"{fence}python\n{shown}\n{fence}"


def fence_for(text: str) -> str:
    """A code fence that `text` cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)


_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_INTERFACE = re.compile(r"^(def\s+(run_code|get_centers)\b|(points)\s*(:[^=\n]*)?=)", re.MULTILINE)
_PYTHON_TAGS = ("python", "py", "python3")


def prose(answer: str) -> str:
    """An answer without its fenced blocks and its thought: the idea in the proposer's own words."""
    return _FENCE.sub("[program]", _spoken(answer)).strip()


def extract_program(answer: str) -> str | None:
    """The program in an answer: the last fenced block that has the interface, else the last Python one, else the last.

    Without any fence the whole answer counts if it has the interface. What stands before a closing </think> is thought,
    not answer. Nothing is parsed as Python here: that happens in the sandbox alone.
    """
    text = _spoken(answer)
    blocks = [(tag.lower(), code) for _, tag, code in _FENCE.findall(text)]
    if not blocks:
        return text if _INTERFACE.search(text) else None
    candidates = [code for tag, code in blocks if _INTERFACE.search(code) and tag in (*_PYTHON_TAGS, "")]
    candidates = candidates or [code for tag, code in blocks if tag in _PYTHON_TAGS] or [code for _, code in blocks]
    return candidates[-1]


def _spoken(answer: str) -> str:
    return answer.replace("\r\n", "\n").rpartition("</think>")[2]
