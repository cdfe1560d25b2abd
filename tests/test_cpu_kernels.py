"""The compiled kernels against the same formulas in float64."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from test_decode import Rollout, make_model, take_rows_in_and_out
from veritune import cpu_kernels
from veritune.decode import Cache, layers_for_decoding
from veritune.families import layers_of
from veritune.microbatches import add_supervised_gradient
from veritune.packing import Packing, Segment, packed_attention

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="installed without a C compiler")


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 7, 192, 1536])
def test_rms_norm_and_its_gradients(size):
    hidden, weight = drawn(2, 5, size) * 3, drawn(size, seed=1)
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = exact[0] * exact[1] / (exact[0].square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    close(cpu_kernels.rms_norm(hidden, weight, 1e-5), expected.detach())
    slope = drawn(2, 5, size, seed=2)
    of_hidden, of_weight = torch.autograd.grad(expected, exact, slope.double())
    found = cpu_kernels.rms_norm_backward(slope, hidden, weight, 1e-5)
    close(found[0], of_hidden)
    torch.testing.assert_close(found[1].double(), of_weight, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_nothing_but_zeros():
    assert cpu_kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).tolist() == [[0.0] * 8] * 2


def test_swiglu_by_hand():
    product = cpu_kernels.swiglu(*torch.tensor([[1.0, -1.0, 0.0, 2.0, 3.0, 5.0]]).chunk(2, dim=-1))
    sigmoid = 1 / (1 + math.exp(-1))
    close(product[0], torch.tensor([2 * sigmoid, -3 * (1 - sigmoid), 0.0], dtype=torch.float64))


@pytest.mark.usefixtures("threads")
def test_swiglu_and_its_gradients_over_all_of_their_range():
    gate, up = torch.linspace(-200, 200, 40_000).view(4, 10_000), drawn(4, 10_000)
    exact = [each.double().requires_grad_() for each in (gate, up)]
    expected = exact[0] * torch.sigmoid(exact[0]) * exact[1]
    close(cpu_kernels.swiglu(gate, up), expected.detach())
    slope = drawn(4, 10_000, seed=2)
    wanted = torch.autograd.grad(expected, exact, slope.double())
    found = cpu_kernels.swiglu_backward(slope.clone(), gate, up)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=2e-5)
    close(found[1], wanted[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [2, 10, 32, 128])
def test_rotary_positions(size):
    vectors, angles = drawn(7, 3, size), drawn(7, size // 2, seed=1).double() * 9
    cosine, sine = angles.cos(), angles.sin()
    first, second = vectors.double().chunk(2, dim=-1)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(first, second)
    signed = torch.cat((-sine, sine), dim=-1).float()
    cpu_kernels.rotate_(vectors, torch.cat((cosine, cosine), dim=-1).float(), signed)
    close(vectors, torch.cat((turns.real, turns.imag), dim=-1))


def attended(vectors, rotary, stored, slots, lengths, first_columns, column, heads):
    """By the formula, a row and a head at a time, in float64; the present column is that of `vectors` alone."""
    cosine, sine = (each.double()[:, 0] for each in rotary)
    rows, _, size = vectors.shape
    kv_heads = (vectors.shape[1] - heads) // 2
    turned = torch.cat((vectors[..., size // 2 :], vectors[..., : size // 2]), dim=-1).double()
    rotated = vectors.double() * cosine[:, None] + turned * sine[:, None]
    result = torch.empty(rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        slot, first = slots[row], first_columns[row]
        for head in range(heads):
            shared = head // (heads // kv_heads)
            newest = rotated[row, heads + shared], vectors[row, heads + kv_heads + shared].double()
            keys, values = (
                torch.cat((prompt[slot, shared, : lengths[slot]], own[row, shared, first:column], new[None].float()))
                for prompt, own, new in zip(stored[:2], stored[2:], newest, strict=True)
            )
            weights = (keys.double() @ rotated[row, head] / math.sqrt(size)).softmax(dim=0)
            result[row, head] = weights @ values.double()
    return result.flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [6, 10, 32, 64, 128])
@pytest.mark.usefixtures("threads")
def test_attention_of_a_decode_step(heads, kv_heads, size):
    random = np.random.default_rng(size)
    slots, lengths = np.array([1, 0, 2, 1, 1]), np.array([1, 9, 4])
    first_columns, column = np.array([0, 5, 11, 3, 0]), 11  # the third row has nothing behind it
    vectors = drawn(5, heads + 2 * kv_heads, size) * 2
    rotary = drawn(5, 1, size, seed=1), drawn(5, 1, size, seed=2)
    places = enumerate(((3, 9), (3, 9), (7, 16), (7, 16)))
    stored = [drawn(rows, kv_heads, width, size, seed=3 + number) for number, (rows, width) in places]
    expected = attended(vectors, rotary, stored, slots, lengths, first_columns, column, heads)
    kept = [tensor.clone() for tensor in stored]
    for prompt, own in zip(stored[:2], stored[2:], strict=True):  # whatever no row has written is nobody's
        prompt[0, :, 1:], prompt[2, :, 4:], own[:, :, 12:], own[2, :, :11] = (float("nan"),) * 4
    mixed = cpu_kernels.attend(
        *(vectors[:, : heads + kv_heads], vectors[:, heads + kv_heads :], rotary, stored),
        *(random.permutation(5), slots, lengths, first_columns, column),
    )
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(stored[3][:5, :, 11], vectors[:, heads + kv_heads :])
    assert torch.equal(stored[3][:5, :, 5:11][[0, 1, 3, 4]], kept[3][:5, :, 5:11][[0, 1, 3, 4]])


def test_a_score_far_above_all_others_takes_all_of_the_weight():
    vectors = torch.zeros(1, 3, 2)
    vectors[0, 0, 0] = 1e4  # the query; key and value of the present column are zero
    stored = [torch.tensor([[[[1.0, 0.0], [-1.0, 0.0]]]]), torch.tensor([[[[3.0, 4.0], [5.0, 6.0]]]])]
    stored += [torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)]
    rotary = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    zero = np.zeros(1, dtype=np.int64)
    mixed = cpu_kernels.attend(vectors[:, :2], vectors[:, 2:], rotary, stored, zero, zero, np.array([2]), zero, 0)
    assert mixed.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral"])
@torch.inference_mode()
def test_every_step_gives_the_logits_of_the_whole_sequence(name):
    model = make_model(name)
    take_rows_in_and_out(Rollout(model, layers_for_decoding(layers_of(model)), 1, Cache(compiled=True)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 32), (6, 2, 10), (3, 1, 64), (2, 2, 128)])
def test_packed_attention_and_its_gradients_are_those_of_a_dense_mask(heads, kv_heads, size):
    # Two prompts of 9 and 1 tokens with responses of 1, 14, 40 and 3, and a prompt that nothing follows.
    segments = [
        (0, 9, 0, 0),
        (9, 1, 0, 9),
        (10, 14, 0, 9),
        (24, 1, 0, 0),
        (25, 40, 24, 1),
        (65, 3, 24, 1),
        (68, 5, 0, 0),
    ]
    mask = torch.zeros(73, 73, dtype=torch.bool)
    for first, length, prompt, prompt_length in segments:
        for token in range(first, first + length):
            mask[token, first : token + 1] = mask[token, prompt : prompt + prompt_length] = True
    query, key, value = (drawn(73, count, size, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads)))
    slope = drawn(73, heads, size, seed=5)
    exact = [each.double().requires_grad_() for each in (query, key, value)]
    q, k, v = (each.transpose(0, 1) for each in exact)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (k, v))
    scores = (0.3 * q @ k.mT).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(dim=-1) @ v).transpose(0, 1)
    table = np.array(segments)
    output, logsumexp = cpu_kernels.packed_attention(query, key, value, table, 0.3)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(dim=-1).detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected, exact, slope.double())
    found = cpu_kernels.packed_attention_backward(slope, query, key, value, output, logsumexp, table, 0.3)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() < 2e-6 * theirs.norm()


def test_long_segments_are_left_to_torch(monkeypatch):
    segments = (Segment(0, 20), Segment(20, 30, 0, 20), Segment(50, 4))
    packing = Packing(segments, torch.device("cpu"))
    assert packing.longest == 50
    key = drawn(54, 1, 32, seed=1)
    query, value = drawn(54, 2, 32).requires_grad_(), drawn(54, 1, 32, seed=2).requires_grad_()
    compiled = packed_attention(query, key, value, packing, 0.2)
    of_compiled = torch.autograd.grad(compiled.square().sum(), (query, value))
    monkeypatch.setattr("veritune.packing.COMPILED_NUMBERS", 50 * 32 - 1)
    monkeypatch.setattr(cpu_kernels, "packed_attention", None)
    plain = packed_attention(query, key, value, packing, 0.2)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(of_compiled, torch.autograd.grad(plain.square().sum(), (query, value)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_a_models_gradient_is_that_without_the_kernels(random_policy, monkeypatch):
    prompts, responses = [[5, 6, 7]] * 3 + [[8]], [[9] * 20, [10, 11], [12], [3, 4, 5, 6]]

    def gradient():
        model = copy.deepcopy(random_policy.model)
        loss = add_supervised_gradient(
            dataclasses.replace(random_policy, model=model),
            list(zip(prompts, responses, strict=True)),
            response_tokens=27,
            token_budget=40,
        )
        return loss, torch.cat([parameter.grad.to_dense().flatten() for parameter in model.parameters()])

    loss, compiled = gradient()
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    expected_loss, expected = gradient()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert 0 < (compiled - expected).norm() < 1e-5 * expected.norm()


def test_other_numbers_and_devices_are_not_served():
    assert cpu_kernels.serve(torch.zeros(1))
    assert not cpu_kernels.serve(torch.zeros(1, dtype=torch.bfloat16))
    assert not cpu_kernels.serve(torch.zeros(1, device="meta"))
