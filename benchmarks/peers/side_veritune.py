"""Veritune's side: rollout, training step and whole step by its own functions.

python side_veritune.py CASE, with CASE as JSON: kind (R, T, S, head, record), shape, policy, recorded.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import Shape, prompts_of, reward_of, text_of
from worker import Requests, timed

from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Pairs, Rollout, Sampling, Score
from veritune.engines.native.engine import NativeEngine
from veritune.model.policy import Policy, load_policy
from veritune.primitives import get_response_log_probs, pad_prompt_and_response
from veritune.recipes.config import GRPOConfig
from veritune.recipes.grpo import grpo_step
from veritune.trainer.optimizer import clip_and_step, make_optimizer
from veritune.trainer.policy_gradient import batch_backward, score_rollouts
from veritune.trainer.session import Session

LEARNING_RATE = 1e-6


@dataclasses.dataclass
class WordsTask:
    """The prompts of a shape, paid by the reward that all sides use."""

    shape: Shape
    name: str = "words"
    stop: tuple[str, ...] = ()

    def examples(self, split: str) -> Sequence[Example]:
        return [Example(str(row), text_of(ids), "") for row, ids in enumerate(prompts_of(self.shape))]

    def prompt(self, example: Example) -> str:
        return example.question

    def rewards(self, pairs: Pairs) -> list[Score]:
        values = [reward_of(response) for response, _ in pairs]
        return [Score(value, value, value) for value in values]


def config_of(shape: Shape, **settings: Any) -> GRPOConfig:
    """Dr. GRPO: rewards less their group's mean, sums over tokens divided by the longest length there can be."""
    return GRPOConfig(
        **{
            "rollout_batch_size": shape.rows,
            "train_batch_size": shape.rows,
            "group_size": shape.siblings,
            "max_tokens": shape.max_tokens,
            "min_tokens": shape.min_tokens,
            "normalize_by_std": False,
            "length_normalization": "constant",
            "learning_rate": LEARNING_RATE,
            **settings,
        }
    )


def optimizer_of(policy: Policy) -> torch.optim.Optimizer:
    betas = (GRPOConfig.adam_beta1, GRPOConfig.adam_beta2)
    return make_optimizer(policy.model, learning_rate=LEARNING_RATE, betas=betas, weight_decay=0)


# --- R: rollouts ---------------------------------------------------------------------------------------------------


def serve_rollouts(policy: Policy, requests: Requests) -> None:
    engine = NativeEngine(policy)
    for request in requests:
        shape = Shape(**request["shape"])
        sampling = Sampling(
            max_tokens=shape.max_tokens, min_tokens=shape.min_tokens, n=shape.siblings, seed=request["seed"]
        )
        groups, seconds = timed(partial(engine.generate, prompts_of(shape), sampling))
        requests.answer({"rollout": seconds, "tokens": sum(len(row.ids) for group in groups for row in group)})


def record(policy: Policy, shape: Shape, path: Path) -> None:
    """Write rollouts with rewards of 0 and 1, both in every group, for all sides to train on."""
    groups = NativeEngine(policy).generate(
        prompts_of(shape), Sampling(max_tokens=shape.max_tokens, min_tokens=shape.min_tokens, n=shape.siblings)
    )
    draw = random.Random(0)
    rows = [
        {"prompt": row.prompt_ids, "response": row.ids, "logprobs": row.logprobs, "reward": reward}
        for group in groups
        for place, row in enumerate(group)
        for reward in [float(place) if place < 2 else float(draw.randrange(2))]
    ]
    path.write_text(json.dumps(rows))


# --- T: training steps ---------------------------------------------------------------------------------------------


def recorded_rollouts(path: Path, shape: Shape, *, share_prompts: bool) -> list[Rollout]:
    """The recorded rollouts; with `share_prompts` off each sibling's prompt begins with another id than the others'."""
    rows = json.loads(path.read_text())
    rollouts = []
    for index, row in enumerate(rows):
        group = rows[index - index % shape.siblings :][: shape.siblings]
        mean = sum(sibling["reward"] for sibling in group) / shape.siblings
        prompt = tuple(row["prompt"])
        if not share_prompts:
            prompt = (4 + index % shape.siblings, *prompt[1:])
        completion = Completion(prompt, tuple(row["response"]), "", tuple(row["logprobs"]), "eos", 0)
        score = Score(row["reward"], row["reward"], row["reward"])
        rollouts.append(Rollout(Example(str(index), "", ""), completion, score, row["reward"] - mean))
    return rollouts


