"""The native engine's own laws: completions do not depend on the batch, and draws follow the distribution."""

import dataclasses
import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracing import Tracer
from veritune.core.errors import ConfigError, EngineError
from veritune.core.types import Sampling
from veritune.engines.native.engine import NativeEngine, TokenTexts, addressed_uniform, keep_nucleus, sample_tokens
from veritune.engines.native.settings import NativeSettings
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.parallel import ALONE
from veritune.model.policy import encode_prompts


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_completions_do_not_depend_on_how_many_rows_run_side_by_side(random_policy, max_rows):
    prompts = encode_prompts(random_policy, [f"Use {n}, 5, 18 to make {n}.\n" * (1 + n % 3) for n in range(5)])
    # Ending at random places makes rows finish, move and be replaced at every step.
    policy = dataclasses.replace(random_policy, eos_ids=frozenset(range(0, 400, 7)))
    sampling = Sampling(max_tokens=25, n=3, seed=2)
    wide = NativeEngine(policy).generate(prompts, sampling)
    narrow = NativeEngine(policy, max_rows=max_rows).generate(prompts, sampling)
    assert [[c.ids for c in group] for group in wide] == [[c.ids for c in group] for group in narrow]
    assert len({len(c.ids) for group in wide for c in group}) > 3


def test_without_compiled_kernels_the_same_completions_are_sampled(random_policy, monkeypatch):
    prompts = encode_prompts(random_policy, [f"Use {n}, 5, 18 to make {n}.\n" * (1 + n % 3) for n in range(5)])
    sampling = Sampling(max_tokens=25, n=3, seed=2)
    compiled = NativeEngine(random_policy).generate(prompts, sampling)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    plain = NativeEngine(random_policy).generate(prompts, sampling)
    assert [[c.ids for c in group] for group in compiled] == [[c.ids for c in group] for group in plain]
    for one, other in zip(chain.from_iterable(compiled), chain.from_iterable(plain), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("max_rows", [4, 512])
def test_replayed_steps_sample_the_same_completions(random_policy, max_rows):
    prompts = encode_prompts(random_policy, [f"Use {n}, 5, 18 to make {n}.\n" * (1 + n % 3) for n in range(7)])
    policy = dataclasses.replace(random_policy, eos_ids=frozenset(range(0, 400, 11)))
    sampling, tracer = Sampling(max_tokens=40, n=3, seed=2), Tracer()
    plain = NativeEngine(policy, max_rows=max_rows).generate(prompts, sampling)
    replayed = NativeEngine(policy, max_rows=max_rows, capture=tracer).generate(prompts, sampling)
    assert [[c.ids for c in group] for group in plain] == [[c.ids for c in group] for group in replayed]
    assert tracer.replays > 10


def test_graphs_are_refused_where_a_step_cannot_be_captured(random_policy):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(random_policy.tokenizer), n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(EngineError, match="cuda_graphs"):
        NativeEngine(dataclasses.replace(random_policy, model=model), capture=Tracer())
    with pytest.raises(ConfigError, match="cuda_graphs is True; it must be off: the policy is on cpu"):
        NativeSettings(cuda_graphs=True).create(random_policy, ALONE)


def test_a_prompt_that_fills_the_context_is_refused_and_a_response_ends_with_it(random_policy):
    engine = NativeEngine(dataclasses.replace(random_policy, context_length=12, eos_ids=frozenset({0})))
    with pytest.raises(EngineError, match="12 tokens"):
        engine.generate([list(range(100, 112))], Sampling(max_tokens=5))
    ((completion,),) = engine.generate([list(range(100, 109))], Sampling(temperature=0, max_tokens=50, min_tokens=50))
    assert len(completion.ids) == 3
    assert completion.finish_reason == "length"


def test_weights_that_change_in_place_are_served_at_the_next_call(random_policy):
    import copy

    policy = dataclasses.replace(random_policy, model=copy.deepcopy(random_policy.model))
    engine, sampling = NativeEngine(policy), Sampling(temperature=0, max_tokens=10, min_tokens=10)
    ((before,),) = engine.generate([[5, 6, 7]], sampling)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.8)
    ((after,),) = engine.generate([[5, 6, 7]], sampling)
    expected = policy.model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, min_new_tokens=10, max_new_tokens=10)
    assert after.ids == tuple(expected[0, 3:].tolist()) != before.ids


