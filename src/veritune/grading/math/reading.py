"""Text -> Reading: the value, list, time or words that an answer states, with its unit and label.

The order of attempts: special forms (times, dates, ratios, numerals with a base), then a sentence's beginning is
taken off, then lists are split, then label, unit and formula are told apart. What no attempt understands is kept as
words, and equals only the same words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from veritune.grading.math.clock import read_clock, read_date, read_ratio, without_markup
from veritune.grading.math.expressions import equal_expressions, variable_names
from veritune.grading.math.labels import Label, defines, read_label
from veritune.grading.math.limits import UnreadableError
from veritune.grading.math.nodes import Node
from veritune.grading.math.number_words import number_words
from veritune.grading.math.parser import parse
from veritune.grading.math.prose import is_hedged, is_wordy, sentence_value, subject_of, text_of
from veritune.grading.math.tokens import CLOSERS, OPENERS, Token, tokenize
from veritune.grading.math.units import (
    CURRENCY_CODES,
    CURRENCY_SIGNS,
    DEGREE,
    NO_UNIT,
    PERCENT,
    Unit,
    currency,
    is_unit_letter,
    read_unit,
)
from veritune.grading.math.vocabulary import BLOCKERS, FUNCTIONS, PHRASES, UNIT_SYNONYMS

MAX_ITEMS = 64
"""Longer lists are compared as words: unordered comparison takes quadratic time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer states. `kind` is "value", "list", "clock", "date", "ratio", "numeral" or "words"."""

    kind: str
    words: str = ""
    """The text of words, made plain for comparison."""
    node: Node | None = None
    unit: Unit = NO_UNIT
    label: str = ""
    """What the value is said to be of: `x` in `x = 5`, "?" for a longer one such as `f(2)`."""
    function: tuple[str, ...] = ()
    """The function and its variables where the value is said to be of one: ("f", "x") in `f(x) = 2x`."""
    items: tuple[Reading, ...] = ()
    connective: str = ","
    special: Any = None
    approximate: bool = False
    decimal: bool = False
    """Whether a value is written with a point."""


_BASE = re.compile(
    r"\(?([0-9A-Za-z.]+)\)?\s*(?:_\s*\{?\s*\(?(?:base\s*)?|\(?\s*(?:in )?base\s+)([0-9]+|[a-z]+)\s*\)?\}?\)?"
)
_DIGIT, _LETTER = re.compile("[0-9]"), re.compile("[A-Za-z]")
_DIGITS_ONLY = re.compile(r"[0-9]+")
_HEX_LETTERS = frozenset("abcdefABCDEF")
_BASE_NAMES = {
    name: base
    for base, name in enumerate(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], start=2
    )
} | {"sixteen": 16}
_PREFIXES = frozenset({"therefore", "Rightarrow", "implies", "rightarrow", "to", "because"})
_OTHER_RELATIONS = frozenset({"<", ">", "<=", ">=", "le", "ge", "ne", "!=", "in"})


def read(plain: str, sentences: bool = True) -> Reading:
    """What a text that `surface.clean` has made plain states; never raises on a string."""
    special = _read_special(plain) or (_read_special(_after_is(plain)) if sentences and " " in plain else None)
    if special is not None:
        return special
    try:
        tokens = tokenize(plain)
    except UnreadableError:
        return Reading("words", words=plain)
    if tokens and tokens[-1].text == "." and len(tokens) > 1:
        tokens.pop()  # the stop within \\text{No solution.}
    phrase = PHRASES.get(text_of(tokens)) if tokens and tokens[0].kind in ("word", "text") else None
    if phrase:
        return read(phrase)
    try:
        return _read_tokens(tokens, sentences)
    except (UnreadableError, RecursionError):
        return Reading("words", words=text_of(tokens))


def _read_special(plain: str) -> Reading | None:
    """Times, dates, ratios and numerals with a base, each behind a test that most answers fail at once."""
    if not _DIGIT.search(plain, 0, 40):
        return None
    if "_" in plain or "base" in plain:
        numeral = _read_numeral(plain)
        if numeral is not None:
            return numeral
    if ":" not in plain and not _LETTER.search(plain) and plain.count("-") < 2 and plain.count("/") < 2:
        return None
    if len(plain) > 80:
        return None
    text = without_markup(plain)
    if (clock := read_clock(text)) is not None:
        ratio = read_ratio(text)
        return Reading("clock", words=text, special=clock, label=":".join(ratio) if ratio else "")
    if (date := read_date(text)) is not None:
        return Reading("date", words=text, special=date)
    if (ratio := read_ratio(text)) is not None:
        return Reading("ratio", words=text, special=ratio)
    return None


def _after_is(plain: str) -> str:
    """What follows `is` or a colon in a sentence whose beginning is harmless, else nothing."""
    beginning, separator, rest = plain.partition(" is ")
    if not separator:
        beginning, separator, rest = plain.partition(": ")
    words = beginning.replace(",", " ").lower().split()
    if len(words) > 12 or not all(word.isalpha() and word not in BLOCKERS for word in words):
        return ""
    return rest.removeprefix(": ").strip()


def _read_numeral(plain: str) -> Reading | None:
    match = _BASE.fullmatch(without_markup(plain))
    if match is None:
        return None
    digits = match[1]
    if not any(character.isdigit() for character in digits) and not (
        len(digits) > 1 and _HEX_LETTERS.issuperset(digits)
    ):
        return None  # `x_2` is a variable
    base = int(match[2]) if _DIGITS_ONLY.fullmatch(match[2]) and len(match[2]) < 4 else _BASE_NAMES.get(match[2], 0)
    if not base or (digits.isalpha() and base <= 10):
        return None
    return Reading("numeral", words=plain, special=(digits.upper().lstrip("0") or "0", base))


def _has_words(tokens: Sequence[Token]) -> bool:
    for index, token in enumerate(tokens):
        if token.kind == "text" or (token.kind == "word" and len(token.text) > 1 and is_wordy(tokens, index)):
            return True
    return False


def _read_tokens(tokens: Sequence[Token], sentences: bool) -> Reading:
    while tokens and (tokens[0].text in _PREFIXES and tokens[0].kind == "command"):
        tokens = tokens[1:]
    if not _has_words(tokens):
        return _read_list(tokens)
    tokens = number_words(tokens)
    value = sentence_value(tokens) if sentences else tokens
    value_start = len(tokens) - len(value)
    only_words = all(is_wordy(tokens, index) for index in range(value_start, len(tokens)))
    # Words equal the same words alone: `The answer is no solution` hedges nothing.
    if is_hedged(tokens[:value_start] if only_words else tokens, value_start):
        return Reading("words", words=text_of(tokens))
    if only_words and (phrase := PHRASES.get(text_of(value))):
        return read(phrase)
    reading = _read_list(value)
    names = variable_names(reading.node) if reading.node is not None and value_start else frozenset()
    return Reading("words", words=text_of(tokens)) if subject_of(tokens[:value_start]) in names else reading


def _read_list(tokens: Sequence[Token]) -> Reading:
    parts, connectives = split_list(tokens)
    if len(parts) == 1:
        parts = _split_compound(parts[0])
    if len(parts) == 1:
        return _read_value(parts[0])
    if len(parts) > MAX_ITEMS or any(not part for part in parts):
        return Reading("words", words=text_of(tokens))
    items = [_read_value(part) for part in parts]
    if all(item.kind == "words" for item in items):
        items = [replace(item, words=item.words.removeprefix("the ")) for item in items]
    elif items[-1].unit and not any(item.unit for item in items[:-1]):
        items = [replace(item, unit=items[-1].unit) for item in items]  # `3 and 5 cm`
    connective = (
        "and" if connectives == {"and"} else "or" if connectives <= {"or", ","} and "or" in connectives else ","
    )
    return Reading("list", items=tuple(items), connective=connective)


def split_list(tokens: Sequence[Token]) -> tuple[list[Sequence[Token]], set[str]]:
    """The parts between commas, semicolons, `and` and `or` outside brackets, and which of these there were."""
    parts: list[Sequence[Token]] = []
    found: set[str] = set()
    depth = start = 0
    for index, token in enumerate(tokens):
        if token.kind in ("sign", "command"):
            if token.text in OPENERS:
                depth += 1
            elif token.text in CLOSERS:
                depth -= 1
        if depth:
            continue
        connective = _connective(token)
        if connective:
            found.add(connective)
            if index > start or connective == "," or not parts:
                parts.append(tokens[start:index])
            start = index + 1
    parts.append(tokens[start:])
    return parts, found


def _split_compound(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """`2 hours 30 minutes` in its parts, which are compared like those of `2 hours and 30 minutes`."""
    parts: list[Sequence[Token]] = []
    start = 0
    for index in range(2, len(tokens) - 1):
        before, after = tokens[index - 1].text.lower(), tokens[index + 1].text.lower()
        is_inch = after == "in" and index + 2 == len(tokens)
        if tokens[index].kind == "number" and before in UNIT_SYNONYMS and (is_inch or after in UNIT_SYNONYMS):
            parts.append(tokens[start:index])
            start = index
    return [*parts, tokens[start:]]


def _connective(token: Token) -> str:
    if token.kind == "sign":
        return "," if token.text in (",", ";") else ""
    if token.kind in ("word", "text"):
        lowered = token.text.lower()
        return lowered if lowered in ("and", "or") else ""
    return {"land": "and", "lor": "or"}.get(token.text, "")


def _split_at_equals(tokens: Sequence[Token]) -> list[Sequence[Token]] | None:
    """The sides of a chain of equalities outside brackets; None where another relation stands among them."""
    sides: list[Sequence[Token]] = []
    depth = start = 0
    for index, token in enumerate(tokens):
        if token.kind == "number":
            continue
        if token.text in OPENERS:
            depth += 1
        elif token.text in CLOSERS:
            depth -= 1
        elif depth == 0 and token.kind in ("sign", "command"):
            if token.text in _OTHER_RELATIONS:
                return None
            if token.text == "=":
                sides.append(tokens[start:index])
                start = index + 1
    sides.append(tokens[start:])
    return sides


def _read_value(tokens: Sequence[Token]) -> Reading:
    """One item: `label = value unit`."""
    if not tokens:
        return Reading("words")
    sides = _split_at_equals(tokens) if any(token.text == "=" for token in tokens) else None
    if sides is None or len(sides) == 1:
        return _read_quantity(tokens)
    if any(not side for side in sides):
        return Reading("words", words=text_of(tokens))
    label = read_label(sides[0])
    if label is not None:
        value = _read_quantity(sides[1]) if len(sides) == 2 else _read_chain(sides[1:])
        if value is None:
            return Reading("words", words=text_of(tokens))
        return _with_label(value, label) or _read_quantity(tokens)
    label = read_label(sides[1]) if len(sides) == 2 and len(sides[1]) == 1 else None
    if label is not None:
        return _with_label(_read_quantity(sides[0]), label) or _read_quantity(tokens)
    return _read_chain(sides) or _read_quantity(tokens)


def _with_label(reading: Reading, label: Label) -> Reading | None:
    """The value as the label's; None where the label stands in the value itself."""
    if reading.node is None:
        return reading
    if not defines(label, reading.node):
        return None
    of_sequence = label.function[:1] == (label.text[:-1],)
    of_variables = not of_sequence or label.function[1] in variable_names(reading.node)
    return replace(reading, label=label.text, function=label.function if of_variables else ())


