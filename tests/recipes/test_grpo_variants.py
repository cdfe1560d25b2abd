"""Every member of GRPO's family: its gradient against one sequence at a time in double precision, from whole logits."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from vowels import VowelTask, fresh

from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Rollout, Score
from veritune.losses import ClipSettings
from veritune.recipes import grpo
from veritune.recipes.config import GRPOConfig
from veritune.recipes.grpo import advantages_of, sample_groups
from veritune.trainer.evaluate import summarize
from veritune.trainer.policy_gradient import batch_backward, score_rollouts
from veritune.trainer.session import Session

SMALL = GRPOConfig(max_tokens=40, rollout_batch_size=8, group_size=4, train_batch_size=8, epochs_per_rollout_batch=2)
REWARDS = [[1.0, 0.1, 0.0, 1.0], [0.1, 0.0, 0.0, 0.1]]
TRUNCATED = (1, 5)
"""Rollouts that were cut off."""


def rollouts_worth(policy, advantages):
    generator = torch.Generator().manual_seed(0)
    size = policy.model.config.vocab_size
    rollouts = []
    for index, advantage in enumerate(advantages):
        ids = torch.randint(0, size, (2 + 3 * index,), generator=generator).tolist()
        logprobs = tuple((-8 * torch.rand(len(ids), generator=generator)).tolist())
        reason = "length" if index in TRUNCATED else "eos"
        completion = Completion((5, 6, 7), tuple(ids), "", logprobs, reason, 0)
        rollouts.append(Rollout(Example("", "", ""), completion, Score(0.0, 1.0, 0.0), advantage))
    return rollouts


def noisy(scores, seed, size):
    generator = torch.Generator().manual_seed(seed)
    return [each + size * torch.randn(each.shape, generator=generator) for each in scores]


# What each variant makes of one response: log-probabilities now, then, of the reference and of the sampler, (length,).


def surrogate(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reinforce(now, then, reference, sampled, advantage):
    return -advantage * now


def no_clip(now, then, reference, sampled, advantage):
    return -advantage * (now - then).exp()


def clip(low, high):
    return lambda now, then, reference, sampled, advantage: surrogate((now - then).exp(), advantage, low, high)


def gspo(now, then, reference, sampled, advantage):
    return surrogate((now - then).mean().exp(), advantage, 0.03, 0.03).expand(len(now))


def cispo(now, then, reference, sampled, advantage):
    return -(now - then).detach().exp().clamp(0.8, 1.4) * advantage * now


def with_kl(now, then, reference, sampled, advantage):
    difference = reference - now
    return clip(0.2, 0.2)(now, then, reference, sampled, advantage) + 0.3 * (difference.exp() - difference - 1)


def corrected(now, then, reference, sampled, advantage):
    return clip(0.2, 0.2)(now, then, reference, sampled, advantage) * (then - sampled).exp().clamp(max=1.5)


def leave_one_out(group):
    return [reward - (sum(group) - reward) / (len(group) - 1) for reward in group]


def over_the_mean(group):
    mean = sum(group) / len(group)
    return [(reward - mean) / (mean + 1e-6) for reward in group]


def over_the_deviation(group):
    mean = sum(group) / len(group)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
    return [(reward - mean) / (deviation + 1e-6) for reward in group]


def above_the_mean(group):
    return [reward - sum(group) / len(group) for reward in group]


VARIANTS = {
    "reinforce_with_baseline": ({"loss_type": "reinforce_with_baseline"}, over_the_deviation, reinforce),
    "no_baseline": ({"loss_type": "no_baseline"}, list, reinforce),
    "dr_grpo": (
        {"loss_type": "grpo_clip", "normalize_by_std": False, "length_normalization": "constant"},
        above_the_mean,
        clip(0.2, 0.2),
    ),
    "no_clip": ({"loss_type": "grpo_no_clip"}, over_the_deviation, no_clip),
    "clip_higher": (
        {"loss_type": "grpo_clip", "loss_settings": ClipSettings(cliprange_high=0.5)},
        over_the_deviation,
        clip(0.2, 0.5),
    ),
    "gspo": ({"loss_type": "gspo", "loss_settings": ClipSettings(cliprange=0.03)}, over_the_deviation, gspo),
    "cispo": ({"loss_type": "cispo", "loss_settings": ClipSettings(cliprange_high=0.4)}, over_the_deviation, cispo),
    "rloo": (
        {"loss_type": "reinforce_with_baseline", "baseline": "leave_one_out", "normalize_by_std": False},
        leave_one_out,
        reinforce,
    ),
    "max_rl": (
        {"loss_type": "reinforce_with_baseline", "baseline": "max_rl", "normalize_by_std": False},
        over_the_mean,
        reinforce,
    ),
    "kl": ({"loss_type": "grpo_clip", "kl_coefficient": 0.3}, over_the_deviation, with_kl),
    "filter_truncated": (
        {"loss_type": "grpo_clip", "filter_truncated": True, "length_normalization": "token"},
        over_the_deviation,
        clip(0.2, 0.2),
    ),
    "importance_correction": (
        {"loss_type": "grpo_clip", "importance_correction": True, "importance_cap": 1.5},
        over_the_deviation,
        corrected,
    ),
}


def loss_by_hand(policy, config, rollouts, term, old, reference):
    model = copy.deepcopy(policy.model).double()
    all_tokens = sum(len(rollout.completion.ids) for rollout in rollouts)
    total = 0
    for index, rollout in enumerate(rollouts):
        if config.filter_truncated and index in TRUNCATED:
            continue
        ids = torch.tensor([[*rollout.completion.prompt_ids, *rollout.completion.ids]])
        now = model(ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        sampled = torch.tensor(rollout.completion.logprobs).double()
        terms = term(now, old[index].double(), reference[index].double(), sampled, rollout.advantage)
        if config.length_normalization == "sequence":
            total = total + terms.sum() / len(terms) / len(rollouts)
        elif config.length_normalization == "constant":
            total = total + terms.sum() / 40 / len(rollouts)
        else:
            total = total + terms.sum() / all_tokens
    total.backward()
    return total.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("microbatch_tokens", [40, 10_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_that_of_the_plain_loop(random_policy, variant, microbatch_tokens):
    changes, worth, term = VARIANTS[variant]
    config = dataclasses.replace(SMALL, microbatch_tokens=microbatch_tokens, **changes)
    advantages = advantages_of(config, torch.tensor(REWARDS)).flatten().tolist()
    by_hand = [value for group in REWARDS for value in worth(group)]
    assert advantages == pytest.approx(by_hand, abs=1e-4)

    policy = fresh(random_policy)
    rollouts = rollouts_worth(policy, advantages)
    now = score_rollouts(config, policy, rollouts)
    old, reference = noisy(now, 1, 0.3), noisy(now, 2, 0.5)
    metrics = batch_backward(config, policy, rollouts, range(8), old, reference if config.kl_coefficient else None)
    loss, expected = loss_by_hand(policy, config, rollouts, term, old, reference)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()]).double()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert (gradient - expected).norm() / expected.norm() < 2e-4


def test_the_variants_are_different_gradients(random_policy):
    """Each of them would fail the other's test: nothing above passes because it does nothing."""
    gradients = {}
    for variant, (changes, _, _) in VARIANTS.items():
        config, policy = dataclasses.replace(SMALL, **changes), fresh(random_policy)
        advantages = advantages_of(config, torch.tensor(REWARDS)).flatten().tolist()
        rollouts = rollouts_worth(policy, advantages)
        now = score_rollouts(config, policy, rollouts)
        reference = noisy(now, 2, 0.5) if config.kl_coefficient else None
        batch_backward(config, policy, rollouts, range(8), noisy(now, 1, 0.3), reference)
        gradients[variant] = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    for (a, first), (b, second) in itertools.combinations(gradients.items(), 2):
        assert (first - second).norm() > 1e-2 * first.norm(), (a, b)


