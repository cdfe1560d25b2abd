"""`veritune discover` and `veritune verify`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from veritune.core.config import require
from veritune.discovery.config import DiscoverConfig
from veritune.discovery.evaluate import exit_code, verify_file
from veritune.discovery.loop import discover


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Settings of `veritune verify`."""

    problem: str = field(metadata={"argument": True})
    """The problem's family, with further sizes after a colon where it has them (covering_design:6,5)."""
    file: Path = field(metadata={"argument": True})
    """The candidate: points as JSON, or a .py program that makes them, which runs in the sandbox."""
    dimension: int = 11
    """The problem's size: dimension, side of the grid, marks of the ruler or points of the design."""
    program_seconds: float = 60.0
    """Wall-clock limit of a program."""
    verification_seconds: float = 120.0
    """Wall-clock limit of the verification."""
    verification_memory_mb: int = 4096
    """Memory limit of the verification."""
    unsafe_no_sandbox: bool = False
    """Run a program also where Landlock or seccomp is missing, with the layers that remain."""

    def __post_init__(self) -> None:
        for name in ("program_seconds", "verification_seconds"):
            require(self, name, 0 < getattr(self, name) < float("inf"), "positive and finite")
        require(self, "verification_memory_mb", self.verification_memory_mb >= 1, "at least 1")


def verify(config: VerifyConfig) -> int:
    """Print the metrics of a candidate as JSON; the exit code is 0 only for a valid one."""
    metrics = verify_file(
        config.problem,
        config.file,
        config.dimension,
        program_seconds=config.program_seconds,
        verification_seconds=config.verification_seconds,
        verification_memory_mb=config.verification_memory_mb,
        unsafe_no_sandbox=config.unsafe_no_sandbox,
    )
    print(json.dumps(metrics))
    return exit_code(metrics)


def run_discovery(config: DiscoverConfig) -> None:
    """Follow a discovery, a line for each verdict, and print where it lies."""
    folder = discover(config, notify=lambda line: print(line, file=sys.stderr, flush=True))
    print(folder / "report.md")
