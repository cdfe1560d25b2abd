"""Losses from outside against numbers by hand, and what is refused of them."""

import copy
import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from veritune import losses
from veritune.core.config import from_mapping, require
from veritune.core.errors import ConfigError, TrainingError
from veritune.core.types import Completion, Example, Rollout, Score
from veritune.losses import Loss
from veritune.recipes.config import GRPOConfig
from veritune.trainer.policy_gradient import batch_backward, score_rollouts

SOURCE = Path(losses.__file__).parent
SMALL = {"rollout_batch_size": 4, "train_batch_size": 4, "group_size": 2, "max_tokens": 12, "microbatch_tokens": 20}
ADVANTAGES = [1.5, -0.5, 0.25, -1.0]


@dataclass(frozen=True)
class Tilt:
    """Coefficients of a loss from outside."""

    power: float = 1.0
    """Of the probability."""

    def __post_init__(self):
        require(self, "power", self.power > 0, "positive")


def of_probability(inputs, power):
    """-A * p^power, whose gradient by log p is -A * power * p^power."""
    values = (power * inputs.log_probs).exp()
    return -inputs.advantages * values, {"probability": inputs.log_probs.detach().exp(), "length": row_lengths(inputs)}


def row_lengths(inputs):
    return inputs.mask.sum(dim=1, keepdim=True).float()


def of_last_token(inputs):
    """A loss of whole responses, on-policy: -A * log p of the last token, with the ratio beside it, which is one."""
    last = inputs.mask.sum(dim=1, keepdim=True) - 1
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return -inputs.advantages * inputs.log_probs.gather(1, last), {"ratio": ratio}


TILTED = Loss(of_probability, settings=Tilt)
LAST = Loss(of_last_token, level="sequence")
WRONG_LEVEL = Loss(of_last_token)
HERE = __name__


def bare(inputs):
    return -inputs.advantages * inputs.log_probs


def not_finite(inputs):
    return inputs.log_probs / 0, {}


def make_policy(policy):
    return dataclasses.replace(policy, model=copy.deepcopy(policy.model).double())


def rollouts():
    generator = torch.Generator().manual_seed(0)
    made = []
    for row, advantage in enumerate(ADVANTAGES):
        ids = torch.randint(0, 288, (3 + row,), generator=generator).tolist()
        completion = Completion((5, 6, 7 + row // 2), tuple(ids), "", (-0.5,) * len(ids), "eos", 0)
        made.append(Rollout(Example("", "", ""), completion, Score(0.0, 1.0, 0.0), advantage))
    return made


def gradient_of(policy):
    return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])


def by_hand(policy, loss_of_row):
    """The gradient of the sum over rows, one row at a time from whole logits."""
    model = copy.deepcopy(policy.model)
    model.zero_grad(set_to_none=True)
    for row, rollout in enumerate(rollouts()):
        ids = torch.tensor([[*rollout.completion.prompt_ids, *rollout.completion.ids]])
        log_probs = model(ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        loss_of_row(row, log_probs).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_loss_from_outside_with_its_coefficients(random_policy):
    policy = make_policy(random_policy)
    values = {**SMALL, "loss_type": f"{HERE}:TILTED", "loss": {"power": 0.5}, "length_normalization": "token"}
    config = from_mapping(GRPOConfig, values, "settings.toml")
    metrics = batch_backward(config, policy, rollouts(), range(4))
    tokens = 3 + 4 + 5 + 6
    expected = by_hand(policy, lambda row, log_probs: -(ADVANTAGES[row] * (0.5 * log_probs).exp()).sum() / tokens)
    assert (gradient_of(policy) - expected).norm() < 1e-5 * expected.norm()  # the norms are in single precision
    scored = torch.cat(score_rollouts(config, policy, rollouts()))
    assert metrics["probability"] == pytest.approx(scored.exp().mean().item(), rel=1e-6)
    assert metrics["length"] == pytest.approx((9 + 16 + 25 + 36) / tokens)  # of each token's response
    with pytest.raises(ConfigError, match=r"loss\.power is -1\.0; it must be positive"):
        from_mapping(GRPOConfig, {**values, "loss": {"power": -1.0}}, "settings.toml")


def test_a_loss_of_whole_responses_from_outside(random_policy):
    policy = make_policy(random_policy)
    metrics = batch_backward(GRPOConfig(**SMALL, loss_type=f"{HERE}:LAST"), policy, rollouts(), range(4))
    # "sequence" normalization: the mean over a response's tokens of what is the same at each, then over 4 responses.
    expected = by_hand(policy, lambda row, log_probs: -ADVANTAGES[row] * log_probs[-1] / 4)
    assert (gradient_of(policy) - expected).norm() < 1e-5 * expected.norm()
    assert metrics["ratio"] == 1  # on-policy, the old policy is the present one


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", r"loss_type is '.*:nothing', but .* has no nothing"),
        ("ADVANTAGES", r"which is \[1\.5.*; it must be a Loss or a function"),
        ("bare", "returned tensor.*; it must return the loss and its metrics"),
        ("WRONG_LEVEL", r"the token loss of loss_type .*:WRONG_LEVEL has shape \(2, 1\); it must be \(2, 4\)"),
    ],
)
def test_what_is_no_loss_is_refused_by_name(random_policy, name, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        batch_backward(
            GRPOConfig(**{**SMALL, "microbatch_tokens": 10}, loss_type=f"{HERE}:{name}"),
            make_policy(random_policy),
            rollouts(),
            range(4),
        )


def test_a_loss_that_is_not_finite_reaches_no_weight(random_policy):
    policy = make_policy(random_policy)
    with pytest.raises(TrainingError, match=r"the loss is (-?inf|nan)"):
        batch_backward(GRPOConfig(**SMALL, loss_type=f"{HERE}:not_finite"), policy, rollouts(), range(4))
    assert not gradient_of(policy).any() and not policy.model.training


def test_a_layer_that_is_frozen_gets_no_gradient_and_changes_no_other(random_policy):
    config = GRPOConfig(**SMALL)
    whole, part = make_policy(random_policy), make_policy(random_policy)
    batch_backward(config, whole, rollouts(), range(4))
    for name, parameter in part.model.named_parameters():
        parameter.requires_grad_("layers.1" not in name and "embed" not in name)
    batch_backward(config, part, rollouts(), range(4))
    for trained, parameter in zip(whole.model.parameters(), part.model.parameters(), strict=True):
        assert (parameter.grad is None) == (not parameter.requires_grad)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, trained.grad)


def test_gradients_are_written_in_two_files_alone():
    """By the helper, and by the processes that share their memory; nobody reads them past autograd either."""
    writers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\.grad\b(?!_)", path.read_text(encoding="utf-8"))
    }
    assert writers == {"model/gradients.py", "model/parallel.py"}


def test_rollouts_without_tokens_of_their_own_do_not_divide_by_zero(random_policy):
    policy = make_policy(random_policy)
    idle = [dataclasses.replace(rollout, advantage=0.0) for rollout in rollouts()]
    metrics = batch_backward(GRPOConfig(**SMALL), policy, idle, range(4))
    assert metrics["loss"] == metrics["mismatch_kl"] == 0 and math.isfinite(metrics["clip_fraction"])
    assert not gradient_of(policy).any()
