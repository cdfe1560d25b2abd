"""What every engine must do; an engine that passes this file can be given to any recipe."""

import copy
import dataclasses

import pytest
import torch

from veritune.engines.native import NativeEngine
from veritune.errors import ConfigError, EngineError
from veritune.policies import encode_prompts
from veritune.training import cut_microbatches, score_responses
from veritune.types import Sampling

PROMPTS = ["Use 9, 5, 18 to make 4.\n<think>\n", "Use 1, 2 to", "12", "Use 20, 20, 20 to make 100. And once more.\n"]


@pytest.fixture(params=["native"])
def engine(request, random_policy):
    made = {"native": lambda: NativeEngine(random_policy)}[request.param]()
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts_ids(random_policy):
    return encode_prompts(random_policy, PROMPTS)


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
            for index, row in enumerate(microbatch.rows):
                trainers = scored[index][microbatch.response_mask[index]]
                torch.testing.assert_close(trainers, torch.tensor(completions[row].logprobs), rtol=0, atol=1e-4)


def test_siblings_differ_and_a_seed_repeats_itself(engine, prompts_ids):
    sampling = Sampling(max_tokens=20, n=6, seed=5)
    first, again = engine.generate(prompts_ids, sampling), engine.generate(prompts_ids, sampling)
    assert first == again
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


def test_every_end_of_sequence_id_ends_and_is_kept(random_policy, prompts_ids):
    plain = NativeEngine(random_policy).generate(prompts_ids, Sampling(temperature=0, max_tokens=20, min_tokens=20))
    for (completion,) in plain:
        for place in (3, 11):
            ending = completion.ids[place]
            policy = dataclasses.replace(random_policy, eos_ids=frozenset({0, ending}))
            engine = NativeEngine(policy)
            (ended,) = engine.generate([completion.prompt_ids], Sampling(temperature=0, max_tokens=20))[0]
            assert ended.ids == completion.ids[: completion.ids.index(ending) + 1]
            assert ended.finish_reason == "eos"


def test_no_end_before_min_tokens_and_none_after_max_tokens(random_policy, prompts_ids):
    everything_ends = dataclasses.replace(random_policy, eos_ids=frozenset(range(200)))
    groups = NativeEngine(everything_ends).generate(prompts_ids, Sampling(max_tokens=9, min_tokens=4, n=8))
    lengths = {len(completion.ids) for group in groups for completion in group}
    assert min(lengths) == 5 and max(lengths) <= 9
    for completion in (completion for group in groups for completion in group):
        # Ids that end a sequence are forbidden in the first four places, allowed from the fifth on.
        assert all(token >= 200 for token in completion.ids[:4])
        assert (completion.finish_reason == "eos") == (completion.ids[-1] < 200)


def test_new_weights_change_the_output_and_the_version(engine, random_policy, prompts_ids):
    sampling = Sampling(temperature=0, max_tokens=20)
    before = engine.generate(prompts_ids, sampling)
    other = copy.deepcopy(random_policy.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    engine.load_weights(other, version=7)
    after = engine.generate(prompts_ids, sampling)
    assert {c.weights_version for group in before for c in group} == {0}
    assert {c.weights_version for group in after for c in group} == {7}
    assert [c.ids for group in before for c in group] != [c.ids for group in after for c in group]


def test_a_closed_engine_says_so(engine, prompts_ids):
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts_ids, Sampling())


def test_no_prompts_no_completions(engine):
    assert engine.generate([], Sampling()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("top_p", 0.0), ("temperature", -1.0), ("n", 0), ("min_tokens", 2000), ("stop", ("",))],
)
def test_impossible_sampling_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})
