"""Clock times, dates and ratios: forms in which digits are no arithmetic (`2020-03-05` is not 2012)."""

from __future__ import annotations

import re
from typing import NamedTuple

from veritune.grading.math.vocabulary import MONTHS

_CLOCK = re.compile(
    r"(?:at )?(?P<hour>[0-9]{1,2})(?:(?::|\.(?=[0-9]{2}\s*[apAP]))(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?)?"
    r"\s*(?P<half>[aApP]\.?\s?[mM]\.?|o'?\s?clock|noon)?(?:\s+in the (?P<part>morning|afternoon|evening))?"
)
_MONTH_FIRST = re.compile(r"([A-Za-z]{3,9})\.?\s+([0-9]{1,2})(?:st|nd|rd|th)?(?:\s*,?\s+([0-9]{4}))?")
_DAY_FIRST = re.compile(
    r"(?:the\s+)?([0-9]{1,2})(?:st|nd|rd|th)?\s+(?:of\s+)?([A-Za-z]{3,9})\.?(?:\s*,?\s+([0-9]{4}))?"
)
_NUMERIC_DATE = re.compile(r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})")
_SLASHED_DATE = re.compile(r"([0-9]{1,2})[-/]([0-9]{1,2})[-/]([0-9]{4})")
_WEEKDAY = re.compile(r"(?:mon|tues|wednes|thurs|fri|satur|sun)day\s*,?\s+", re.IGNORECASE)
_RATIO = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:\s*:\s*-?[0-9]+(?:\.[0-9]+)?)+")
_RATIO_IN_WORDS = re.compile(r"([0-9]+)\s+to\s+([0-9]+)")
_TEXT_GROUP = re.compile(r"\\(?:text|mathrm|textbf|textit|textrm|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"(?:\s|~|\\[\s,;:!])+")


class Clock(NamedTuple):
    """A time of day; `half` is "am", "pm" or "" where the text does not say."""

    hour: int
    minute: int
    second: int
    half: str


class Date(NamedTuple):
    """A date; None for a year that the text does not say."""

    year: int | None
    month: int
    day: int


def without_markup(text: str) -> str:
    """`3\\text{:}30 \\text{ p.m.}` as `3:30 p.m.`"""
    if "\\" in text:
        text = _TEXT_GROUP.sub(r" \1 ", text).replace("\\colon", ":")
    text = text.replace("{:}", ":")
    return _SPACING.sub(" ", text).replace(" :", ":").replace(": ", ":").strip()


def read_clock(text: str) -> Clock | None:
    """The time that the whole of `text` states, or None."""
    match = _CLOCK.fullmatch(text)
    if match is None or not (match["minute"] or match["half"] or match["part"]):
        return None
    hour, minute, second = int(match["hour"]), int(match["minute"] or 0), int(match["second"] or 0)
    half = (match["half"] or "").lower().replace(".", "").replace(" ", "")
    if match["part"]:
        half = "am" if match["part"] == "morning" else "pm"
    if hour > 24 or minute > 59 or second > 59:
        return None
    return Clock(hour, minute, second, half if half in ("am", "pm") else "")


def same_clock(first: Clock, second: Clock) -> bool:
    """Whether two times agree; a missing a.m. or p.m. is like a missing unit."""
    if first[1:3] != second[1:3]:
        return False
    if bool(first.half) == bool(second.half):
        return (
            (first.hour % 12, first.half) == (second.hour % 12, second.half)
            if first.half
            else first.hour == second.hour
        )
    marked, bare = (first, second) if first.half else (second, first)
    return bare.hour in (marked.hour, marked.hour % 12 + (12 if marked.half == "pm" else 0))


def read_date(text: str) -> Date | None:
    """The date that the whole of `text` states, or None. `03/05/2020` is read as month, day, year."""
    text = _WEEKDAY.sub("", text, count=1)
    if match := _NUMERIC_DATE.fullmatch(text):
        return _date(match[1], int(match[2]), match[3])
    if match := _SLASHED_DATE.fullmatch(text):
        return _date(match[3], int(match[1]), match[2])
    if match := _MONTH_FIRST.fullmatch(text):
        return _date(match[3], MONTHS.get(match[1].lower(), 0), match[2])
    if match := _DAY_FIRST.fullmatch(text):
        return _date(match[3], MONTHS.get(match[2].lower(), 0), match[1])
    return None


def _date(year: str | None, month: int, day: str) -> Date | None:
    if not (1 <= month <= 12 and 1 <= int(day) <= 31):
        return None
    return Date(int(year) if year else None, month, int(day))


def read_ratio(text: str) -> tuple[str, ...] | None:
    """The terms of a ratio such as `3:2` or `3 to 2`, or None."""
    if _RATIO.fullmatch(text):
        return tuple(term.strip() for term in text.split(":"))
    match = _RATIO_IN_WORDS.fullmatch(text)
    return (match[1], match[2]) if match else None
