"""Packed microbatches against whole rows: cuts, scores, gradients, and models that packing would change."""

import copy
import random
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import MistralConfig, MistralForCausalLM, StableLmConfig, StableLmForCausalLM

from veritune.core.errors import ConfigError, EngineError
from veritune.engines.native.engine import NativeEngine
from veritune.model import decoder_layer
from veritune.model.policy import as_policy, checkpoint_activations
from veritune.primitives import get_response_log_probs, pad_prompt_and_response
from veritune.trainer import microbatches
from veritune.trainer.microbatches import (
    cut_microbatches,
    pad_responses,
    prove_packing,
    score_responses,
    supervised_backward,
)

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20),
    budget=st.integers(1, 200),
)
def test_every_row_is_in_one_microbatch_within_the_budget(lengths, budget):
    prompts = [list(range(100, 100 + prompt)) for prompt, _ in lengths]
    responses = [list(range(200, 200 + response)) for _, response in lengths]
    cut = list(cut_microbatches(prompts, responses, range(len(lengths)), token_budget=budget, device=CPU))
    assert Counter(row for microbatch in cut for row in microbatch.rows) == Counter(range(len(lengths)))
    positions = [microbatch.packed.input_ids.numel() for microbatch in cut]
    assert positions == sorted(positions, reverse=True)
    for microbatch in cut:
        assert microbatch.packed.input_ids.numel() <= budget or len(microbatch.rows) == 1
        assert microbatch.packed.labels.tolist() == [token for row in microbatch.rows for token in responses[row]]
        assert microbatch.response_mask.sum(dim=1).tolist() == [len(responses[row]) for row in microbatch.rows]


def test_siblings_stand_together_and_their_prompt_counts_once_a_microbatch():
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3]]
    responses = [[7, 8], [7], [9, 9, 9], [8]]
    cut = list(cut_microbatches(prompts, responses, range(4), token_budget=6, device=CPU))
    # Row 0 takes 3 + 1, row 2 the 2 that are left, row 3 nothing; row 1's prompt finds no room.
    assert [batch.rows for batch in cut] == [[0, 2, 3], [1]]
    assert cut[0].packed.input_ids.tolist() == [[1, 2, 3, 7, 9, 9]]
    # Rows 2 and 3 take 3 + 2, row 0 takes 3 + 1, row 1 takes 3: the longest comes first.
    assert [batch.rows for batch in cut_microbatches(prompts, responses, range(4), token_budget=5, device=CPU)] == [
        [2, 3],
        [0],
        [1],
    ]


def test_a_microbatch_is_packed_when_it_is_asked_for(monkeypatch):
    packed = []
    monkeypatch.setattr(microbatches, "pack_rows", lambda prompts, *_: packed.append(prompts))
    cut = cut_microbatches([[1], [2], [3]], [[4, 5]] * 3, range(3), token_budget=2, device=CPU)
    for count in (1, 2, 3):
        next(cut)
        assert len(packed) == count


