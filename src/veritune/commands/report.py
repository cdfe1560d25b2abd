"""`veritune report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from veritune.report import write_report


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Settings of `veritune report`."""

    runs: tuple[Path, ...] = field(metadata={"argument": True})
    """The run folders to report on; those that differ in their seed alone are one setting."""
    output: Path | None = None
    """Where report.html and figures/ go; default: the first run folder."""


def report(config: ReportConfig) -> None:
    """Write the report and print where it lies."""
    print(write_report(config.runs, config.output or config.runs[0]))
