"""The training step: token-budget microbatches beside a padded fixed-size microbatch loop, on recorded rollouts.

    python benchmarks/train_step.py [--policy embedded] [--rounds 5] [--threads 1]

Both sides take the gradient of the same GRPO loss over the same 256 rollouts; first their gradients are compared,
and those of several cuts among each other. Then tokens per CPU-second, interleaved, and the ratio round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from veritune.core.types import Rollout, Sampling
from veritune.engines.native.engine import NativeEngine
from veritune.losses import group_advantages
from veritune.model.policy import Policy, encode_prompts, load_policy
from veritune.primitives import get_response_log_probs, grpo_microbatch_train_step, pad_prompt_and_response
from veritune.recipes.config import GRPOConfig
from veritune.tasks.countdown import CountdownTask
from veritune.trainer.policy_gradient import batch_backward


def record_rollouts(policy: Policy) -> list[Rollout]:
    task = CountdownTask()
    examples = task.examples("train")[:32]
    prompts = encode_prompts(policy, map(task.prompt, examples))
    groups = NativeEngine(policy).generate(prompts, Sampling(max_tokens=256, stop=task.stop, n=8))
    scores = [
        task.rewards([(completion.text, example.ground_truth) for completion in group])
        for example, group in zip(examples, groups, strict=True)
    ]
    rewards = torch.tensor([[score.reward for score in group] for group in scores])
    advantages = group_advantages(rewards, 1e-6, normalize_by_std=True).tolist()
    return [
        Rollout(example, *row)
        for example, *group in zip(examples, groups, scores, advantages, strict=True)
        for row in zip(*group, strict=True)
    ]


def padded_step(policy: Policy, rollouts: list[Rollout], microbatch_size: int) -> None:
    """What a plain loop does: rows as they come, padded to the longest of all, whole logits."""
    batch = pad_prompt_and_response(
        [rollout.completion.prompt_ids for rollout in rollouts], [rollout.completion.ids for rollout in rollouts], 0
    )
    input_ids, labels, mask = batch["input_ids"], batch["labels"], batch["response_mask"]
    advantages = torch.tensor([[rollout.advantage] for rollout in rollouts])
    for start in range(0, len(rollouts), microbatch_size):
        part = slice(start, start + microbatch_size)
        scores = get_response_log_probs(policy.model, input_ids[part], labels[part], return_token_entropy=True)
        grpo_microbatch_train_step(
            scores["log_probs"],
            mask[part],
            len(rollouts) // microbatch_size,
            "reinforce_with_baseline",
            advantages=advantages[part],
        )


def gradient(policy: Policy) -> Tensor:
    flat = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()]).double()
    policy.model.zero_grad(set_to_none=True)
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="embedded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--microbatch-size", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = load_policy(arguments.policy)
    rollouts = record_rollouts(policy)
    lengths = sorted(len(rollout.completion.ids) for rollout in rollouts)
    tokens = sum(len(rollout.completion.prompt_ids) for rollout in rollouts) + sum(lengths)
    print(f"256 rollouts, {tokens} tokens, responses mean {statistics.mean(lengths):.0f}, longest {lengths[-1]}")
    kept = sum(rollout.advantage != 0 for rollout in rollouts)
    print(f"{kept} of them have an advantage")

    def ours(microbatch_tokens: int = GRPOConfig.microbatch_tokens, skip: bool = True) -> None:
        config = GRPOConfig(microbatch_tokens=microbatch_tokens, skip_zero_advantages=skip)
        batch_backward(config, policy, rollouts, range(len(rollouts)), None)

    sides = {
        "token budget, zero advantages skipped": ours,
        "token budget, nothing skipped": lambda: ours(skip=False),
        f"padded, {arguments.microbatch_size} rows a microbatch": lambda: padded_step(
            policy, rollouts, arguments.microbatch_size
        ),
    }
    ours()
    reference = gradient(policy)
    for cut in (512, 2048, 1 << 30):
        ours(cut)
        change = ((gradient(policy) - reference).norm() / reference.norm()).item()
        print(f"gradient of a cut at {cut} tokens against {GRPOConfig.microbatch_tokens}: {change:.1e} relative")
    for name, step in sides.items():
        step()
        change = ((gradient(policy) - reference).norm() / reference.norm()).item()
        print(f"gradient of '{name}': {change:.1e} relative")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, step in sides.items():
            began = time.process_time()
            step()
            rates[name].append(tokens / (time.process_time() - began))
            policy.model.zero_grad(set_to_none=True)
    *_, padded = rates.values()
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, padded, strict=True))
        print(f"{statistics.median(values):8.0f} tokens per CPU-second  {ratio:5.2f}x  {name}")


if __name__ == "__main__":
    main()
