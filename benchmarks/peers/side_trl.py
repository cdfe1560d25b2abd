"""TRL's side, by its GRPOTrainer alone: run with the python of an environment that has trl.

python side_trl.py CASE, with CASE as JSON: kind (R, T, S), shape, policy, recorded, settings (microbatch,
gradient_checkpointing, continuous_batching).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from shapes import Shape, prompts_of, reward_of, text_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from worker import Json, Requests, clock, difference, timed

CONTINUOUS_BATCHING = {"page_size": 32, "num_blocks": 64, "max_batch_tokens": 512}
"""The fastest of 64, 96 and 320 blocks at D-short: on a CPU each token's attention goes over the pages of all rows. By
itself it would take half of the machine's memory."""


def config_of(shape: Shape, settings: Json, folder: str) -> GRPOConfig:
    """Dr. GRPO without a reference model, one update a rollout batch."""
    microbatch = min(settings["microbatch"], shape.rows)
    return GRPOConfig(
        output_dir=folder,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        num_iterations=1,
        num_generations=shape.siblings,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=shape.rows // microbatch,
        max_completion_length=shape.max_tokens,
        generation_kwargs={"min_new_tokens": shape.min_tokens} if shape.min_tokens else None,
        use_transformers_continuous_batching=settings["continuous_batching"],
        transformers_continuous_batching_config=CONTINUOUS_BATCHING if settings["continuous_batching"] else None,
        gradient_checkpointing=settings["gradient_checkpointing"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=1_000_000,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer_of(case: Json, shape: Shape, folder: str) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(case["policy"])
    model = AutoModelForCausalLM.from_pretrained(case["policy"], dtype=torch.float32)
    torch.nn.utils.get_total_norm(model.parameters())  # read the weights, which are mapped, before memory counts
    recorded = json.loads(Path(case["recorded"]).read_text()) if case["kind"] == "T" else []

    def reward(completions: list[str], **_: Any) -> list[float]:
        if case["kind"] == "T":
            return [row["reward"] for row in recorded]
        return [reward_of(text) for text in completions]

    def replay(prompts: list[str], trainer: GRPOTrainer) -> Json:
        return {
            "prompt_ids": [row["prompt"] for row in recorded],
            "completion_ids": [row["response"] for row in recorded],
            "logprobs": None,
        }

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(shape, case["settings"], folder),
        train_dataset=Dataset.from_dict({"prompt": [text_of(ids) for ids in prompts_of(shape)]}),
        processing_class=tokenizer,
        rollout_func=replay if case["kind"] == "T" else None,
    )


def serve_rollouts(trainer: GRPOTrainer, requests: Requests) -> None:
    """As the trainer samples: one call for all rows, each prompt as often as it has siblings."""
    trainer.model.train()
    for request in requests:
        shape = Shape(**request["shape"])
        torch.manual_seed(request["seed"])
        trainer.generation_config.max_new_tokens = shape.max_tokens
        trainer.generation_config.min_new_tokens = shape.min_tokens or None
        rows = [ids for ids in prompts_of(shape) for _ in range(shape.siblings)]
        (ids, _), seconds = timed(partial(trainer._generate_single_turn, rows, None, {}, shape.siblings))
        requests.answer({"rollout": seconds, "tokens": sum(map(len, ids))})


class ServedSteps(TrainerCallback):
    """Holds the trainer before each step until one is asked for, and reports on it: rollout, training, loss, norm."""

    def __init__(self, trainer: GRPOTrainer, requests: Requests) -> None:
        self.requests, self.pending = requests, iter(requests)
        self.loss, self.norm, self.tokens = 0.0, 0.0, 0
        self.began: Json = {}
        self.rollout: Json = {}
        sample, compute_loss = trainer._generate_and_score_completions, trainer.compute_loss
        clip = trainer.accelerator.clip_grad_norm_

        def timed_sample(inputs: Any) -> Any:
            batch, self.rollout = timed(lambda: sample(inputs))
            self.tokens = int(batch["completion_mask"].sum())
            return batch

        def summed_loss(*arguments: Any, **options: Any) -> Any:
            loss = compute_loss(*arguments, **options)
            self.loss += loss.item()
            return loss

        def noted_norm(*arguments: Any, **options: Any) -> Any:
            norm = clip(*arguments, **options)
            self.norm = float(norm)
            return norm

        trainer._generate_and_score_completions = timed_sample
        trainer.compute_loss = summed_loss
        trainer.accelerator.clip_grad_norm_ = noted_norm

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if next(self.pending, None) is None:
            raise SystemExit(0)
        self.loss, self.began = 0.0, clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        whole = difference(clock(), self.began)
        self.requests.answer(
            {
                "whole": whole,
                "rollout": self.rollout,
                "train": difference(whole, self.rollout),
                "tokens": self.tokens,
                "loss": self.loss,
                "grad_norm": self.norm,
            }
        )


def main() -> None:
    case, requests = json.loads(sys.argv[1]), Requests()
    torch.set_num_threads(1)
    shape = Shape(**case["shape"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, shape, folder)
        if case["kind"] == "R":
            serve_rollouts(trainer, requests)
        else:
            trainer.add_callback(ServedSteps(trainer, requests))
            trainer.train()


if __name__ == "__main__":
    main()
