"""Sentences: which words are words, which of them forbid reading a value, and where the value begins."""

from __future__ import annotations

from collections.abc import Sequence

from veritune.grading.limits import UnreadableError
from veritune.grading.literals import read_number, reads_as_product
from veritune.grading.tokens import Token
from veritune.grading.vocabulary import (
    ANSWER_NOUNS,
    BLOCKERS,
    COPULAS,
    COUNTED_NOUNS,
    FILLERS,
    FRACTION_WORDS,
    FUNCTIONS,
    NAMES,
    NUMBER_WORDS,
    QUANTITY_NOUNS,
    SCALE_WORDS,
    SUBJECT_NOUNS,
    UNIT_SYNONYMS,
)

MAX_SENTENCE_WORDS = 20
_PUNCTUATION = frozenset([".,", ";", ":", "!", "'", '"', "(", ")", "{", "}", "-", "`", "[", "]"]) | {"{", "}", "..."}


def is_wordy(tokens: Sequence[Token], index: int) -> bool:
    """Whether the token is a word of English rather than a variable, a product of variables or a function."""
    token = tokens[index]
    if token.kind == "text":
        return len(token.text) > 1
    if token.kind != "word" or len(token.text) == 1:
        return False
    if token.text in FUNCTIONS:  # `5 min` ends in a unit, `min(5, 6)` begins with a function
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        return following is None or (following.kind == "text" and len(following.text) > 1)
    return token.text not in NAMES and not reads_as_product(tokens, index)


def is_hedged(tokens: Sequence[Token], value_start: int) -> bool:
    """Whether a word makes the statement a bound, a hedge, a condition, a negation or a further computation.

    Before `value_start`, where the value begins, stands what the sentence is about.
    """
    for index, token in enumerate(tokens):
        if token.kind in ("word", "text"):
            lowered = token.text.lower()
            if lowered in ("squared", "cubed") and index and tokens[index - 1].text.lower() in UNIT_SYNONYMS:
                continue
            if lowered == "times" and (index + 1 == len(tokens) or tokens[index + 1].text in ("a", "per", "each")):
                continue
            if lowered == "over" and index and tokens[index - 1].text.lower() == "left":
                continue
            if lowered in SUBJECT_NOUNS and index < value_start - 1:
                continue
            if _counts_something(tokens, index):
                continue
            if lowered in BLOCKERS:
                return True
        elif token.text == "?":
            return True
        elif token.text == "'" and index + 1 < len(tokens) and tokens[index + 1].text == "t":
            return True  # isn't, can't
    return False


def _counts_something(tokens: Sequence[Token], index: int) -> bool:
    """`14 more apples` and `14 divisors` are numbers of things; `14 more than x` and `more than 14` are not."""
    lowered = tokens[index].text.lower()
    if index == 0 or tokens[index - 1].kind != "number":
        return False
    following = tokens[index + 1] if index + 1 < len(tokens) else None
    if following is not None and following.text.lower() in ("than", "or", "of", "from"):
        return False
    is_word = following is not None and following.kind in ("word", "text")
    return lowered in COUNTED_NOUNS or (lowered in ("more", "fewer", "less", "different") and is_word)


def text_of(tokens: Sequence[Token]) -> str:
    """The tokens as plain words, for comparison with other words: case and punctuation count only in formulas."""
    if all(token.kind in ("word", "text") or token.text in _PUNCTUATION for token in tokens):
        kept = [token.text.casefold() for token in tokens if token.text not in _PUNCTUATION]
        if len(kept) > 1 and kept[0] in ("the", "a", "an", "on", "at"):
            kept = kept[1:]
        return " ".join(kept)
    return " ".join(token.text for token in tokens)


