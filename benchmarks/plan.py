"""What `veritune plan` counts beside what training takes on this CPU: memory of a few shapes, each in a fresh process.

    python benchmarks/plan.py

Each row takes two whole updates on made-up rollouts. Measured are the process's resident memory between updates
above its imports (weights and moments), and how far the second update's peak rises above it (gradients, activations
and what is alive beside them); of the latter, what is no gradient is compared with the plan's activations.
"""

from __future__ import annotations

import argparse
import json
import os

# Before torch is imported: one thread, on cores that others may use.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    key_value_heads: int = 8
    feed_forward: int = 768
    vocabulary: int = 4096
    dtype: str = "float32"
    microbatch_tokens: int = 4096
    prompt: int = 64
    response: int = 192
    groups: int = 4
    group_size: int = 8
    checkpointing: bool = False


CASES = (
    Case(),
    Case(hidden=128, layers=2, heads=4, key_value_heads=4, feed_forward=384, vocabulary=409),
    Case(hidden=128, layers=8, heads=4, key_value_heads=2, feed_forward=384, vocabulary=409),
    Case(hidden=512, layers=2, heads=8, key_value_heads=2, feed_forward=1536),
    Case(
        hidden=512, layers=4, key_value_heads=2, feed_forward=2048, vocabulary=32000, microbatch_tokens=2048, groups=2
    ),
    Case(hidden=128, layers=2, heads=4, key_value_heads=4, feed_forward=384, vocabulary=32000),
    Case(microbatch_tokens=1024, groups=2),
    Case(microbatch_tokens=12800, groups=16),
    Case(prompt=16, response=496),
    Case(prompt=448, response=64, groups=8),
    Case(dtype="bfloat16"),
    Case(hidden=512, key_value_heads=2, feed_forward=2048, vocabulary=32000, dtype="bfloat16", microbatch_tokens=2048),
    Case(layers=8, checkpointing=True),
    Case(hidden=128, layers=8, heads=4, key_value_heads=4, feed_forward=384, vocabulary=32000, checkpointing=True),
)


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM, its peak since it was last cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def measure(case: Case) -> dict[str, float]:
    """Bytes that stay between updates, and by which an update rises above them; seconds of an update."""
    import torch
    from transformers import Qwen2ForCausalLM

    from veritune.policies import as_policy, checkpoint_activations, load_policy
    from veritune.recipes.grpo import GRPOConfig, accumulate_gradient
    from veritune.training import clip_and_step, make_optimizer
    from veritune.types import Completion, Example, Rollout, Score

    torch.set_num_threads(1)
    tokenizer = load_policy("embedded").tokenizer
    generator = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(1, case.vocabulary) for _ in range(count))

    rollouts = []
    for group in range(case.groups):
        prompt, example = ids(case.prompt), Example(str(group), "", "")
        for sibling in range(case.group_size):
            completion = Completion(prompt, ids(case.response), "", (-1.0,) * case.response, "length", 0)
            rollouts.append(Rollout(example, completion, Score(0.0, 0.0, 0.0, None, "", 0.0), 1.0 - 2 * (sibling % 2)))
    config = GRPOConfig(
        microbatch_tokens=case.microbatch_tokens,
        max_tokens=case.response,
        group_size=case.group_size,
        rollout_batch_size=len(rollouts),
        train_batch_size=len(rollouts),
    )
    imports = resident_bytes("VmRSS")
    model = Qwen2ForCausalLM(qwen_config(case)).to(getattr(torch, case.dtype))
    policy = as_policy(model, tokenizer)
    if case.checkpointing:
        checkpoint_activations(model)
    optimizer = make_optimizer(model, learning_rate=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()

    def update() -> float:
        began = time.process_time()
        accumulate_gradient(config, policy, rollouts, range(len(rollouts)))
        clip_and_step(model, optimizer, learning_rate=1e-5, clip_grad_norm=1.0)
        return time.process_time() - began

    update()
    stays = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = update()
    return {"resident": stays - imports, "rise": resident_bytes("VmHWM") - stays, "seconds": seconds}


def qwen_config(case: Case) -> Any:
    """The case's model. transformers is imported only where it is needed, so that its memory is in the imports'."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.feed_forward,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def planned(case: Case) -> dict[str, float]:
    from veritune.plan import PlanConfig, make_plan

    with tempfile.TemporaryDirectory() as folder:
        qwen_config(case).save_pretrained(folder)
        plan = make_plan(
            PlanConfig(
                model=folder,
                device="cpu",
                dtype=case.dtype,
                rollout_batch_size=case.groups * case.group_size,
                group_size=case.group_size,
                prompt_tokens=case.prompt,
                max_tokens=case.response,
                microbatch_tokens=case.microbatch_tokens,
                activation_checkpointing=case.checkpointing,
            )
        )
    memory = plan.training
    return {
        "resident": memory.resident,
        "rise": memory.peak - memory.resident,
        "gradients": memory.gradients,
        "seconds": plan.seconds.train + plan.seconds.update,
    }


def in_fresh_process(case: Case) -> dict[str, float]:
    # Large blocks go back to the system as soon as they are freed, so that resident memory is memory in use.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(Case(**json.loads(arguments.one)))))
        return
    print("MiB: weights and moments | activations and working space | CPU-seconds; planned, measured, ratio")
    ratios = []
    for case in CASES:
        plan, measured = planned(case), in_fresh_process(case)
        ratio = (plan["rise"] - plan["gradients"]) / (measured["rise"] - plan["gradients"])
        ratios.append(ratio)
        changed = {name: value for name, value in asdict(case).items() if value != getattr(CASES[0], name)}
        print(
            f"{plan['resident'] / MIB:7.1f} {measured['resident'] / MIB:7.1f} | "
            f"{(plan['rise'] - plan['gradients']) / MIB:7.1f} {(measured['rise'] - plan['gradients']) / MIB:7.1f} "
            f"{ratio:5.2f} | {plan['seconds']:6.2f} {measured['seconds']:6.2f}  "
            f"{measured['seconds'] / plan['seconds']:4.1f}×  {changed}",
            flush=True,
        )
    print(f"activations and working space, planned over measured: {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
