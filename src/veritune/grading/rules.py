"""What counts as the same answer where mathematics alone does not say: one named switch per question."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradingPolicy:
    """The judge's switches; docs/grading.md gives the reasons for each default."""

    ignore_missing_units: bool = True
    """A unit, currency sign or degree sign that only one side has does not matter; two different units always do."""
    percent_is_hundredths: bool = True
    """`50%` matches `0.5` and `\\frac12`; `50%` against `50` follows `ignore_missing_units`."""
    unreduced_fractions: bool = True
    """`\\frac{2}{4}` matches `\\frac12`."""
    unevaluated_expressions: bool = False
    """`2+2` and `2^{10}` match the plain numbers `4` and `1024`."""
    sentences: bool = True
    """A short sentence that states one value is that value."""
    multiple_choice: bool = True
    """`(B) 42`, `option B` and `b` match the letter `B`."""


DEFAULT_POLICY = GradingPolicy()