def sentence_value(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens after a beginning such as `The total is:`, or all of them where there is no such beginning."""
    limit = _first_number(tokens)
    start = 0
    words = 0
    for index in range(min(limit, len(tokens))):
        token = tokens[index]
        if token.kind in ("word", "text"):
            words += 1
        if token.text == "=" and not any(is_wordy(tokens, earlier) for earlier in range(index)):
            continue  # `x = 5` is a formula
        if (
            (token.text.lower() in COPULAS or (token.text == "s" and tokens[index - 1].text == "'"))
            and words
            and _may_introduce(tokens[:index])
        ):
            start = index + 1
    if words > MAX_SENTENCE_WORDS:
        raise UnreadableError("a long sentence")
    if start == 0 and limit < len(tokens):
        start = _skip_nouns(tokens, limit)
    while start < len(tokens) and _is_filler(tokens, start):
        start += 1
    return tokens[start:] if start < len(tokens) else tokens


def _is_filler(tokens: Sequence[Token], index: int) -> bool:
    text = tokens[index].text.lower()
    if text in QUANTITY_NOUNS and index + 1 < len(tokens) and tokens[index + 1].text == "of":
        return True
    if text == "a" and not (index + 1 < len(tokens) and is_wordy(tokens, index + 1)):
        return False  # the variable
    return text in FILLERS or text in COPULAS


def _first_number(tokens: Sequence[Token]) -> int:
    for index, token in enumerate(tokens):
        if token.kind == "number" or token.text in ("frac", "sqrt"):
            return index
    return len(tokens)


def _may_introduce(before: Sequence[Token]) -> bool:
    """Only words, single letters and signs without meaning may stand before `is`."""
    wordless = [token for token in before if token.kind not in ("word", "text")]
    return all(token.kind == "command" or token.text in _PUNCTUATION | {",", "$", "|", "_"} for token in wordless)


def _skip_nouns(tokens: Sequence[Token], limit: int) -> int:
    """`Answer 5` and `Total: 5` need no verb."""
    start = 0
    while start < limit and (
        tokens[start].text.lower() in ANSWER_NOUNS | FILLERS | {"final", "my", "our", "so"} or tokens[start].text == ":"
    ):
        start += 1
    return start


def number_words(tokens: Sequence[Token]) -> Sequence[Token]:
    """Numbers in words as numerals: `seventy-two` is 72, `5 million` is 5000000, `two thirds` is 2/3."""
    tokens = _spoken_signs(tokens)
    if not any(_numeric_word(token) for token in tokens):
        return tokens
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        value, after = _word_number(tokens, position)
        if after == position:
            result.append(tokens[position])
            position += 1
            continue
        spaced = tokens[position].spaced
        position = after
        result.append(Token("number", str(value), spaced))
        position = _append_fraction(tokens, position, result)
    return result


def _spoken_signs(tokens: Sequence[Token]) -> Sequence[Token]:
    """`minus 5` and `The answer is negative five` with a sign; the minus of `72 minus 5` stays a word."""
    result = list(tokens)
    for index, token in enumerate(tokens[:-1]):
        if token.kind not in ("word", "text") or token.text.lower() not in ("minus", "negative"):
            continue
        following = tokens[index + 1]
        begins = index == 0 or tokens[index - 1].text.lower() in COPULAS | FILLERS
        if begins and (following.kind == "number" or following.text.lower() in NUMBER_WORDS):
            result[index] = Token("sign", "-", token.spaced)
    return result


def _numeric_word(token: Token) -> bool:
    lowered = token.text.lower()
    return token.kind in ("word", "text") and (
        lowered in NUMBER_WORDS or lowered in SCALE_WORDS or lowered in FRACTION_WORDS
    )


def _word_number(tokens: Sequence[Token], position: int) -> tuple[int | str, int]:
    """The number that starts at `position` and where it ends; the same position where none starts."""
    token = tokens[position]
    lowered = token.text.lower()
    if token.kind == "number":
        return _scaled(tokens, position)
    if token.kind not in ("word", "text") or lowered not in NUMBER_WORDS:
        return 0, position
    total = current = 0
    while position < len(tokens):
        lowered = tokens[position].text.lower()
        if (
            tokens[position].text == "-"
            and position + 1 < len(tokens)
            and tokens[position + 1].text.lower() in NUMBER_WORDS
        ):
            position += 1
            continue
        if lowered in NUMBER_WORDS:
            current += NUMBER_WORDS[lowered]
        elif lowered == "hundred":
            current *= 100
        elif lowered in SCALE_WORDS:
            total += current * SCALE_WORDS[lowered]
            current = 0
        elif not (lowered == "and" and current >= 100 and _numeric_word(tokens[min(position + 1, len(tokens) - 1)])):
            break
        position += 1
    return total + current, position


def _scaled(tokens: Sequence[Token], position: int) -> tuple[int | str, int]:
    token = tokens[position]
    value = read_number(token.text)
    after = position + 1
    while after < len(tokens) and tokens[after].text.lower() in SCALE_WORDS and tokens[after].kind in ("word", "text"):
        value = value * SCALE_WORDS[tokens[after].text.lower()]
        after += 1
    if after == position + 1 or value.denominator != 1:
        return token.text, position + 1
    return int(value), after


def _append_fraction(tokens: Sequence[Token], position: int, result: list[Token]) -> int:
    """`two thirds` and `five and a half`, whose number has just been appended."""
    rest = [token.text.lower() for token in tokens[position : position + 3]]
    if rest[:1] == ["-"]:
        rest = rest[1:]
    coins = rest[:1] == ["quarters"] and result[-1].text not in ("1", "2", "3")
    if rest[:1] and rest[0] in FRACTION_WORDS and not coins:
        result += [Token("sign", "/", False), Token("number", str(FRACTION_WORDS[rest[0]]), False)]
        return position + 1 + (tokens[position].text == "-")
    if len(rest) == 3 and rest[0] == "and" and rest[1] in ("a", "one") and rest[2] in FRACTION_WORDS:
        bottom = str(FRACTION_WORDS[rest[2]])
        result += [Token("number", "1", True), Token("sign", "/", False), Token("number", bottom, False)]
        return position + 3
    return position
