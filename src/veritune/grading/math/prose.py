"""Sentences: which words are words, which of them forbid reading a value, and where the value begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from veritune.grading.math.limits import UnreadableError
from veritune.grading.math.literals import reads_as_product
from veritune.grading.math.tokens import Token
from veritune.grading.math.units import is_no_noun
from veritune.grading.math.vocabulary import (
    ANSWER_NOUNS,
    BLOCKERS,
    COPULAS,
    COUNTED_NOUNS,
    DETERMINERS,
    FILLERS,
    FUNCTIONS,
    GREEK_LETTERS,
    NAMES,
    NO_LAST_UNITS,
    POWERED_UNITS,
    PREPOSITIONS,
    QUANTITY_NOUNS,
    QUESTION_WORDS,
    RESULT_VERBS,
    SUBJECT_NOUNS,
    UNIT_SYNONYMS,
)

MAX_SENTENCE_WORDS = 20
_PHRASING = frozenset({"a", ",", "'", "s"})
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
    if _asks(tokens):
        return True
    for index, token in enumerate(tokens):
        if token.kind in ("word", "text"):
            if not _is_harmless(tokens, index, value_start):
                return True
        elif token.text == "?":
            return True
        elif token.text == "'" and index + 1 < len(tokens) and tokens[index + 1].text == "t":
            return True  # isn't, can't
    return False


def _asks(tokens: Sequence[Token]) -> bool:
    """`What is 72` and `is the answer 72` are questions; `which is 72` and `is 72` end a statement."""
    first, second = ([token.text.lower() for token in tokens[:2]] + ["", ""])[:2]
    states = first == "which" and second in COPULAS
    return first in QUESTION_WORDS and tokens[1:2] != [] and tokens[1].kind in ("word", "text") and not states


_HARMLESS_BETWEEN: dict[str, Callable[[str, str], bool]] = {
    "can": lambda before, following: following != "be",
    "squared": lambda before, following: UNIT_SYNONYMS.get(before) in POWERED_UNITS,
    "cubed": lambda before, following: UNIT_SYNONYMS.get(before) in POWERED_UNITS,
    "times": lambda before, following: following in ("", "a", "per", "each"),
    "over": lambda before, following: before == "left",
    "such": lambda before, following: following != "as",
    "all": lambda before, following: following == "together",
    "long": lambda before, following: following != "as",
    "least": lambda before, following: following == "common",
    "raised": lambda before, following: following != "to",
    "after": lambda before, following: following in ("that", "this"),
    "up": lambda before, following: following != "to" and (before.endswith("ed") or before in COPULAS),
}
"""Blockers that the words before and after them can make harmless."""


def _is_harmless(tokens: Sequence[Token], index: int, value_start: int) -> bool:
    """Whether the word is no blocker, or none where it stands."""
    word = tokens[index].text.lower()
    if word in _HARMLESS_BETWEEN:
        before = tokens[index - 1].text.lower() if index else ""
        following = tokens[index + 1].text.lower() if index + 1 < len(tokens) else ""
        harmless = _HARMLESS_BETWEEN[word](before, following)
    elif word not in BLOCKERS:
        return True
    elif word == "pi":
        harmless = tokens[index].kind == "word"
    elif word in ("more", "less", "fewer", "than"):
        harmless = _compares_amounts(tokens, index, value_start)
    else:
        harmless = word == "for" and (_names_a_purpose(tokens, index) or _measures(tokens, index))
    return harmless or _names_subject(tokens, index, value_start) or _counts_something(tokens, index)


def _names_subject(tokens: Sequence[Token], index: int, value_start: int) -> bool:
    """`The remainder is 3` says of what; `a multiple of 3` is another number."""
    if tokens[index].text.lower() not in SUBJECT_NOUNS or index + 1 >= value_start:
        return False
    return tokens[index + 1].text != "of" or index + 2 < value_start


def _names_a_purpose(tokens: Sequence[Token], index: int) -> bool:
    """`for the week` says what a value is for; `for x > 3` and `for even numbers` are conditions."""
    if index + 1 == len(tokens) or tokens[index + 1].text.lower() not in DETERMINERS:
        return False
    for following in range(index + 1, len(tokens)):
        if tokens[following].text.lower() in COPULAS:
            break
        if not is_wordy(tokens, following) and tokens[following].text not in ("a", "."):
            return False
    return True


def _measures(tokens: Sequence[Token], index: int) -> bool:
    """`biked for 79 miles`."""
    following = tokens[index + 1 : index + 3]
    return index > 1 and len(following) == 2 and following[0].kind == "number" and _is_measure(following[1])


def _compares_amounts(tokens: Sequence[Token], index: int, value_start: int) -> bool:
    """`She has 14 more ounces than Lazlo` states 14; `14 more than x` and `14 ounces less than half` compute."""
    number = next((i for i, token in enumerate(tokens) if token.kind == "number"), len(tokens))
    rest = range(number + 1, len(tokens))
    if index == number + 1 == len(tokens) - 1 and tokens[index].text == "more":
        return True  # `He needs 36 more`
    if value_start < 2 or number >= index:
        return False
    if not all(is_wordy(tokens, i) or tokens[i].text in (*_PHRASING, ".") for i in rest):
        return False
    after_number = tokens[number + 1].text.lower()
    than = next((i for i in rest if tokens[i].text.lower() == "than"), len(tokens))
    return than > number + 2 and than + 1 < len(tokens) and after_number != "or"


def _counts_something(tokens: Sequence[Token], index: int) -> bool:
    """`14 more apples` and `14 divisors` are numbers of things; `14 more than x` and `more than 14` are not."""
    lowered = tokens[index].text.lower()
    before = [token.kind for token in tokens[max(index - 2, 0) : index]]
    if lowered in COUNTED_NOUNS and before == ["number", tokens[index].kind] and _is_adjective(tokens[index - 1]):
        return True  # 14 prime factors
    if before[-1:] != ["number"]:
        return False
    following = tokens[index + 1] if index + 1 < len(tokens) else None
    if following is not None and following.text.lower() in ("than", "or", "of", "from"):
        return False
    is_word = following is not None and following.kind in ("word", "text")
    return lowered in COUNTED_NOUNS or (lowered in ("more", "fewer", "less", "different") and is_word)


def _is_adjective(token: Token) -> bool:
    word = token.text.lower()
    return word in ("more", "different") or not (word in BLOCKERS or word in UNIT_SYNONYMS or is_no_noun(word))


def text_of(tokens: Sequence[Token]) -> str:
    """The tokens as plain words, for comparison with other words: case and punctuation count only in formulas."""
    if all(token.kind in ("word", "text") or token.text in _PUNCTUATION for token in tokens):
        kept = [token.text.casefold() for token in tokens if token.text not in _PUNCTUATION]
        if len(kept) > 2 and kept[0] == "there" and kept[1] in ("is", "are"):
            kept = kept[2:]
        if len(kept) > 1 and kept[0] in ("the", "a", "an", "on", "at"):
            kept = kept[1:]
        return " ".join(kept)
    return " ".join(
        token.text.casefold() if len(token.text) > 1 and is_wordy(tokens, index) else token.text
        for index, token in enumerate(tokens)
    )


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
        if words and _is_copula(tokens, index) and _may_introduce(tokens[:index]):
            start = index + 1
    if words > MAX_SENTENCE_WORDS:
        raise UnreadableError("a long sentence")
    if start == 0 and limit < len(tokens):
        start = _skip_nouns(tokens, limit)
    while start < len(tokens) and _is_filler(tokens, start):
        start += 1
    start = _after_receiver(tokens, start, limit)
    return tokens[start:] if start < len(tokens) else tokens


def _is_copula(tokens: Sequence[Token], index: int) -> bool:
    text = tokens[index].text.lower()
    if text in RESULT_VERBS and index + 1 < len(tokens) and tokens[index + 1].text.lower() == "to":
        return True
    return text in COPULAS or (text == "s" and tokens[index - 1].text == "'")


def subject_of(before: Sequence[Token]) -> str:
    """The variable that a sentence's beginning is about: `x` of `x is` and `the value of x equals`; "" for none."""
    end = len(before)
    while end and (_is_copula(before, end - 1) or before[end - 1].text.lower() in FILLERS):
        end -= 1
    name = before[end - 1].text if end else ""
    is_part = end > 1 and before[end - 2].text == "of" and before[max(end - 3, 0)].text.lower() != "value"
    return "" if is_part or (len(name) > 1 and name not in GREEK_LETTERS) else name


