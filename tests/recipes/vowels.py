"""What the tests of every recipe share: a task that a random policy is paid by, and a run that can be killed."""

import copy
import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from veritune.core.run_folder import RunFolder
from veritune.core.types import Example, Score
from veritune.engines.native.engine import NativeEngine
from veritune.model.policy import load_policy
from veritune.trainer.session import Session

VOLATILE = ("seconds", "per_second")


class VowelTask:
    """Pays the share of vowels in a response: a reward that a random policy gets in different amounts."""

    name = "vowels"
    stop = ("z",)

    def examples(self, split):
        return [Example(f"{split}-{index}", f"{split} {index}: ", "aeiou") for index in range(12)]

    def prompt(self, example):
        return example.question

    def rewards(self, pairs):
        return [self.reward(*pair) for pair in pairs]

    def reward(self, response_text, ground_truth):
        share = sum(response_text.count(vowel) for vowel in ground_truth) / max(len(response_text), 1)
        return Score(reward=share, format_reward=1.0, answer_reward=float(share > 0.2))


def fresh(policy):
    return dataclasses.replace(policy, model=copy.deepcopy(policy.model))


def follow(recipe, config, policy, folder, checkpoint=None, listen=lambda row: None, task=None):
    """Run a recipe to its end, with the global generator in some state: nothing may depend on it."""
    torch.manual_seed(12345)
    recipe.run(Session(config, policy, task or VowelTask(), NativeEngine(policy), folder, checkpoint, listen))


def steady(rows):
    """Rows of metrics without what no two runs share."""
    return [{k: v for k, v in row.items() if not any(mark in k for mark in VOLATILE)} for row in rows]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


class Killed(BaseException):
    """Nothing catches it."""


def assert_resumed_is_uninterrupted(recipe, config, policy, tmp_path, *, kill_at, resume_from, steps):
    """A run that is killed at step `kill_at`, and resumed, has the rows and weights of one that nobody killed."""
    whole = RunFolder.create(tmp_path / "whole", "", {})
    follow(recipe, config, fresh(policy), whole)
    assert [row["step"] for row in whole.metrics()] == list(range(steps + 1))

    def kill(row):
        if row["step"] == kill_at:
            raise Killed

    part = RunFolder.create(tmp_path / "part", "", {})
    with pytest.raises(Killed):
        follow(recipe, config, fresh(policy), part, listen=kill)
    checkpoint = part.latest_checkpoint(pytest.fail)
    assert checkpoint.step == resume_from
    part.forget_after(checkpoint.step)
    follow(recipe, config, load_policy(str(checkpoint.folder)), part, checkpoint)

    assert steady(part.metrics()) == steady(whole.metrics())
    ours, theirs = weights(part.path, steps), weights(whole.path, steps)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    initial = dict(policy.model.named_parameters())
    assert any(not torch.equal(ours[name], initial[name]) for name in ours)
    return whole


def supervised_steps_by_hand(policy, batches, learning_rate, clip=1.0):
    """The model after a plain AdamW step (betas 0.9, 0.95) on each batch of (prompt ids, response ids), and the losses.

    The loss is the mean negative log-likelihood over the batch's response tokens, one sequence at a time.
    """
    model = copy.deepcopy(policy.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = 0
        for prompt, response in batch:
            log_probs = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
            for place, token in enumerate(response):
                loss = loss - log_probs[len(prompt) - 1 + place, token]
        loss = loss / sum(len(response) for _, response in batch)
        loss.backward()
        norm = math.sqrt(sum(float(parameter.grad.pow(2).sum()) for parameter in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, clip / norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_same_weights(tensors, model, initial, tolerance=2e-2):
    """The saved weights moved as the model's did: the difference is small beside the movement."""
    moved = apart = 0.0
    for name, parameter in model.named_parameters():
        if name in tensors:
            start = dict(initial.named_parameters())[name].detach()
            moved += float((parameter.detach() - start).pow(2).sum())
            apart += float((tensors[name] - parameter.detach()).pow(2).sum())
    assert moved > 0
    assert math.sqrt(apart / moved) < tolerance
