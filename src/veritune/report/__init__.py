"""Reports from run folders: one self-contained HTML page and PNG figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write `output`/report.html and `output`/figures/*.png from run folders alone; returns report.html's path.

    Runs that differ in their seed alone are reported as one setting. Raises ConfigError where a folder is no run,
    DataError where one cannot be read, CheckpointError where `output` cannot be written.
    """
    # Drawing needs matplotlib, which is slow to import: whoever imports this package has not asked for a report yet.
    from veritune.report.page import write_page

    return write_page(runs, output)


__all__ = ["write_report"]
