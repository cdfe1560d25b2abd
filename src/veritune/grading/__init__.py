"""Text -> Score: extraction, mathematical equivalence, time-limited workers. No torch; usable on its own."""

from veritune.grading.arithmetic import evaluate_arithmetic

__all__ = ["evaluate_arithmetic"]
