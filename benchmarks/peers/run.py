"""Veritune beside its peers and the counted limit: rollouts (R), training steps (T), whole steps (S), and growth.

    python benchmarks/peers/run.py [--only R T S limits growth] [--shapes A D-short] [--rounds 5] [--output FOLDER]

Every side is a process of one thread; sides are run in turns, after a warm-up that is not counted. Each run leaves a
JSON file in the output folder, and the tables of ratios are printed at the end; `tables.py FOLDER` prints them again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from bench import Bench, Json, Side, Worker, run_alone, worker
from growth import measure_growth
from shapes import POLICY, SHAPES, Shape
from tables import print_tables

MICROBATCHES = (8, 16, 32)
"""Rows of TRL's microbatches, tried in the warm-up."""
FULL_PASS = {"skip_zero_advantages": False, "share_prompts": False}


def in_turns(workers: list[Worker], shape: Shape, first: int, last: int) -> None:
    for number in range(first, last + 1):
        for each in workers:
            each.run(shape, number)


def compare_rollouts(bench: Bench, shapes: list[Shape]) -> None:
    """R: one process a side for all shapes; the prompts alone are those shapes with one token a response."""
    sides = [bench.veritune(), *bench.trl("TRL generate"), *bench.vllm()]
    prefills = [replace(each, name=f"{each.name} prefill", max_tokens=1, min_tokens=1) for each in shapes]
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(bench, "R", shapes[0], side)) for side in sides]
        paged = [stack.enter_context(worker(bench, "R", shapes[0], side)) for side in continuous_batching(bench, 32)]
        for shape in (*shapes, *prefills):
            in_turns(workers if shape.min_tokens else workers + paged, shape, 0, bench.rounds)


def continuous_batching(bench: Bench, microbatch: int) -> list[Side]:
    """It knows no `min_new_tokens`, so it is compared at natural lengths alone."""
    return bench.trl("TRL continuous batching", microbatch=microbatch, continuous_batching=True)


def compare_training(bench: Bench, shape: Shape) -> int:
    """T: the warm-up finds TRL's best microbatch, and that all sides have one loss and one gradient's norm."""
    with ExitStack() as stack:

        def start(side: Side) -> Worker:
            return stack.enter_context(worker(bench, "T", shape, side))

        ours = start(bench.veritune())
        expected = ours.run(shape, 0)
        candidates = []
        for side in trl_settings(bench, checkpointing=shape.name == "D-short"):
            candidate = start(side)
            row = candidate.run(shape, 0)
            require_equal(row, expected)
            candidates.append((row["train"]["cpu"], candidate))
        workers = [ours]
        if shape.name == "D-short":
            unskipped = start(bench.veritune("veritune, nothing skipped", skip_zero_advantages=False))
            without = bench.veritune("veritune, nothing skipped or shared", **FULL_PASS)
            workers += [unskipped, replace(unskipped, side=without)]
        microbatch = 0
        if candidates:
            _, best = min(candidates, key=lambda candidate: candidate[0])
            workers.append(replace(best, side=replace(best.side, label="TRL")))
            microbatch = best.side.settings["microbatch"]
        in_turns(workers, shape, 1, bench.rounds)
        return microbatch


def trl_settings(bench: Bench, *, checkpointing: bool) -> list[Side]:
    """What TRL can be told that changes its time and its memory: the fastest is the one to compare with."""
    sides = [bench.trl(f"TRL, {rows} rows a microbatch", microbatch=rows) for rows in MICROBATCHES]
    if checkpointing:
        label = f"TRL, {MICROBATCHES[-1]} rows, checkpointing"
        sides.append(bench.trl(label, microbatch=MICROBATCHES[-1], gradient_checkpointing=True))
    return [side for found in sides for side in found]


def require_equal(row: Json, expected: Json) -> None:
    """Both sides must train on the same loss before their times mean anything."""
    loss = abs(row["loss"] - expected["loss"])
    norm = abs(row["grad_norm"] / expected["grad_norm"] - 1)
    if loss > 1e-6 or norm > 1e-5:
        raise SystemExit(f"T {row['shape']}: {row['side']} differs: loss by {loss:.1e}, gradient norm by {norm:.1e}")


def compare_steps(bench: Bench, shape: Shape, microbatch: int) -> None:
    """S: a process for each side and shape, whose peak memory is that of the step."""
    with ExitStack() as stack:
        sides = [bench.veritune(), *bench.trl("TRL", microbatch=microbatch)]
        in_turns([stack.enter_context(worker(bench, "S", shape, side)) for side in sides], shape, 0, bench.rounds)
    for side in continuous_batching(bench, microbatch) if shape.name == "D-short" else ():
        with worker(bench, "S", shape, side) as paged:
            in_turns([paged], shape, 0, bench.rounds // 2)


def run_parts(bench: Bench, parts: list[str], shapes: list[Shape]) -> None:
    for part in parts:
        for kind in ("growth", "head") if part == "growth" else (part,):
            for old in bench.output.glob(f"{kind}*.json"):
                shape = old.name.split(".")[1].removesuffix("_prefill")
                if part in ("limits", "growth") or shape in {shape.name for shape in shapes}:
                    old.unlink()
    for shape in shapes if {"limits", "T", "S"} & set(parts) else ():
        if not bench.recorded(shape).exists():  # sampled once; all sides train on them
            case = {"kind": "record", "shape": asdict(shape), "policy": str(bench.policy)}
            run_alone(bench, "side_veritune.py", json.dumps(case | {"recorded": str(bench.recorded(shape))}))
    if "limits" in parts:
        run_alone(bench, "limits.py", str(bench.output))
    best: dict[str, int] = {}
    if "T" in parts:
        best = {shape.name: compare_training(bench, shape) for shape in shapes if shape.name != "B-short"}
    if "R" in parts:
        compare_rollouts(bench, [shape for shape in shapes if shape.name != "B-short"])
    if "S" in parts:
        for shape in shapes:
            compare_steps(bench, shape, best.get(shape.name) or best.get("D-short") or MICROBATCHES[0])
    if "growth" in parts:
        measure_growth(bench)


def present(python: Path, module: str, target: str) -> str | None:
    """The python of a peer's environment; says so where it is missing."""
    find = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({module!r}) is None)"
    if python.exists() and subprocess.run([python, "-c", find], check=False).returncode == 0:
        return str(python)
    print(f"no {module} in {python}: its columns are left out; `make {target}` makes that environment")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["limits", "T", "R", "S", "growth"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/bench-peers"))
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-peers/bin/python"))
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        arguments.output,
        arguments.rounds,
        present(arguments.trl_python, "trl", "bench-peers"),
        present(arguments.vllm_python, "vllm", "bench-peers"),
    )
    if not bench.policy.exists():
        run_alone(bench, "policy.py", str(bench.policy), json.dumps(POLICY))
    run_parts(bench, arguments.only, [SHAPES[name] for name in arguments.shapes])
    print_tables(bench.output)


if __name__ == "__main__":
    main()