def test_positions_taken_from_the_order_of_the_cache_are_refused(random_policy):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=len(random_policy.tokenizer), hidden_size=8, n_layer=1, n_head=1))
    with pytest.raises(EngineError, match="ALiBi"):
        NativeEngine(dataclasses.replace(random_policy, model=model))


def test_damaged_weights_are_an_engine_error(random_policy):
    import copy

    broken = copy.deepcopy(random_policy.model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[:] = math.nan
    engine = NativeEngine(random_policy)
    engine.load_weights(broken, version=1)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate([[5, 6]], Sampling(max_tokens=3))


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf")])
    draws = 200_000
    rows, positions = np.arange(draws), np.zeros(draws, dtype=np.int64)
    tokens, logprobs = sample_tokens(logits.expand(draws, 4), Sampling(temperature=2.0, seed=3), rows, positions)
    # softmax([0, 1/2, 1]) by hand
    weights = [1.0, math.exp(0.5), math.e]
    expected = [weight / sum(weights) for weight in weights]
    for token, probability in enumerate(expected):
        share = (tokens == token).double().mean().item()
        assert abs(share - probability) < 5 * math.sqrt(probability / draws)
        assert torch.allclose(logprobs[tokens == token], torch.tensor(math.log(probability)), atol=1e-6)
    assert not (tokens == 3).any()


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    kept = keep_nucleus(probabilities.log(), 0.74).isfinite()
    assert kept.tolist() == [[False, True, False, True], [True, False, False, False]]
    assert keep_nucleus(probabilities.log(), 0.76).isfinite()[0].tolist() == [False, True, True, True]


def test_top_p_log_probabilities_are_those_of_the_renormalised_nucleus():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(1000, 3)
    tokens, logprobs = sample_tokens(logits, Sampling(top_p=0.7), np.arange(1000), np.zeros(1000, np.int64))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.tensor([math.log(5 / 8), math.log(3 / 8)])[tokens])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), row=st.integers(0, 2**31), position=st.integers(0, 2**20))
def test_an_address_has_one_number_and_neighbours_another(seed, row, position):
    rows, positions = np.array([row, row + 1, row, row]), np.array([position, position, position + 1, position])
    draws = addressed_uniform(seed, rows, positions)
    assert draws[0] == draws[3]
    assert len(set(draws[:3].tolist())) == 3
    assert ((draws >= 0) & (draws < 1)).all()


def test_addressed_numbers_are_uniform_and_independent():
    rows, positions = np.arange(512).repeat(512), np.tile(np.arange(512), 512)
    draws = addressed_uniform(0, rows, positions)
    count = len(draws)
    assert abs(draws.mean() - 0.5) < 5 / math.sqrt(12 * count)
    assert abs(draws.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    grid = draws.reshape(512, 512) - 0.5
    for neighbours in ((grid[1:] * grid[:-1]).mean(), (grid[:, 1:] * grid[:, :-1]).mean()):
        assert abs(neighbours) < 5 / 12 / math.sqrt(count)


class CharacterTokenizer:
    """Token n is the n-th of these pieces; nothing else of a tokenizer is asked for."""

    pieces = ("<", "</", "answer", ">", ">\n", "x", "</answer>", "a</answer>b", "er>")

    def decode(self, ids, **_):
        return "".join(self.pieces[token] for token in ids)


def test_only_tokens_that_can_complete_a_stop_string_are_looked_at():
    texts = TokenTexts(CharacterTokenizer(), 9)
    stop = ("</answer>",)
    expected = [False, False, False, True, True, False, True, True, True]
    assert texts.may_end(np.arange(9), stop).tolist() == expected
    assert texts.may_end(np.array([3, 5, 3, 8]), stop).tolist() == [True, False, True, True]
    assert texts.ends([5, 1, 2, 4], stop)
    assert not texts.ends([5, 1, 2, 5, 3], stop)