def _read_chain(sides: Sequence[Sequence[Token]]) -> Reading | None:
    """`3 + 4 = 7` states 7, if it is true."""
    readings = [_read_quantity(side) for side in sides]
    last = readings[-1]
    if last.node is None:
        return None
    for reading in readings[:-1]:
        if reading.node is None or variable_names(reading.node) or not equal_expressions(reading.node, last.node):
            return None
    return last


def _read_quantity(tokens: Sequence[Token]) -> Reading:
    """A formula with its unit or currency; words where it is neither."""
    approximate = tokens[0].kind == "command" and tokens[0].text == "approx"
    if approximate:
        tokens = tokens[1:]
    body, unit = _split_unit(list(tokens))
    if body and unit is not None:
        try:
            decimal = any("." in token.text for token in body)
            return Reading("value", node=parse(body), unit=unit, approximate=approximate, decimal=decimal)
        except UnreadableError:
            pass
    return Reading("words", words=text_of(tokens))


def _split_unit(tokens: list[Token]) -> tuple[list[Token], Unit | None]:
    """The tokens of the formula, and the unit around them (None for words that are no unit)."""
    tokens, money = _split_money(tokens)
    start = _unit_start(tokens)
    body, tail = tokens[:start], tokens[start:]
    unit = read_unit(tail) if tail else NO_UNIT
    if unit is None:
        # `5 m + 2`: a single letter is a variable after all.
        return (tokens, money) if len(tail[0].text) == 1 else (body, None)
    number, sign_unit = _split_sign_unit(body)
    if sign_unit and not any(
        token.text in FUNCTIONS for token in body
    ):  # the degrees of `\sin 30^\circ` are an angle's
        return number, money or (unit if unit.dimensions else sign_unit)
    return body, money or unit


