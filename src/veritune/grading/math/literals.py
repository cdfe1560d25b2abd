"""Single tokens with an inner structure: numerals, repeating decimals, and runs of letters that are products."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from veritune.grading.math.limits import MAX_NUMBER_CHARACTERS, UnreadableError
from veritune.grading.math.nodes import Node, number
from veritune.grading.math.tokens import Token
from veritune.grading.math.vocabulary import LETTER_WORDS, NAMES, PRODUCT_WORDS, UNIT_SYNONYMS


def reads_as_product(tokens: Sequence[Token], index: int) -> bool:
    """Whether a run of letters is a product of variables; `on` and `no` are words, and words have no anagrams."""
    token = tokens[index]
    word = token.text
    if len(word) > 4 or word.lower() in UNIT_SYNONYMS:
        return False
    if word.lower() in LETTER_WORDS:
        return word in PRODUCT_WORDS and _stands_in_a_sum(tokens, index)
    if len(word) == 2 or not set(word.lower()) & set("aeiouy") or set(word) <= set("wxyz"):
        return True
    if all(ord(after) - ord(before) == 1 for before, after in pairwise(word)):
        return True  # abc, xyz
    attached = index > 0 and tokens[index - 1].kind == "number" and not token.spaced
    raised = index + 1 < len(tokens) and tokens[index + 1].text in ("^", "_")
    return len(word) == 3 and (attached or raised)


def _stands_in_a_sum(tokens: Sequence[Token], index: int) -> bool:
    """`at` is a product in `at^2`, `at + b` after a sign and `b - at`."""
    before = tokens[index - 1].text if index else "="
    after = tokens[index + 1].text if index + 1 < len(tokens) else ")"
    return after == "^" or (before in ("=", "(", "+", "-") and after in ("+", "-")) or (before in "+-" and after == ")")


def spread_letters(tokens: Sequence[Token]) -> list[Token]:
    """`3yx^2` as `3 y x^2`: a power belongs to the last letter of a product."""
    result: list[Token] = []
    for index, token in enumerate(tokens):
        if token.kind == "text" and len(token.text) == 1:
            result.append(token._replace(kind="word"))
        elif token.kind != "word" or len(token.text) == 1 or token.text in NAMES or not reads_as_product(tokens, index):
            result.append(token)
        else:
            result += [Token("word", character, token.spaced) for character in token.text]
    return result


def read_number(text: str) -> int | Fraction:
    """The exact value of an unsigned numeral such as `12` or `0.25`."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise UnreadableError("too many digits")
    if "e" in text or "E" in text:
        mantissa, _, exponent = text.lower().partition("e")
        if len(exponent) > 4:
            raise UnreadableError("exponent too large")
        scaled = read_number(mantissa) * Fraction(10) ** int(exponent)
        return scaled.numerator if scaled.denominator == 1 else scaled
    if "." not in text:
        return int(text)
    whole, _, decimals = text.partition(".")
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    return value.numerator if value.denominator == 1 else value


def visible_period(text: str) -> str:
    """The digits that `0.1666...` and `0.2727...` repeat: one digit three times, several digits twice; "" for none."""
    decimals = text.partition(".")[2]
    for length in range(1, min(len(decimals) // 2, 12) + 1):
        period = decimals[-length:]
        if decimals.endswith(period * (3 if length == 1 else 2)):
            return period
    return ""


def repeating(prefix: str, period: str) -> Node:
    """`0.1` and `6` give 0.1666… = 1/6."""
    whole, _, decimals = prefix.partition(".")
    shift = 10 ** len(decimals)
    tail = Fraction(int(period), (10 ** len(period) - 1) * shift)
    return number(Fraction(int((whole or "0") + decimals), shift) + tail)
