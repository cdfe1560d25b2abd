r"""Finding the answer in a response: answer tags, \boxed{}, last numbers, letters. No judging here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from veritune.grading.math.surface import closing_brace

ANSWER_START = "<answer>"
ANSWER_END = "</answer>"
MAX_CANDIDATES = 32
"""A response with more answer blocks or boxes than this is not read to the end."""

_TAGS_BETWEEN = re.compile(r"</think>(\s*)<answer>")
_BOX = "\\boxed"
_NUMBER = re.compile(r"(?<![0-9.,])-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9.,])-?\.[0-9]+|[0-9][0-9,]*(?:\.[0-9]+)?")


def extract_answer_blocks(response: str, strict_format: bool = False) -> list[str] | None:
    """The contents of the `<answer>` blocks that follow the thought, or None where the r1_zero format is not kept.

    The format: `</think>`, white space (exactly one space with `strict_format`), `<answer>`, an answer, `</answer>`.
    """
    for match in _TAGS_BETWEEN.finditer(response):
        if strict_format and match.group(1) != " ":
            continue
        if response.find(ANSWER_END, match.end()) < 0:
            return None
        blocks: list[str] = []
        position = match.end()
        while len(blocks) <= MAX_CANDIDATES:
            end = response.find(ANSWER_END, position)
            if end < 0:
                blocks.append(response[position:])  # a further answer that never ends is an answer too
                break
            blocks.append(response[position:end])
            start = response.find(ANSWER_START, end)
            if start < 0:
                break
            position = start + len(ANSWER_START)
        return blocks
    return None


def extract_answer_tag(response: str, strict_format: bool = False) -> str | None:
    """The content of the last `<answer>` block of a response in the r1_zero format, else None."""
    blocks = extract_answer_blocks(response, strict_format)
    return blocks[-1] if blocks else None


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, or None if there is none or its braces are not balanced."""
    start = text.rfind(_BOX)
    return None if start < 0 else _box_content(text, start)


def extract_all_boxed(text: str) -> list[str]:
    r"""The contents of the last 32 occurrences of `\boxed{…}`, without empty and unbalanced ones, the last one
    first."""
    contents: list[str] = []
    end = len(text)
    for _ in range(MAX_CANDIDATES):
        start = text.rfind(_BOX, 0, end)
        if start < 0:
            break
        end = start
        content = _box_content(text, start)
        if content and content.strip():
            contents.append(content)
    return contents


def _box_content(text: str, start: int) -> str | None:
    opening = start + len(_BOX)
    while opening < len(text) and opening < start + 16 and text[opening].isspace():
        opening += 1
    if opening >= len(text) or text[opening] != "{":
        return None
    closing = closing_brace(text, opening)
    return None if closing < 0 else text[opening + 1 : closing]


def parse_gsm8k_response(text: str) -> str | None:
    """The last number of a response as a string without thousands separators, or None if there is none.

    >>> parse_gsm8k_response("48 + 24 = 72 clips, worth $1,234.50.")
    '1234.50'
    """
    last = None
    for match in _NUMBER.finditer(text):
        last = match.group()
    return None if last is None else last.replace(",", "").replace("$", "")


_WHITE_SPACE = re.compile(r"\s+")
_STATED_LETTER = re.compile(
    r"(?i:answer|option|choice)(?: (?:is|would be|should be|must be))? ?:? ?(?:option|choice)?"
    r"(?:[ *$(\[]|\\[a-z]{1,20}\{){0,6}(?:([A-Z])(?![A-Za-z'])|([a-z])(?= ?(?:[).\]:*}]|\Z)))",
)
_LEADING_LETTER = re.compile(r" ?(?:\*\*)?[(\[]?([A-Z])(?:[)\].:]|\*\*| ?\Z)")
_LONE_LETTER = re.compile(r"(?<![A-Za-z0-9'])(?:A(?! [a-z])|[B-HJ-Z])(?![A-Za-z0-9'])")


def parse_mmlu_response(example: Mapping[str, Any], text: str) -> str | None:
    """The letter that a response to a multiple-choice question chooses, or None if it chooses none or several.

    `example["options"]` gives the number of letters, and a response that is an option's text word for word chooses it.
    In order: the last `answer is X`; a letter that the response begins with; an option's text; the one letter that
    stands alone.
    """
    options = [str(option) for option in example["options"]]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options)]
    text = _WHITE_SPACE.sub(" ", text)  # the patterns meet single spaces, so that they take linear time
    stated = [(match[1] or match[2]).upper() for match in _STATED_LETTER.finditer(text)]
    if stated:
        return stated[-1] if stated[-1] in letters else None
    leading = _LEADING_LETTER.match(text)
    if leading and leading[1] in letters:
        return leading[1]
    plain = _plain_option(text)
    for letter, option in zip(letters, options, strict=True):
        if plain and plain == _plain_option(option):
            return letter
    alone = {match[0] for match in _LONE_LETTER.finditer(text)} & set(letters)
    return alone.pop() if len(alone) == 1 else None


def _plain_option(text: str) -> str:
    return _WHITE_SPACE.sub(" ", text).strip().rstrip(".").casefold()
