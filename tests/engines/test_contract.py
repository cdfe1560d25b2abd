"""What every engine must do; an engine that passes this file can be given to any recipe."""

import copy
import dataclasses
import importlib.util
from itertools import chain

import pytest
import torch

from veritune.core.errors import ConfigError, EngineError
from veritune.core.types import Sampling
from veritune.engines.native.engine import NativeEngine
from veritune.engines.vllm_server import VLLMServerEngine
from veritune.engines.vllm_settings import VLLMServerSettings, VLLMSettings
from veritune.engines.weight_check import load_proven_weights
from veritune.model.policy import encode_prompts
from veritune.trainer.microbatches import cut_microbatches, score_responses

PROMPTS = ["Use 9, 5, 18 to make 4.\n<think>\n", "Use 1, 2 to", "12", "Use 20, 20, 20 to make 100. And once more.\n"]


def start_vllm_engine(policy):
    from veritune.engines.vllm import VLLMEngine

    return VLLMEngine(policy, VLLMSettings())


ENGINES = {"native": NativeEngine}
if importlib.util.find_spec("vllm"):
    ENGINES["vllm"] = start_vllm_engine
    ENGINES["vllm-server"] = lambda policy: VLLMServerEngine(policy, VLLMServerSettings(start=("cpu",)))


@pytest.fixture(scope="module", params=ENGINES)
def started(request, random_policy):
    """vLLM takes seconds to start, so an engine serves the whole file, and the last test closes it."""
    made = ENGINES[request.param](random_policy)
    yield made
    made.close()


@pytest.fixture
def engine(started, random_policy):
    started.policy = random_policy
    load_proven_weights(started, random_policy.model, 0)
    return started


@pytest.fixture(scope="module")
def prompts_ids(random_policy):
    return encode_prompts(random_policy, PROMPTS)


def with_eos(engine, eos_ids):
    """The engine, with other ids that end a sequence."""
    engine.policy = dataclasses.replace(engine.policy, eos_ids=frozenset(eos_ids))
    return engine


def generate_with_transformers(policy, prompt, tokens):
    output = policy.model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


def test_greedy_agrees_with_transformers_token_by_token(engine, random_policy, prompts_ids):
    sampling = Sampling(temperature=0, max_tokens=40, min_tokens=40)
    completions = engine.generate(prompts_ids, sampling)
    for prompt, (completion,) in zip(prompts_ids, completions, strict=True):
        assert completion.ids == generate_with_transformers(random_policy, prompt, 40)
        assert completion.prompt_ids == tuple(prompt)
        assert completion.finish_reason == "length"


def test_log_probabilities_are_the_trainers(engine, random_policy, prompts_ids):
    for temperature in (1.0, 0.7):
        groups = engine.generate(prompts_ids, Sampling(temperature=temperature, max_tokens=30, n=3, seed=1))
        completions = [completion for group in groups for completion in group]
        microbatches = cut_microbatches(
            [c.prompt_ids for c in completions],
            [c.ids for c in completions],
            range(len(completions)),
            token_budget=200,
            device=torch.device("cpu"),
        )
        for microbatch in microbatches:
            scored = score_responses(random_policy.model, microbatch, temperature)
            engines = torch.tensor([value for row in microbatch.rows for value in completions[row].logprobs])
            torch.testing.assert_close(scored, engines, rtol=0, atol=1e-4)


def test_siblings_differ_and_a_seed_repeats_itself(engine, prompts_ids):
    sampling = Sampling(max_tokens=20, n=6, seed=5)
    first, again = engine.generate(prompts_ids, sampling), engine.generate(prompts_ids, sampling)
    for completion, repeated in zip(chain(*first), chain(*again), strict=True):
        # A prefix cache may change the last bit of a log-probability.
        assert dataclasses.replace(completion, logprobs=()) == dataclasses.replace(repeated, logprobs=())
        assert completion.logprobs == pytest.approx(repeated.logprobs, abs=1e-4)
    assert all(len({completion.ids for completion in group}) == 6 for group in first)
    other = engine.generate(prompts_ids, dataclasses.replace(sampling, seed=6))
    assert all(a.ids != b.ids for a, b in zip(first[0], other[0], strict=True))


def test_a_stop_string_is_found_across_token_borders_and_kept(engine, random_policy, prompts_ids):
    (plain,) = engine.generate(prompts_ids[:1], Sampling(temperature=0, max_tokens=40, min_tokens=40))[0]
    decode = random_policy.tokenizer.decode
    tokens = [decode([token]) for token in plain.ids]
    # The last character of one token and the first of the next, at the first place where this pair appears at all.
    pairs = [tokens[i][-1] + tokens[i + 1][0] for i in range(len(tokens) - 1)]
    border = next(i for i in range(5, 39) if pairs[i] not in "".join(tokens[: i + 1]) and "\ufffd" not in pairs[i])
    stop = pairs[border]
    (stopped,) = engine.generate(prompts_ids[:1], Sampling(temperature=0, max_tokens=40, stop=("never!", stop)))[0]
    assert stopped.ids == plain.ids[: border + 2]
    assert stopped.finish_reason == "stop"
    assert stopped.text == "".join(tokens[: border + 1]) + tokens[border + 1][0]