def _split_money(tokens: list[Token]) -> tuple[list[Token], Unit]:
    """Take a currency before the number off: `$5`, `-$5`, `USD 5`, `Rs. 5`."""
    for index in range(min(2, len(tokens) - 1)):
        name = CURRENCY_SIGNS.get(tokens[index].text) or CURRENCY_CODES.get(tokens[index].text.lower())
        after = index + 2 if tokens[index + 1].text == "." else index + 1
        if name and after < len(tokens) and (tokens[after].kind == "number" or tokens[after].text == "-"):
            return tokens[:index] + tokens[after:], currency(name)
    return tokens, NO_UNIT


def _unit_start(tokens: Sequence[Token]) -> int:
    """Where the words after the value begin; the end if there are none."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind == "number":
            continue
        if token.text in OPENERS:
            depth += 1
        elif token.text in CLOSERS:
            depth -= 1
        elif index == 0 or token.kind not in ("word", "text"):
            continue
        elif depth == 1 and is_wordy(tokens, index) and tokens[index - 1].text == "(":
            return index - 1  # 72 (dollars)
        elif depth == 0:
            if token.text in ("a", "an") and index + 1 < len(tokens) and is_wordy(tokens, index + 1):
                return index  # $18 a day
            start = _degrees_start(tokens, index)
            after_number = tokens[index - 1].kind == "number" or tokens[index - 1].text in ("}", ")")
            if start < index or (is_unit_letter(token) and after_number) or is_wordy(tokens, index):
                return start
    return len(tokens)


def _degrees_start(tokens: Sequence[Token], index: int) -> int:
    """Where `^\\circ C` begins, if the letter at `index` ends it; else `index`."""
    start = index
    while start > 0 and tokens[start - 1].text in ("^", "{", "circ", "}"):
        start -= 1
    is_temperature = tokens[index].text in ("C", "F") and any(token.text == "circ" for token in tokens[start:index])
    return start if is_temperature else index


def _split_sign_unit(body: list[Token]) -> tuple[list[Token], Unit]:
    """Take `%`, `^\\circ`, `^{\\circ}` or a currency sign off the end."""
    if not body:
        return body, NO_UNIT
    last = body[-1]
    if last.text == "%":
        return body[:-1], PERCENT
    if last.kind == "sign" and last.text in CURRENCY_SIGNS:
        return body[:-1], currency(CURRENCY_SIGNS[last.text])
    texts = [token.text for token in body[-4:]]
    for ending in (["^", "{", "circ", "}"], ["^", "circ"], ["circ"]):
        if texts[-len(ending) :] == ending:
            return body[: -len(ending)], DEGREE
    return body, NO_UNIT
