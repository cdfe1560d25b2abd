"""How large an answer may be before it is refused unread, and the error that says so.

Every cap is far above what a person writes and far below what a machine would notice: with them the tokenizer, the
parser and the evaluators take linear time in bounded text, so no answer can hang a grader.
"""

from __future__ import annotations

MAX_CHARACTERS = 2_000
"""Longer answers are compared as strings only."""
MAX_TOKENS = 1_200
MAX_DEPTH = 40
"""Nesting of brackets, braces, exponents, chained fractions."""
MAX_BITS = 8_192
"""Size of a numerator or denominator that is computed exactly; larger powers are compared modulo primes."""
MAX_FACTORIAL = 600
MAX_NUMBER_CHARACTERS = 2_000
"""Below Python's own limit (4,300 digits) for reading an integer."""


class UnreadableError(Exception):
    """The text is not mathematics that this package reads, or is larger than its caps. Never leaves the package."""