def test_the_same_prompt_twice_is_drawn_apart(engine, prompts_ids):
    groups = engine.generate([prompts_ids[0]] * 3, Sampling(max_tokens=20, n=2, seed=5))
    assert len({completion.ids for group in groups for completion in group}) == 6


def test_log_probabilities_under_top_p_are_those_of_the_renormalised_nucleus(engine, random_policy, prompts_ids):
    sampling = Sampling(temperature=0.8, top_p=0.6, max_tokens=15, n=4, seed=2)
    for prompt, group in zip(prompts_ids, engine.generate(prompts_ids, sampling), strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.ids]])
            with torch.no_grad():
                logits = random_policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            distributions = (logits / 0.8).softmax(-1).double()
            for row, token, logprob in zip(distributions, completion.ids, completion.logprobs, strict=True):
                ordered = row.sort(descending=True).values
                size = int((ordered.cumsum(0) < 0.6).sum()) + 1
                assert row[token] >= ordered[size - 1]
                assert logprob == pytest.approx((row[token] / ordered[:size].sum()).log().item(), abs=1e-3)


def test_every_end_of_sequence_id_ends_and_is_kept(engine, random_policy, prompts_ids):
    plain = engine.generate(prompts_ids, Sampling(temperature=0, max_tokens=20, min_tokens=20))
    for (completion,) in plain:
        for place in (3, 11):
            ending = completion.ids[place]
            with_eos(engine, {0, ending})
            (ended,) = engine.generate([completion.prompt_ids], Sampling(temperature=0, max_tokens=20))[0]
            assert ended.ids == completion.ids[: completion.ids.index(ending) + 1]
            assert ended.finish_reason == "eos"
            assert ended.text == random_policy.tokenizer.decode(list(ended.ids))


def test_no_end_before_min_tokens_and_none_after_max_tokens(engine, prompts_ids):
    with_eos(engine, range(200))
    groups = engine.generate(prompts_ids, Sampling(max_tokens=9, min_tokens=4, n=8))
    lengths = {len(completion.ids) for group in groups for completion in group}
    assert min(lengths) == 5 and max(lengths) <= 9
    for completion in (completion for group in groups for completion in group):
        # Ids that end a sequence are forbidden in the first four places, allowed from the fifth on.
        assert all(token >= 200 for token in completion.ids[:4])
        assert (completion.finish_reason == "eos") == (completion.ids[-1] < 200)


def test_more_prompt_tokens_than_one_pass_holds(engine, random_policy):
    prompts = [[5 + (place * (7 + row)) % 250 for place in range(900)] for row in range(6)]
    for prompt, group in zip(prompts, engine.generate(prompts, Sampling(max_tokens=3, n=2)), strict=True):
        for completion in group:
            with torch.no_grad():
                logits = random_policy.model(input_ids=torch.tensor([[*prompt, *completion.ids]])).logits[0, 899:-1]
            scored = logits.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
            torch.testing.assert_close(scored, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def test_a_prompt_that_fills_the_context_is_refused_and_a_response_ends_with_it(engine, random_policy):
    context = random_policy.context_length
    with pytest.raises(EngineError, match=f"prompt 1 has {context} tokens"):
        engine.generate([[5], [6] * context], Sampling(max_tokens=5))
    with pytest.raises(EngineError, match="prompt 0 has 0 tokens"):
        engine.generate([[]], Sampling(max_tokens=5))
    prompt = [5 + place % 250 for place in range(context - 3)]
    ((completion,),) = engine.generate([prompt], Sampling(temperature=0, max_tokens=50, min_tokens=50))
    assert (len(completion.ids), completion.finish_reason) == (3, "length")


def test_new_weights_change_the_output_and_the_version(engine, random_policy, prompts_ids):
    sampling = Sampling(temperature=0, max_tokens=20)
    before = engine.generate(prompts_ids, sampling)
    other = copy.deepcopy(random_policy.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    load_proven_weights(engine, other, 7)
    after = engine.generate(prompts_ids, sampling)
    assert {c.weights_version for group in before for c in group} == {0}
    assert {c.weights_version for group in after for c in group} == {7}
    assert [c.ids for group in before for c in group] != [c.ids for group in after for c in group]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("top_p", 0.0), ("temperature", -1.0), ("n", 0), ("min_tokens", 2000), ("stop", ("",))],
)
def test_impossible_sampling_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})


def test_no_prompts_no_completions(engine):
    assert engine.generate([], Sampling()) == []


def test_weights_of_another_vocabulary_are_refused(engine, random_policy):
    other = copy.deepcopy(random_policy.model)
    other.config.vocab_size += 1
    with pytest.raises(EngineError, match=f"cannot load a model with {other.config.vocab_size} ids"):
        engine.load_weights(other, version=8)


def test_a_closed_engine_says_so(engine, prompts_ids):
    """Last of the tests of an engine: it ends it."""
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts_ids, Sampling())