def random_rows(policy, count, seed=0):
    generator = random.Random(seed)
    size = policy.model.config.vocab_size
    prompts = [[generator.randrange(size) for _ in range(generator.randint(1, 12))] for _ in range(count)]
    responses = [[generator.randrange(size) for _ in range(generator.randint(1, 20))] for _ in range(count)]
    return prompts, responses


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_the_plain_path(random_policy, temperature):
    prompts, responses = random_rows(random_policy, 7)
    (batch,) = cut_microbatches(prompts, responses, range(7), token_budget=10_000, device=CPU)

    def tempered(input_ids):
        output = random_policy.model(input_ids)
        output.logits = output.logits / temperature
        return output

    padded = pad_prompt_and_response([prompts[row] for row in batch.rows], [responses[row] for row in batch.rows], 0)
    plain = get_response_log_probs(tempered, padded["input_ids"], padded["labels"])["log_probs"]
    scored = score_responses(random_policy.model, batch, temperature)
    torch.testing.assert_close(scored, plain[padded["response_mask"]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("budget", [1, 40, 77, 10_000])
def test_a_cut_does_not_change_the_gradient(random_policy, budget):
    prompts, responses = random_rows(random_policy, 9)
    total = sum(map(len, responses))

    def gradient(token_budget, dtype):
        model = copy.deepcopy(random_policy.model).to(dtype)
        for microbatch in cut_microbatches(prompts, responses, range(9), token_budget=token_budget, device=CPU):
            supervised_backward(model, microbatch, total)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()

    reference = gradient(10_000, torch.float64)
    assert (gradient(budget, torch.float64) - reference).norm() / reference.norm() < 1e-12
    assert (gradient(budget, torch.float32) - reference).norm() / reference.norm() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_cross_entropy_over_whole_rows(random_policy, tied):
    config = copy.deepcopy(random_policy.model.config)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = as_policy(type(random_policy.model)(config).double(), random_policy.tokenizer).model
    prompts, responses = random_rows(random_policy, 5)
    prompts[1] = prompts[0]
    for part in (range(3), range(3, 5)):  # the second pass finds the gradient of the first
        (microbatch,) = cut_microbatches(prompts, responses, part, token_budget=10_000, device=CPU)
        supervised_backward(model, microbatch, 1)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ("lm_head.weight" in ours) != tied
    model.zero_grad()
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        cross_entropy(logits, torch.tensor(response), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert ours[name].layout == torch.strided
        # The rotary tables and the norms are in single precision whatever the model is in.
        assert (ours[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm()


def test_what_is_looked_up_often_is_summed_in_single_precision(random_policy):
    prompts, responses = [[1] * 400 for _ in range(8)], [[2, 3]] * 8
    for row, prompt in enumerate(prompts):
        prompt[0] = 4 + row  # rows of their own

    def gradient(dtype):
        model = copy.deepcopy(random_policy.model).to(dtype)
        (microbatch,) = cut_microbatches(prompts, responses, range(8), token_budget=10_000, device=CPU)
        supervised_backward(model, microbatch, 16)
        return model.get_input_embeddings().weight.grad.double()

    reference = gradient(torch.float64)
    # Token 1 has 3,192 addends: one after the other in bfloat16, the later ones would be lost.
    assert (gradient(torch.bfloat16)[1] - reference[1]).norm() / reference[1].norm() < 0.05


def test_activation_checkpointing_changes_no_gradient(random_policy, monkeypatch):
    attend = decoder_layer.attend
    prompts, responses = random_rows(random_policy, 9)
    (batch,) = cut_microbatches(prompts, responses, range(9), token_budget=10_000, device=CPU)
    gradients = []
    for checkpointing in (False, True):
        model = copy.deepcopy(random_policy.model).train()
        if checkpointing:
            checkpoint_activations(model)
        calls = []
        monkeypatch.setattr(decoder_layer, "attend", lambda *given, calls=calls: calls.append(1) or attend(*given))
        supervised_backward(model, batch, 100)
        assert len(calls) == len(model.base_model.layers) * (1 + checkpointing)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_model_that_packing_would_change_is_refused(random_policy):
    prove_packing(random_policy, "good")
    sliding = copy.deepcopy(random_policy)
    sliding.model.config.layer_types = ["sliding_attention"] * len(sliding.model.base_model.layers)
    with pytest.raises(ConfigError, match="policy 'sliding' has attention layers that are not full"):
        prove_packing(sliding, "sliding")
    deaf = copy.deepcopy(random_policy)  # an attention that is told of no packing lets rows see one another
    deaf.model.set_attn_implementation("eager")
    deaf.model.config.model_type = "another"  # which runs its own layers
    with pytest.raises(ConfigError, match=r"policy 'deaf' cannot be trained: .* nats away"):
        prove_packing(deaf, "deaf")
    capped = copy.deepcopy(random_policy)  # as models that scale or cap their logits after the head
    forward = capped.model.forward

    def scaled(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = output.logits * 0.5
        return output

    capped.model.forward = scaled
    with pytest.raises(ConfigError, match="policy 'capped' cannot be trained"):
        prove_packing(capped, "capped")


@pytest.mark.parametrize(("window", "refused"), [(None, False), (64, False), (63, True)])
def test_a_sliding_window_that_no_layer_type_names_is_refused(random_policy, window, refused):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "vocab_size": random_policy.model.config.vocab_size,
    }
    model = MistralForCausalLM(MistralConfig(**shape, sliding_window=window, eos_token_id=0))
    policy = as_policy(model, random_policy.tokenizer)
    with pytest.raises(ConfigError, match="layers that are not full") if refused else nullcontext():
        prove_packing(policy, "windowed")
    with pytest.raises(EngineError, match="serves full attention only") if refused else nullcontext():
        NativeEngine(policy)


def test_a_model_that_packed_rows_do_not_go_through_is_refused(random_policy):
    torch.manual_seed(0)
    size = random_policy.model.config.vocab_size
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = StableLmForCausalLM(StableLmConfig(vocab_size=size, num_hidden_layers=1, eos_token_id=0, **shape))
    with pytest.raises(ConfigError, match="policy 'other' cannot be trained: packed rows do not go through it"):
        prove_packing(as_policy(model, random_policy.tokenizer), "other")


def test_responses_are_laid_out_as_the_mask():
    mask = torch.tensor([[False, True, True], [True, False, False]])
    padded = pad_responses(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert padded.tolist() == [[0, 1, 2], [3, 0, 0]]
