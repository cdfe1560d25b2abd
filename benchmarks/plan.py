"""What `veritune plan` counts beside what happens on this CPU: memory of a few shapes, each in a fresh process.

    python benchmarks/plan.py

Each takes two whole updates on made-up rollouts, and samples as many. Measured are the resident memory between updates
above the imports, where weights and moments are joined by some MiB of libraries; how far the second update's peak rises
above it, less the gradients: activations, and what is alive beside them; and how far the peak of sampling does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
ENVIRONMENT = {
    # Large blocks go back to the system as soon as they are freed, so that resident memory is memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Case:
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    key_value_heads: int = 8
    feed_forward: int = 768
    vocabulary: int = 4096
    dtype: str = "float32"
    microbatch_tokens: int = 1592
    prompt: int = 64
    response: int = 192
    groups: int = 2
    group_size: int = 8
    checkpointing: bool = False


# A group has 64 + 8 * 191 tokens, so that microbatches are full and the second one finds the gradients of the first.
CASES = (
    Case(),
    Case(hidden=128, layers=2, heads=4, key_value_heads=4, feed_forward=384, vocabulary=409),
    Case(hidden=128, layers=8, heads=4, key_value_heads=2, feed_forward=384, vocabulary=409),
    Case(hidden=512, layers=2, key_value_heads=2, feed_forward=1536),
    Case(hidden=512, key_value_heads=2, feed_forward=2048, vocabulary=32000),
    Case(hidden=128, layers=2, heads=4, key_value_heads=4, feed_forward=384, vocabulary=32000),
    Case(microbatch_tokens=1020),
    Case(microbatch_tokens=4 * 1592, groups=8),
    Case(prompt=448, response=64, microbatch_tokens=2 * 952, groups=4),
    Case(dtype="bfloat16"),
    Case(hidden=512, layers=2, key_value_heads=2, feed_forward=2048, vocabulary=32000, dtype="bfloat16"),
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
    """Bytes that stay between updates, and by which an update and sampling rise above them; seconds of an update."""
    import torch
    from transformers import Qwen2ForCausalLM

    from veritune.core.types import Completion, Example, Rollout, Sampling, Score
    from veritune.engines.native.engine import NativeEngine
    from veritune.model.policy import as_policy, checkpoint_activations, load_policy
    from veritune.recipes.config import GRPOConfig
    from veritune.trainer.optimizer import clip_and_step, make_optimizer
    from veritune.trainer.policy_gradient import batch_backward

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
        batch_backward(config, policy, rollouts, range(len(rollouts)))
        clip_and_step(model, optimizer, learning_rate=1e-5, clip_grad_norm=1.0)
        return time.process_time() - began

    update()
    stays = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = update()
    measured = {"resident": stays - imports, "rise": resident_bytes("VmHWM") - stays, "seconds": seconds}

    model.eval()
    prompts = [ids(case.prompt) for _ in range(case.groups)]
    full_length = Sampling(max_tokens=case.response, min_tokens=case.response, n=case.group_size)
    engine = NativeEngine(policy)
    stays = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    engine.generate(prompts, full_length)
    return {**measured, "sampling": resident_bytes("VmHWM") - stays}


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
    from veritune.commands.plan import PlanConfig, make_plan, total

    with tempfile.TemporaryDirectory() as folder:
        qwen_config(case).save_pretrained(folder)
        plan = make_plan(
            PlanConfig(
                policy=folder,
                device="cpu",
                dtype=case.dtype,
                rollout_batch_size=case.groups * case.group_size,
                train_batch_size=case.groups * case.group_size,
                group_size=case.group_size,
                prompt_tokens=case.prompt,
                max_tokens=case.response,
                microbatch_tokens=case.microbatch_tokens,
                activation_checkpointing=case.checkpointing,
            )
        )
    return {
        "resident": plan.resident,
        "rise": total(plan.training) - plan.resident,
        "gradients": plan.training["gradients"][0],
        "sampling": total(plan.sampling),
        "seconds": plan.seconds["training"] + plan.seconds["AdamW"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=int, nargs="*", default=range(len(CASES)), help="places in the list; default: all"
    )
    arguments = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # they count when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    print("MiB planned, measured and their ratio, of what a pass adds, of what sampling adds, and of what stays;")
    print("CPU-seconds of an update, planned (the least) and measured")
    ratios = []
    for case in [CASES[index] for index in arguments.cases]:
        with multiprocessing.get_context("fork").Pool(1) as process:
            measured = process.apply(measure, (case,))
        plan = planned(case)
        added = [each["rise"] - plan["gradients"] for each in (plan, measured)]
        pairs = [added, *([each[name] for each in (plan, measured)] for name in ("sampling", "resident"))]
        ratios.append([mine / real for mine, real in pairs])
        memory = " | ".join(f"{mine / MIB:6.1f} {real / MIB:6.1f} {mine / real:4.2f}" for mine, real in pairs)
        changed = {name: value for name, value in asdict(case).items() if value != getattr(Case(), name)}
        print(f"{memory} | {plan['seconds']:5.2f} {measured['seconds']:5.2f} | {changed}", flush=True)
    for name, column in zip(("what a pass adds", "what sampling adds"), zip(*ratios, strict=True), strict=False):
        print(f"{name}, planned over measured: {min(column):.2f} to {max(column):.2f}")


if __name__ == "__main__":
    main()
