"""Numbers in words: `seventy-two` is 72, `5 dozen` is 60, `two thirds` is 2/3, `5 per cent` is 5%."""

from __future__ import annotations

from collections.abc import Sequence

from veritune.grading.math.literals import read_number
from veritune.grading.math.prose import is_wordy
from veritune.grading.math.tokens import Token
from veritune.grading.math.vocabulary import COPULAS, FILLERS, FRACTION_WORDS, NUMBER_WORDS, PARTS, SCALE_WORDS

_NUMERIC = NUMBER_WORDS.keys() | SCALE_WORDS.keys() | FRACTION_WORDS.keys() | PARTS.keys() | {"per", "basis"}


def number_words(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens with numerals in place of numbers in words, and with a division in place of `per mille`."""
    tokens = _spoken_signs(tokens)
    if not any(_numeric_word(token) for token in tokens):
        return tokens
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        value, after = _word_number(tokens, position)
        if after == position or _counts_subjects(tokens, position):
            result.append(tokens[position])
            position += 1
            continue
        result.append(Token("number", str(value), tokens[position].spaced))
        position = _append_part(tokens, _append_fraction(tokens, after, result), result)
    return result


def _is_word(token: Token) -> bool:
    return token.kind in ("word", "text")


def _counts_subjects(tokens: Sequence[Token], position: int) -> bool:
    """Whether the numeral only says who: `The two brothers drank 36 ounces`."""
    if position == 0 or tokens[position].kind == "number" or position + 2 >= len(tokens):
        return False
    is_definite = tokens[position - 1].text.lower() in ("the", "these", "those", "his", "her", "their")
    is_noun = is_wordy(tokens, position + 1) and not _numeric_word(tokens[position + 1])
    return is_definite and is_noun and any(token.kind == "number" for token in tokens[position + 2 :])


def _spoken_signs(tokens: Sequence[Token]) -> Sequence[Token]:
    """`minus 5` and `The answer is negative five` with a sign; the minus of `72 minus 5` stays a word."""
    result = list(tokens)
    for index, token in enumerate(tokens[:-1]):
        if not _is_word(token) or token.text.lower() not in ("minus", "negative"):
            continue
        following = tokens[index + 1]
        begins = index == 0 or tokens[index - 1].text.lower() in COPULAS | FILLERS
        if begins and (following.kind == "number" or following.text.lower() in NUMBER_WORDS):
            result[index] = Token("sign", "-", token.spaced)
    return result


def _numeric_word(token: Token) -> bool:
    return _is_word(token) and token.text.lower() in _NUMERIC


def _word_number(tokens: Sequence[Token], position: int) -> tuple[int | str, int]:
    """The number that starts at `position` and where it ends; the same position where none starts."""
    token = tokens[position]
    lowered = token.text.lower()
    if token.kind == "number":
        return _scaled(tokens, position)
    following = tokens[position + 1].text.lower() if position + 1 < len(tokens) else ""
    if lowered == "half" and following in ("a", "an"):
        value, after = _times_scales(tokens, position + 2)
        return ("0.5", after) if value == 1 else (value // 2, after)
    begins = position == 0 or tokens[position - 1].text.lower() in COPULAS
    if lowered == "a" and begins and following in SCALE_WORDS and following not in ("score", "gross"):
        return _times_scales(tokens, position + 1)
    if lowered == "a" and begins and following in FRACTION_WORDS:
        return 1, position + 1
    if not _is_word(token) or lowered not in NUMBER_WORDS:
        return 0, position
    return _cardinal(tokens, position)


def _cardinal(tokens: Sequence[Token], start: int) -> tuple[int, int]:
    """`two thousand three hundred and forty-five`: each part is smaller than the part before it leaves room for."""
    total = current = 0
    room = largest = 10**30
    position = end = start
    while position < len(tokens):
        token = tokens[position]
        lowered = token.text.lower()
        if not _is_word(token):
            if token.text != "-" or room != 10:
                break
        elif lowered in NUMBER_WORDS:
            value = NUMBER_WORDS[lowered]
            if value >= room or (value == 0 and end > start):
                break
            current += value
            room = 10 if value >= 20 else 0
            end = position + 1
        elif lowered == "hundred" and 0 < current < 100:
            current, room, end = 100 * current, 100, position + 1
        elif lowered in SCALE_WORDS and lowered != "hundred" and current and SCALE_WORDS[lowered] < largest:
            largest = SCALE_WORDS[lowered]
            total, current, room, end = total + largest * current, 0, largest, position + 1
        elif lowered != "and" or room < 20:
            break
        position += 1
    return total + current, end


def _times_scales(tokens: Sequence[Token], position: int) -> tuple[int, int]:
    """The product of the scale words from `position` on, and where they end."""
    product = 1
    while position < len(tokens) and _is_word(tokens[position]) and tokens[position].text.lower() in SCALE_WORDS:
        product *= SCALE_WORDS[tokens[position].text.lower()]
        position += 1
    return product, position


def _scaled(tokens: Sequence[Token], position: int) -> tuple[int | str, int]:
    scale, after = _times_scales(tokens, position + 1)
    value = read_number(tokens[position].text) * scale
    if after == position + 1 or value.denominator != 1:
        return tokens[position].text, position + 1
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


def _append_part(tokens: Sequence[Token], position: int, result: list[Token]) -> int:
    """`per cent` as a percent sign, `per mille` and `basis points` as a division."""
    words = [token.text.lower() for token in tokens[position : position + 2]]
    if words == ["per", "cent"]:
        result.append(Token("sign", "%", False))
        return position + 2
    both = "".join(words)
    length = 1 if words[:1] and words[0] in PARTS else 2 if both in PARTS else 0
    if length:
        bottom = PARTS[words[0] if length == 1 else both]
        result += [Token("sign", "/", False), Token("number", str(bottom), False)]
    return position + length