def serve_training(policy: Policy, requests: Requests) -> None:
    """Each request may change settings of the recipe, or set `share_prompts` to false."""
    policy.model.train()
    optimizer = optimizer_of(policy)
    for request in requests:
        requests.answer(trained(policy, optimizer, request))


def trained(policy: Policy, optimizer: torch.optim.Optimizer, request: dict[str, Any]) -> dict[str, Any]:
    """One training step as requested; its rollouts are gone before those of the next are read."""
    settings, shape = dict(request["settings"]), Shape(**request["shape"])
    share_prompts = settings.pop("share_prompts", True)
    rollouts = recorded_rollouts(Path(request["recorded"]), shape, share_prompts=share_prompts)
    config = config_of(shape, **settings)
    loss = clipped_loss(config, policy, rollouts) if request["check"] else None
    norm, seconds = timed(partial(train_once, config, policy, rollouts, optimizer))
    tokens = sum(len(rollout.completion.ids) for rollout in rollouts)
    return {"train": seconds, "tokens": tokens, "loss": loss, "grad_norm": norm}


def train_once(config: GRPOConfig, policy: Policy, rollouts: list[Rollout], optimizer: torch.optim.Optimizer) -> float:
    batch_backward(config, policy, rollouts, range(len(rollouts)))
    return clip_and_step(policy.model, optimizer, learning_rate=config.learning_rate, clip_grad_norm=1.0)


def clipped_loss(config: GRPOConfig, policy: Policy, rollouts: list[Rollout]) -> float:
    """The loss written with probability ratios, which are one: the same gradient, and the number that TRL reports."""
    off_policy = dataclasses.replace(config, loss_type="grpo_clip", epochs_per_rollout_batch=2)
    old = score_rollouts(off_policy, policy, rollouts)
    loss = batch_backward(off_policy, policy, rollouts, range(len(rollouts)), old)["loss"]
    policy.model.zero_grad(set_to_none=True)
    return loss


# --- S: whole steps ------------------------------------------------------------------------------------------------


def serve_steps(policy: Policy, shape: Shape, requests: Requests) -> None:
    config, task = config_of(shape), WordsTask(shape)
    optimizer, examples = optimizer_of(policy), task.examples("train")
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", "", {})
        session = Session(config, policy, task, NativeEngine(policy), run)
        for number, _ in enumerate(requests, start=1):
            row, seconds = timed(partial(grpo_step, session, number, optimizer, examples, None))
            requests.answer({"whole": seconds, "tokens": round(row["length"] * shape.rows)})


# --- The head ------------------------------------------------------------------------------------------------------


def serve_gradients(policy: Policy, shape: Shape, recorded: Path, requests: Requests) -> None:
    """The gradient of the loss, by the recipe or, with `plain`, through the logits of all response positions."""
    rollouts, config = recorded_rollouts(recorded, shape, share_prompts=True), config_of(shape)
    prompts = [rollout.completion.prompt_ids for rollout in rollouts]
    responses = [rollout.completion.ids for rollout in rollouts]

    def plain() -> None:
        batch = pad_prompt_and_response(prompts, responses, pad_token_id=0)
        mask = batch["response_mask"]
        log_probs = get_response_log_probs(policy.model, batch["input_ids"], batch["labels"])["log_probs"]
        advantages = torch.tensor([[rollout.advantage] for rollout in rollouts])
        (-(advantages * log_probs * mask).sum() / (shape.rows * shape.max_tokens)).backward()

    def by_recipe() -> None:
        batch_backward(config, policy, rollouts, range(len(rollouts)))

    for request in requests:
        _, seconds = timed(plain if request["settings"]["plain"] else by_recipe)
        gradients = [parameter.grad for parameter in policy.model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        kept = sum(gradient.nbytes for gradient in gradients) / 2**20
        requests.answer({"train": seconds, "grad_norm": norm, "gradients_mib": kept})
        del gradients  # or they would still be there beside the next request's
        policy.model.zero_grad(set_to_none=True)


def main() -> None:
    case, requests = json.loads(sys.argv[1]), Requests()
    torch.set_num_threads(1)
    policy, shape, recorded = load_policy(case["policy"]), Shape(**case["shape"]), Path(case["recorded"])
    torch.nn.utils.get_total_norm(policy.model.parameters())  # read the weights, which are mapped, before memory counts
    match case["kind"]:
        case "R":
            serve_rollouts(policy, requests)
        case "T":
            serve_training(policy, requests)
        case "S":
            serve_steps(policy, shape, requests)
        case "head":
            serve_gradients(policy, shape, recorded, requests)
        case "record":
            record(policy, shape, recorded)


if __name__ == "__main__":
    main()