def test_the_mismatch_is_the_k3_estimate_between_engine_and_trainer(random_policy):
    policy = fresh(random_policy)
    rollouts = rollouts_worth(policy, [1.0, -1.0, 0.5, -0.5])
    config = dataclasses.replace(SMALL, loss_type="reinforce_with_baseline")
    metrics = batch_backward(config, policy, rollouts, range(4))
    # The tokens are the engine's, so KL(engine || trainer) is the mean of r - 1 - log r with r = trainer / engine.
    estimates = []
    for rollout, scored in zip(rollouts, score_rollouts(config, policy, rollouts), strict=True):
        for engine, trainer in zip(rollout.completion.logprobs, scored.tolist(), strict=True):
            estimates.append(math.exp(trainer - engine) - 1 - (trainer - engine))
    assert metrics["mismatch_kl"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)
    assert metrics["mismatch_kl"] > 0.1


# --- Dynamic sampling --------------------------------------------------------------------------------------------


class UnequalEngine:
    """Siblings of a problem with an odd number get different rewards, those of the others the same."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts_ids, sampling):
        self.asked.append((len(prompts_ids), sampling.seed))
        return [
            [
                Completion(tuple(ids), (7, 8), "a" if self.odd(ids) and index == 0 else "b", (-1.0, -1.0), "stop", 4)
                for index in range(sampling.n)
            ]
            for ids in prompts_ids
        ]

    def odd(self, ids):
        return int(self.decode(ids).split()[1].rstrip(":")) % 2 == 1


def sampled_groups(policy, tmp_path, monkeypatch, rounds):
    engine = UnequalEngine()
    engine.decode = policy.tokenizer.decode
    monkeypatch.setattr(grpo, "serve_policy", lambda session, version: None)
    config = dataclasses.replace(SMALL, rollout_batch_size=24, train_batch_size=24, resample_rounds=rounds)
    run = RunFolder.create(tmp_path / f"run{rounds}", "", {})
    task = VowelTask()
    groups = sample_groups(Session(config, policy, task, engine, run), 5, task.examples("train"))
    return groups, engine.asked


def is_odd(group):
    return int(group.example.id.rpartition("-")[2]) % 2 == 1


def test_groups_without_variance_are_drawn_again(random_policy, tmp_path, monkeypatch):
    (once, asked_once) = sampled_groups(random_policy, tmp_path, monkeypatch, 0)
    assert [prompts for prompts, _ in asked_once] == [6] and len(once) == 6
    kept = [group for group in once if is_odd(group)]
    assert 0 < len(kept) < 6

    (twice, asked_twice) = sampled_groups(random_policy, tmp_path, monkeypatch, 1)
    # The second round draws what the first lacked; being the last, it keeps whatever it draws.
    assert [prompts for prompts, _ in asked_twice] == [6, 6 - len(kept)] and len(twice) == 6
    assert asked_twice[0] == asked_once[0] and asked_twice[1][1] != asked_once[0][1]
    assert [group.example.id for group in twice[: len(kept)]] == [group.example.id for group in kept]

    (often, asked_often) = sampled_groups(random_policy, tmp_path, monkeypatch, 30)
    assert all(is_odd(group) for group in often) and len(often) == 6
    assert 1 < len(asked_often) < 31
    assert sum(prompts for prompts, _ in asked_often) > 6
    assert summarize(often)["reward"] == pytest.approx(0.25)  # one "a" among four responses
