"""Rollouts: the native engine beside `model.generate`, on the same prompts, in one run, interleaved.

    python benchmarks/rollout.py [--policy embedded] [--rows 256] [--rounds 5] [--threads 1]

Tokens per CPU-second (kept tokens: those up to the end of a response) of the same greedy sequences and of sampled
ones, the ratio round by round, and each side's peak memory above its imports in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from veritune.core.types import Sampling
from veritune.engines.native.engine import NativeEngine
from veritune.model.policy import Policy, encode_prompts, load_policy
from veritune.tasks.countdown import CountdownTask

STOP = "</answer>"


def prompts_of(policy: Policy, rows: int) -> list[list[int]]:
    task = CountdownTask()
    return encode_prompts(policy, [task.prompt(example) for example in task.examples("validation")[:rows]])


def run_native(policy: Policy, prompts: list[list[int]], *, greedy: bool, max_tokens: int) -> list[list[int]]:
    sampling = Sampling(temperature=0.0 if greedy else 1.0, max_tokens=max_tokens, stop=(STOP,))
    return [list(group[0].ids) for group in NativeEngine(policy).generate(prompts, sampling)]


def run_generate(policy: Policy, prompts: list[list[int]], *, greedy: bool, max_tokens: int) -> list[list[int]]:
    # The stop string is one token of this tokenizer: as an EOS id it costs `generate` nothing to look for.
    (stop,) = policy.encode(STOP)
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = policy.model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        do_sample=not greedy,
        **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        max_new_tokens=max_tokens,
        eos_token_id=[*policy.eos_ids, stop],
        pad_token_id=0,
    )
    ends = {*policy.eos_ids, stop}
    return [_kept(row, ends) for row in output[:, longest:].tolist()]


def _kept(ids: list[int], ends: set[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids


SIDES = {"native": run_native, "generate": run_generate}


def measure(side: str, policy: Policy, prompts: list[list[int]], *, greedy: bool, max_tokens: int) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    sequences = SIDES[side](policy, prompts, greedy=greedy, max_tokens=max_tokens)
    return {
        "sequences": sequences,
        "tokens": sum(map(len, sequences)),
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
    }


def peak_memory(side: str, arguments: argparse.Namespace) -> float:
    """MiB above what imports, policy and prompts take, in a process of its own."""
    command = [sys.executable, __file__, "--peak", side, "--policy", arguments.policy, "--rows", str(arguments.rows)]
    command += ["--max-tokens", str(arguments.max_tokens), "--threads", str(arguments.threads)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def resident(field: str) -> float:
    """MiB that the kernel counts for this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="embedded")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = load_policy(arguments.policy)
    prompts = prompts_of(policy, arguments.rows)
    if arguments.peak:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
        measure(arguments.peak, policy, prompts, greedy=False, max_tokens=arguments.max_tokens)
        print(resident("VmHWM") - before)
        return
    for greedy in (True, False):
        rounds = []
        for number in range(arguments.rounds + 1):
            taken = {
                side: measure(side, policy, prompts, greedy=greedy, max_tokens=arguments.max_tokens) for side in SIDES
            }
            if number:  # the first round is the warm-up
                rounds.append(taken)
        rates = {side: [taken[side]["tokens"] / taken[side]["cpu"] for taken in rounds] for side in SIDES}
        ratios = [native / generate for native, generate in zip(rates["native"], rates["generate"], strict=True)]
        lengths = sorted(map(len, rounds[-1]["native"]["sequences"]))
        print(
            f"{'greedy' if greedy else 'sampled'}: {arguments.rows} rows, length mean {statistics.mean(lengths):.0f}, "
            f"median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        )
        for side, values in rates.items():
            print(f"  {side:9s} {statistics.median(values):8.0f} kept tokens per CPU-second", end="")
            print(f"   ({min(values):.0f} to {max(values):.0f})")
        print(f"  ratio     {statistics.median(ratios):8.2f}   ({min(ratios):.2f} to {max(ratios):.2f})")
        if greedy:
            same = sum(
                a == b
                for a, b in zip(rounds[-1]["native"]["sequences"], rounds[-1]["generate"]["sequences"], strict=True)
            )
            print(f"  token-identical: {same} of {arguments.rows}")
    peaks = {side: peak_memory(side, arguments) for side in SIDES}
    print("peak memory above imports: " + ", ".join(f"{side} {peak:.0f} MiB" for side, peak in peaks.items()))


if __name__ == "__main__":
    main()