def _after_receiver(tokens: Sequence[Token], start: int, limit: int) -> int:
    """Where the one number of `It takes Carla 160 minutes` begins; `start` where the words before it say otherwise."""
    value = limit
    while value > start and tokens[value - 1].kind == "sign" and tokens[value - 1].text in "$-€£":
        value -= 1
    between = range(start, value)
    if limit == len(tokens) or not all(is_wordy(tokens, index) or tokens[index].text in _PHRASING for index in between):
        return start
    words = [tokens[index].text.lower() for index in between]
    if any(map(is_no_noun, words)) or (words and words[-1] in NO_LAST_UNITS - {"lost", "missing"}):
        return start
    is_clause = start > 0 or len(between) > 1
    several = sum(token.kind == "number" for token in tokens) > 1
    return value if is_clause and not several and _may_precede(tokens, value) else start


def _may_precede(tokens: Sequence[Token], value: int) -> bool:
    """Whether the word before the number leaves it what the sentence states."""
    before = tokens[value - 1].text.lower() if value else ""
    if before == "of":
        return value > 2 and tokens[value - 2].text.lower() in QUANTITY_NOUNS
    if before == "for":
        return value + 1 < len(tokens) and _is_measure(tokens[value + 1])
    return before not in PREPOSITIONS and before != ","


