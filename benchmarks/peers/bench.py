"""Where the benchmarks' processes are started, asked and written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shapes import Shape

HERE = Path(__file__).parent
THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One column of a comparison: a program, and what its case and its requests say beyond the shape."""

    label: str
    program: str
    python: str
    settings: Json = field(default_factory=dict)
    request: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where things lie, and how often everything is run."""

    output: Path
    rounds: int
    trl_python: str | None
    vllm_python: str | None

    @property
    def policy(self) -> Path:
        return self.output / "policy"

    def recorded(self, shape: Shape) -> Path:
        return self.output / f"rollouts-{shape.name}.json"

    def veritune(self, label: str = "veritune", **request: Any) -> Side:
        return Side(label, "side_veritune.py", sys.executable, request=request)

    def trl(self, label: str, **settings: Any) -> list[Side]:
        defaults = {"microbatch": 32, "gradient_checkpointing": False, "continuous_batching": False}
        return [Side(label, "side_trl.py", self.trl_python, defaults | settings)] if self.trl_python else []

    def vllm(self) -> list[Side]:
        return [Side("vLLM", "side_vllm.py", self.vllm_python)] if self.vllm_python else []


# --- Workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """A side's process, ready for requests."""

    bench: Bench
    kind: str
    side: Side
    process: subprocess.Popen[str]

    def run(self, shape: Shape, number: int) -> Json:
        """Have the side run once; its answer, which is also written down. Round 0 is the warm-up."""
        side, folder = self.side, self.bench.output
        request = {
            "shape": asdict(shape),
            "recorded": str(self.bench.recorded(shape)),
            "seed": number,
            "check": number == 0 and self.kind == "T",
            "settings": side.request,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        row = {"kind": self.kind, "shape": shape.name, "side": side.label, "round": number, **side.settings, **answer}
        name = ".".join([self.kind, shape.name, side.label, str(number)]).replace(" ", "_").replace(",", "")
        (folder / f"{name}.json").write_text(json.dumps(row) + "\n")
        seconds = " ".join(f"{part} {row[part]['cpu']:.2f}" for part in ("rollout", "train", "whole") if part in row)
        print(f"  {self.kind} {shape.name:20s} {side.label:38s} round {number}: CPU-seconds {seconds}", flush=True)
        return row

    def answer(self) -> Json:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.side.label} ended without an answer; see {self.bench.output / 'stderr.log'}")
        return json.loads(line)


@contextmanager
def worker(
    bench: Bench, kind: str, shape: Shape, side: Side, *, policy: Path | None = None, written_as: str | None = None
) -> Iterator[Worker]:
    """Start a side for `kind`; what it needs of a shape beforehand, such as a trainer, it makes for this one."""
    case = {
        "kind": kind,
        "shape": asdict(shape),
        "policy": str(policy or bench.policy),
        "recorded": str(bench.recorded(shape)),
        "settings": side.settings,
    }
    with (bench.output / "stderr.log").open("a") as log:
        process = subprocess.Popen(
            [side.python, str(HERE / side.program), json.dumps(case)],
            env=os.environ | THREADS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        started = Worker(bench, written_as or kind, side, process)
        started.answer()
        yield started
    finally:
        process.communicate()  # the end of its requests ends it


def run_alone(bench: Bench, program: str, *arguments: str) -> None:
    """A program of ours that ends by itself, on one thread."""
    command = [sys.executable, str(HERE / program), *arguments]
    with (bench.output / "stderr.log").open("a") as log:
        subprocess.run(command, env=os.environ | THREADS, check=True, stderr=log)
