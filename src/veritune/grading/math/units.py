"""Units: what stands after a number (or, for money, before it), and whether two of them are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from veritune.grading.math.tokens import Token
from veritune.grading.math.vocabulary import (
    NO_LAST_UNITS,
    NO_UNITS,
    NOUNS_IN_LY,
    RATES,
    UNIT_ADJECTIVES,
    UNIT_LETTERS,
    UNIT_STOP_WORDS,
    UNIT_SYNONYMS,
)

MAX_UNIT_WORDS = 12
_POWER_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWER_AFTER = {"squared": 2, "cubed": 3}
_SIGNS_IN_UNITS = frozenset("/*{}()^-'.")
_DANGLING = frozenset({"to", "of", "by", "than", "from", "with", "per"})
_TEMPERATURES = {"C": "celsius", "F": "fahrenheit"}


class Unit(NamedTuple):
    """Known units with exponents, such as {("m", 1), ("s", -2)}, and the words that name what is counted."""

    dimensions: frozenset[tuple[str, int]] = frozenset()
    nouns: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.dimensions or self.nouns)


NO_UNIT = Unit()
PERCENT = Unit(frozenset({("percent", 1)}))
DEGREE = Unit(frozenset({("degree", 1)}))
CURRENCY_SIGNS = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee", "¢": "cent"}

CURRENCY_CODES = {"rs": "rupee", "inr": "rupee", "usd": "dollar", "eur": "euro", "gbp": "pound sterling"}


def same_unit(first: Unit, second: Unit, ignore_missing: bool) -> bool:
    """Whether the units agree; with `ignore_missing`, no unit agrees with every unit."""
    if first == second:
        return True
    if not first or not second:
        return ignore_missing
    if first.dimensions and second.dimensions:
        bare = {dimension for dimension in first.dimensions ^ second.dimensions if dimension[0] != "degree"}
        temperatures = {("celsius", 1), ("fahrenheit", 1)}
        degree_only = DEGREE.dimensions in (first.dimensions, second.dimensions)
        return first.dimensions == second.dimensions or (degree_only and len(bare) == 1 and bare <= temperatures)
    if first.dimensions or second.dimensions:
        return False
    return first.nouns <= second.nouns or second.nouns <= first.nouns


def currency(name: str) -> Unit:
    """The unit of a currency sign's money."""
    return Unit(frozenset({(name, 1)}))


def is_unit_letter(token: Token) -> bool:
    """Whether a single letter stands for a unit: set apart from its number (`5 m`) or in roman type (`5\\text{m}`)."""
    return token.text in UNIT_LETTERS and (token.kind == "text" or (token.kind == "word" and token.spaced))


def read_unit(tokens: Sequence[Token]) -> Unit | None:
    """The unit that the tokens after a number spell, or None if they are something else than a unit."""
    if [token.text for token in tokens] == ["in"]:
        return Unit(frozenset({("inch", 1)}))
    dimensions: dict[str, int] = {}
    nouns: set[str] = set()
    direction = power = 1
    position = 0
    if not _may_be_unit(tokens):
        return None
    while position < len(tokens):
        token = tokens[position]
        lowered = token.text.lower()
        position += 1
        if token.kind == "command" and token.text == "circ":
            dimensions["degree"] = 1
        elif token.kind not in ("word", "text"):
            if token.kind != "sign" or token.text not in _SIGNS_IN_UNITS:
                return None
            direction = -1 if token.text == "/" else direction
        elif lowered == "per" or (lowered in ("a", "an") and (dimensions or nouns)):
            direction = -1
        elif lowered in UNIT_ADJECTIVES and position < len(tokens) and _symbol(tokens[position], ()):
            dimensions[lowered] = 1
        elif lowered in _POWER_BEFORE:
            power = _POWER_BEFORE[lowered]
        elif not (lowered == "s" and position > 1 and tokens[position - 2].text == "'"):
            exponent, after = _exponent(tokens, position)
            if not _add_word(token, tokens[:position], direction * exponent, power, dimensions, nouns):
                return None
            position, direction, power = after, 1, 1
    if "celsius" in dimensions or "fahrenheit" in dimensions:
        dimensions.pop("degree", None)
    return Unit(frozenset(dimensions.items()), frozenset(nouns) if not dimensions else frozenset())


def _may_be_unit(tokens: Sequence[Token]) -> bool:
    """Whether the number of words and the last of them are a unit's; `5 marbles lost` still counts marbles."""
    words = [token.text.lower() for token in tokens if token.kind in ("word", "text")]
    if len(words) > MAX_UNIT_WORDS or tokens[-1].text.lower() in _DANGLING:
        return False
    if words[-1:] and words[-1] in _POWER_BEFORE:
        return False
    if words[-3:] in (["in", "the", "red"], ["in", "the", "hole"]):
        return False
    return not words or words[-1] not in NO_LAST_UNITS or (words[-1] in ("lost", "missing") and len(words) > 1)


def _add_word(
    token: Token, before: Sequence[Token], exponent: int, power: int, dimensions: dict[str, int], nouns: set[str]
) -> bool:
    """Note one word as a known unit or as a noun; False for what belongs to no unit: `or`, a noun with an exponent.

    `power` is that of `square` before a unit; before a noun, as in `square tiles`, it says nothing.
    """
    symbol = _symbol(token, before)
    lowered = token.text.lower()
    if lowered in ("and", "or"):
        return False
    if symbol in RATES:
        above, below = RATES[symbol]
        dimensions.update({above: 1, below: -1})
    elif symbol:
        dimensions[symbol] = dimensions.get(symbol, 0) + power * exponent
    elif len(lowered) == 1 and lowered not in UNIT_STOP_WORDS:
        return False
    elif lowered not in UNIT_STOP_WORDS:
        nouns.add(singular(lowered))
        return abs(exponent) == 1 and not is_no_noun(lowered)
    return True


def is_no_noun(word: str) -> bool:
    """Whether the word computes, negates or counts in place of naming what is counted."""
    if word in NO_UNITS or word.endswith(("illion", "illions", "illionth", "illionths", "illiard", "illiards", "fold")):
        return True
    return word.endswith("ly") and len(word) > 4 and word not in NOUNS_IN_LY


def _symbol(token: Token, before: Sequence[Token]) -> str | None:
    if token.text in _TEMPERATURES and any(earlier.text in ("circ", "degrees", "degree") for earlier in before):
        return _TEMPERATURES[token.text]
    if len(token.text) == 1:
        return UNIT_SYNONYMS.get(token.text, token.text) if token.text in UNIT_LETTERS else None
    return UNIT_SYNONYMS.get(token.text) or UNIT_SYNONYMS.get(token.text.lower())


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int, int]:
    """The exponent written at `position` (1 if there is none) and the position after it."""
    rest = [token.text for token in tokens[position : position + 5]]
    if rest[:1] and rest[0] in _POWER_AFTER:
        return _POWER_AFTER[rest[0]], position + 1
    if rest[:1] != ["^"]:
        return 1, position
    inside = [text for text in rest[1:] if text != "{"]
    sign = -1 if inside[:1] == ["-"] else 1
    digits = inside[1] if sign < 0 and len(inside) > 1 else inside[0] if inside else ""
    if not digits.isdigit() or len(digits) > 1:
        return 1, position
    length = 2 + (sign < 0) + (2 if rest[1] == "{" else 0)
    return sign * int(digits), min(position + length, len(tokens))


def singular(word: str) -> str:
    """A rough singular, alike for both sides: `boxes` and `box`, `apples` and `apple`, `berries` and `berry`."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word