def _is_measure(token: Token) -> bool:
    return token.kind in ("word", "text") and token.text.lower() in UNIT_SYNONYMS


def _is_filler(tokens: Sequence[Token], index: int) -> bool:
    text = tokens[index].text.lower()
    if text in QUANTITY_NOUNS and index + 1 < len(tokens) and tokens[index + 1].text == "of":
        return True
    if text == "a":
        following = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if not following or following in ("and", "or") or not is_wordy(tokens, index + 1):
            return False  # the variable
    if text == "to":
        return index > 0 and tokens[index - 1].text.lower() in RESULT_VERBS
    if text == "at":
        return index + 1 < len(tokens) and tokens[index + 1].text == "("
    if text == ",":
        return index > 0 and tokens[index - 1].text.lower() in FILLERS
    return text in FILLERS or text in COPULAS


def _first_number(tokens: Sequence[Token]) -> int:
    """Where the first number or formula stands; the 2 of `f(2)` is no such number."""
    for index, token in enumerate(tokens):
        if token.kind == "number" and index > 1 and tokens[index - 1].text == "(" and tokens[index - 2].text == "f":
            continue
        if token.kind == "number" or token.text in ("frac", "sqrt"):
            return index
    return len(tokens)


def _may_introduce(before: Sequence[Token]) -> bool:
    """Only words, single letters and signs without meaning may stand before `is`."""
    wordless = [token for token in before if token.kind not in ("word", "text", "number")]
    if any(token.kind == "command" and token.text == "{" for token in wordless):
        return False  # the colon of a set
    return all(token.kind == "command" or token.text in _PUNCTUATION | {",", "$", "|", "_"} for token in wordless)


def _skip_nouns(tokens: Sequence[Token], limit: int) -> int:
    """`Answer 5` and `Total: 5` need no verb."""
    start = 0
    while start < limit and (
        tokens[start].text.lower() in ANSWER_NOUNS | FILLERS | {"final", "my", "our", "so"} or tokens[start].text == ":"
    ):
        if tokens[start].text.lower() == "sum" and tokens[start + 1 : start + 2] and tokens[start + 1].text == "of":
            return 0  # of 5 and other numbers
        start += 1
    return start
