"""Every number here is worked out by hand or by an independent float64 loop."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.errors import ConfigError, DataError
from veritune.primitives import (
    approximate_kl_k3,
    compute_entropy,
    compute_group_normalized_rewards,
    get_response_log_probs,
    group_advantages,
    masked_mean,
    masked_normalize,
    maxrl_advantages,
    pad_prompt_and_response,
    selected_log_probs,
    tokenize_prompt_and_output,
    truncated_importance_weights,
)

ENDLESS = {"deadline": None, "max_examples": 60}


class LetterTokenizer:
    """One id per letter (a=1, b=2, ...), a BOS of 99 that must be switched off, and the ids it is given."""

    def __init__(self, pad_token_id: int | None, eos_token_id: int | None = 50) -> None:
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        start = [99] if add_special_tokens else []
        return {"input_ids": [start + [ord(letter) - 96 for letter in text] for text in texts]}


# Tokenization


def test_tokenize_shifts_pads_and_marks_the_labels_of_the_output():
    batch = tokenize_prompt_and_output(["ab", "c"], ["cde", "d"], LetterTokenizer(pad_token_id=0))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [3, 4, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [4, 0, 0, 0]]
    assert batch["response_mask"].tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch["response_mask"].dtype == torch.bool


def test_the_mask_comes_from_lengths_even_where_the_response_holds_the_pad_id():
    batch = tokenize_prompt_and_output(["a", "a"], ["dc", "dcbb"], LetterTokenizer(pad_token_id=3))
    assert batch["labels"].tolist() == [[4, 3, 3, 3], [4, 3, 2, 2]]
    assert batch["response_mask"].tolist() == [[True, True, False, False], [True, True, True, True]]


def test_padding_falls_back_to_the_eos_id_and_pad_id_zero_counts_as_given():
    assert tokenize_prompt_and_output(["a", "a"], ["b", "bb"], LetterTokenizer(None))["labels"].tolist() == [
        [2, 50],
        [2, 2],
    ]
    assert tokenize_prompt_and_output(["a", "a"], ["b", "bb"], LetterTokenizer(0))["labels"].tolist() == [
        [2, 0],
        [2, 2],
    ]
    with pytest.raises(ConfigError, match="pad_token_id"):
        tokenize_prompt_and_output(["a"], ["b"], LetterTokenizer(None, eos_token_id=None))


def test_an_empty_prompt_or_output_marks_what_can_be_predicted():
    batch = tokenize_prompt_and_output(["", "ab"], ["abc", ""], LetterTokenizer(0))
    assert batch["labels"].tolist() == [[2, 3], [2, 0]]
    assert batch["response_mask"].tolist() == [[True, True], [False, False]]


def test_tokenize_refuses_lists_that_do_not_pair_up():
    with pytest.raises(ConfigError, match="output_strs 1; they must pair up"):
        tokenize_prompt_and_output(["a", "b"], ["c"], LetterTokenizer(0))
    with pytest.raises(ConfigError, match="prompt_strs is empty"):
        tokenize_prompt_and_output([], [], LetterTokenizer(0))


@settings(**ENDLESS)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), max_size=5)),
        min_size=1,
    )
)
def test_the_masked_labels_are_the_response_ids(pairs):
    prompts, responses = zip(*pairs, strict=True)
    batch = pad_prompt_and_response(prompts, responses, pad_token_id=0)
    for row, response in enumerate(responses):
        assert batch["labels"][row][batch["response_mask"][row]].tolist() == list(response)


# Log-probabilities and entropy


def test_log_probs_and_entropy_of_known_odds():
    odds = torch.tensor([[[1.0, 3.0, 4.0]]])
    labels = torch.tensor([[1]])
    assert selected_log_probs(odds.log(), labels).item() == pytest.approx(math.log(3 / 8), abs=1e-6)
    expected = -sum(p * math.log(p) for p in (1 / 8, 3 / 8, 4 / 8))
    assert compute_entropy(odds.log()).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_log_probs_and_entropy_agree_with_float64_loops_at_any_scale(scale):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 7, generator=generator) * scale
    labels = torch.randint(7, (2, 3), generator=generator)
    log_probs, entropy = selected_log_probs(logits, labels), compute_entropy(logits)
    for row in range(2):
        for position in range(3):
            values = logits[row, position].tolist()
            top = max(values)
            log_normalizer = math.log(math.fsum(math.exp(value - top) for value in values))
            log_ps = [value - top - log_normalizer for value in values]
            assert log_probs[row, position].item() == pytest.approx(log_ps[labels[row, position]], rel=1e-5, abs=1e-6)
            expected = -math.fsum(math.exp(log_p) * log_p for log_p in log_ps)
            assert entropy[row, position].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_entropy_and_its_gradient_stay_finite_at_the_extremes():
    logits = torch.tensor([[1e4, -1e4, -1e4], [-1e4, -1e4, -1e4], [1e4, 1e4, -torch.inf]], requires_grad=True)
    entropy = compute_entropy(logits)
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(3), math.log(2)]))
    entropy.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3, 3), atol=1e-6, rtol=0)


def test_close_odds_on_top_of_large_logits_keep_their_digits():
    logits = torch.tensor([[20000.0, 20001.0]])
    expected = -math.log1p(math.e)
    assert selected_log_probs(logits, torch.tensor([0])).item() == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_a_log_prob_is_one_hot_minus_softmax():
    logits = torch.tensor([[1.0, 3.0, 4.0]]).log().requires_grad_()
    selected_log_probs(logits, torch.tensor([1])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1 / 8, 5 / 8, -4 / 8]]))


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.tensor([[0.0, 0.5, 0.25]], dtype=torch.bfloat16)
    assert selected_log_probs(logits, torch.tensor([0])).dtype == torch.float32
    assert compute_entropy(logits).dtype == torch.float32


def test_response_log_probs_of_a_model_whose_logits_are_known():
    table = torch.tensor([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]]).log()
    scores = get_response_log_probs(
        lambda ids: SimpleNamespace(logits=table[ids]), torch.tensor([[0, 1]]), torch.tensor([[2, 0]])
    )
    assert set(scores) == {"log_probs"}
    torch.testing.assert_close(scores["log_probs"], torch.tensor([[math.log(1 / 2), math.log(1 / 4)]]))
    scores = get_response_log_probs(
        lambda ids: SimpleNamespace(logits=table[ids]),
        torch.tensor([[1]]),
        torch.tensor([[0]]),
        return_token_entropy=True,
    )
    torch.testing.assert_close(scores["token_entropy"], torch.tensor([[1.5 * math.log(2)]]))


def test_k3_is_zero_at_equality_and_never_negative():
    policy = torch.tensor([[-1.0, -1.0, -2.0, -500.0]])
    reference = torch.tensor([[-1.0, -2.0, -1.0, -1.0]])
    estimate = approximate_kl_k3(policy, reference)
    expected = [0.0, math.exp(-1) + 1 - 1, math.exp(1) - 1 - 1]
    torch.testing.assert_close(estimate[0, :3], torch.tensor(expected))
    assert estimate.isfinite().all() and (estimate >= 0).all()


def test_k3_is_unbiased_over_the_policy():
    policy, reference = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.6, 0.3, 0.1]).log()
    expected = 0.2 * math.log(0.2 / 0.6) + 0.5 * math.log(0.5 / 0.1)
    assert (policy.exp() * approximate_kl_k3(policy, reference)).sum().item() == pytest.approx(expected, abs=1e-6)


def test_importance_weights_are_cut_at_the_cap_and_carry_no_gradient():
    trainer = torch.tensor([[1.0, 4.0, 0.5]]).log().requires_grad_()
    weights = truncated_importance_weights(trainer, torch.zeros(1, 3), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5]]))
    assert not weights.requires_grad
    with pytest.raises(ConfigError, match="cap is 0"):
        truncated_importance_weights(trainer, trainer, cap=0)


# Masked reductions


@pytest.mark.parametrize("dim, expected", [(None, 0.8), (0, [0.1, 0.5, 0.2]), (1, [0.3, 0.5]), (-1, [0.3, 0.5])])
def test_masked_normalize_divides_the_sum_by_the_constant(dim, expected):
    tensor = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 5.0, 6.0]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    for name in ("normalize_constant", "constant_normalizer"):
        result = masked_normalize(tensor=tensor, mask=mask, dim=dim, **{name: 10.0})
        torch.testing.assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize("dim, expected", [(None, 8 / 3), (0, [1.0, 5.0, 2.0]), (1, [1.5, 5.0]), (-1, [1.5, 5.0])])
def test_masked_mean_divides_by_the_number_of_chosen_elements(dim, expected):
    tensor = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    torch.testing.assert_close(masked_mean(tensor=tensor, mask=mask, dim=dim), torch.tensor(expected))


def test_the_mean_of_nothing_is_nan():
    tensor, mask = torch.ones(2, 2), torch.tensor([[True, False], [True, False]])
    assert masked_mean(tensor, torch.zeros(2, 2, dtype=torch.bool)).isnan()
    assert masked_mean(tensor, mask, dim=0).isnan().tolist() == [False, True]


def test_reductions_name_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"mask has shape \(2,\)"):
        masked_mean(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ConfigError, match="normalize_constant is 0"):
        masked_normalize(torch.ones(2), torch.ones(2), normalize_constant=0)
    with pytest.raises(ConfigError, match="constant_normalizer is 0"):
        masked_normalize(torch.ones(2), torch.ones(2), constant_normalizer=0)
    for constants in ({}, {"normalize_constant": 2, "constant_normalizer": 2}):
        with pytest.raises(ConfigError, match="one of normalize_constant and constant_normalizer"):
            masked_normalize(torch.ones(2), torch.ones(2), **constants)


# Advantages


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    std = [math.sqrt(4 * 0.25 / 3), math.sqrt((3 * 0.0625 + 0.5625) / 3)]
    centred = torch.tensor([[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]])
    torch.testing.assert_close(group_advantages(rewards, 1e-6, normalize_by_std=False), centred)
    expected = torch.stack([row / (deviation + 0.1) for row, deviation in zip(centred, std, strict=True)])
    torch.testing.assert_close(group_advantages(rewards, 0.1, normalize_by_std=True), expected)
    others = torch.tensor([[1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3], [-1 / 3, -1 / 3, -1 / 3, 1.0]])
    torch.testing.assert_close(group_advantages(rewards, 0.0, False, baseline="leave_one_out"), others)
    assert group_advantages(rewards, 0.0, False, baseline="none") is rewards
    by_mean = torch.tensor([[1.0, -1.0, -1.0, 1.0], [-1.0, -1.0, -1.0, 3.0]])
    torch.testing.assert_close(maxrl_advantages(rewards, 0.0), by_mean)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_rewards_are_worth_exactly_nothing(eps, baseline):
    rewards = torch.full((1, 7), 0.1)
    assert group_advantages(rewards, eps, True, baseline).tolist() == [[0.0] * 7]
    assert maxrl_advantages(torch.zeros(1, 7), eps).tolist() == [[0.0] * 7]


@settings(**ENDLESS)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8), st.floats(-5, 5, width=16))
def test_advantages_sum_to_zero_and_do_not_notice_a_shift(values, shift):
    rewards = torch.tensor([values], dtype=torch.float64)
    advantages = group_advantages(rewards, 1e-2, True)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-8)
    torch.testing.assert_close(group_advantages(rewards + shift, 1e-2, True), advantages, atol=1e-8, rtol=0)


def test_group_advantages_refuse_what_has_no_meaning():
    single = torch.ones(3, 1)
    assert group_advantages(single, 1e-6, normalize_by_std=False).tolist() == [[0.0]] * 3
    with pytest.raises(ConfigError, match="group_size is 1"):
        group_advantages(single, 1e-6, normalize_by_std=True)
    with pytest.raises(ConfigError, match="group_size is 1"):
        group_advantages(single, 1e-6, normalize_by_std=False, baseline="leave_one_out")
    with pytest.raises(ConfigError, match="normalize_by_std is True"):
        group_advantages(torch.ones(2, 2), 1e-6, normalize_by_std=True, baseline="none")
    with pytest.raises(ConfigError, match="baseline is 'median'"):
        group_advantages(torch.ones(2, 2), 1e-6, False, baseline="median")
    with pytest.raises(ConfigError, match="advantage_eps is -1"):
        group_advantages(torch.ones(2, 2), -1, False)
    with pytest.raises(ConfigError, match="rewards has shape"):
        group_advantages(torch.ones(4), 1e-6, False)
    with pytest.raises(ConfigError, match="below 0"):
        maxrl_advantages(torch.tensor([[-1.0, 1.0]]), 1e-6)


def test_group_normalized_rewards_grade_and_centre():
    advantages, raw_rewards, metadata = compute_group_normalized_rewards(
        reward_fn=lambda response, truth: {
            "reward": float(response == truth),
            "format_reward": 1.0,
            "answer_reward": 0.5,
        },
        rollout_responses=["a", "b", "c", "c"],
        repeated_ground_truths=["a", "a", "c", "c"],
        group_size=2,
        advantage_eps=1e-6,
        normalize_by_std=True,
    )
    assert raw_rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([half, -half, 0.0, 0.0]))
    assert metadata == pytest.approx(
        {
            "mean": 0.75,
            "std": 0.5,
            "max": 1.0,
            "min": 0.0,
            "zero_variance_fraction": 0.5,
            "format_reward": 1.0,
            "answer_reward": 0.5,
        }
    )


def test_a_reward_may_be_a_plain_number():
    advantages, _, metadata = compute_group_normalized_rewards(
        lambda r, t: 0.1 * len(r), ["a", "aaa"], [0, 0], 2, 0.0, False
    )
    torch.testing.assert_close(advantages, torch.tensor([-0.1, 0.1]))
    assert "format_reward" not in metadata


def test_group_normalized_rewards_name_what_does_not_fit():
    arguments = {"group_size": 2, "advantage_eps": 1e-6, "normalize_by_std": False}
    with pytest.raises(ConfigError, match="repeated_ground_truths has 1"):
        compute_group_normalized_rewards(lambda r, t: 1.0, ["a", "b"], ["a"], **arguments)
    with pytest.raises(ConfigError, match="multiple of group_size 2"):
        compute_group_normalized_rewards(lambda r, t: 1.0, ["a"], ["a"], **arguments)
    with pytest.raises(ConfigError, match="rollout_responses has 0"):
        compute_group_normalized_rewards(lambda r, t: 1.0, [], [], **arguments)
    with pytest.raises(ConfigError, match="group_size is 0"):
        compute_group_normalized_rewards(lambda r, t: 1.0, ["a"], ["a"], **{**arguments, "group_size": 0})
    with pytest.raises(DataError, match="for response 1"):
        compute_group_normalized_rewards(lambda r, t: math.nan if r == "b" else 1.0, ["a", "b"], ["", ""], **arguments)
