"""The compiled kernels against the same formulas in float64."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.packing import Packing, Segment, packed_attention
from veritune.trainer.microbatches import supervised_rank_backward

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="installed without a C compiler")


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 7, 192, 1536])
def test_rms_norm_and_its_gradients(size):
    hidden, weight = drawn(2, 5, size) * 3, drawn(size, seed=1)
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = exact[0] * exact[1] / (exact[0].square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    close(cpu_kernels.rms_norm(hidden, weight, 1e-5), expected.detach())
    grad_output = drawn(2, 5, size, seed=2)
    grad_hidden, grad_weight = torch.autograd.grad(expected, exact, grad_output.double())
    found = cpu_kernels.rms_norm_backward(grad_output, hidden, weight, 1e-5)
    close(found[0], grad_hidden)
    torch.testing.assert_close(found[1].double(), grad_weight, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_nothing_but_zeros():
    assert cpu_kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).tolist() == [[0.0] * 8] * 2


def test_swiglu_by_hand():
    product = cpu_kernels.swiglu(torch.tensor([1.0, -1.0, 0.0]), torch.tensor([2.0, 3.0, 5.0]))
    sigmoid = 1 / (1 + math.exp(-1))
    close(product, torch.tensor([2 * sigmoid, -3 * (1 - sigmoid), 0.0], dtype=torch.float64))


@pytest.mark.usefixtures("threads")
def test_swiglu_and_its_gradients_over_all_of_their_range():
    gate, up = torch.linspace(-200, 200, 40_000).view(4, 10_000), drawn(4, 10_000)
    exact = [each.double().requires_grad_() for each in (gate, up)]
    expected = exact[0] * torch.sigmoid(exact[0]) * exact[1]
    close(cpu_kernels.swiglu(gate, up), expected.detach())
    grad_output = drawn(4, 10_000, seed=2)
    wanted = torch.autograd.grad(expected, exact, grad_output.double())
    cpu_kernels.swiglu_backward_(grad_output, gate, up)
    torch.testing.assert_close(gate.double(), wanted[0], rtol=1e-5, atol=2e-5)
    close(up, wanted[1])


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
    grad_output = drawn(73, heads, size, seed=5)
    exact = [each.double().requires_grad_() for each in (query, key, value)]
    q, k, v = (each.transpose(0, 1) for each in exact)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (k, v))
    scores = (0.3 * q @ k.mT).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(dim=-1) @ v).transpose(0, 1)
    table = np.array(segments)
    output, logsumexp = cpu_kernels.packed_attention(query, key, value, table, 0.3)
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(dim=-1).detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected, exact, grad_output.double())
    found = cpu_kernels.packed_attention_backward(grad_output, query, key, value, output, logsumexp, table, 0.3)
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
    monkeypatch.setattr("veritune.model.packing.COMPILED_NUMBERS", 50 * 32 - 1)
    monkeypatch.setattr(cpu_kernels, "packed_attention", None)
    plain = packed_attention(query, key, value, packing, 0.2)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(of_compiled, torch.autograd.grad(plain.square().sum(), (query, value)), strict=True):
        # Each is 5e-7 of its norm from float64; where single numbers round is the processor's.
        assert (ours - theirs).norm() < 2e-6 * theirs.norm()


def test_a_models_gradient_is_that_without_the_kernels(random_policy, monkeypatch):
    prompts, responses = [[5, 6, 7]] * 3 + [[8]], [[9] * 20, [10, 11], [12], [3, 4, 5, 6]]

    def gradient():
        model = copy.deepcopy(random_policy.model)
        loss = supervised_rank_backward(
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


@pytest.mark.usefixtures("threads")
def test_threads_are_started_once_whatever_the_parts():
    for rows in (1, 2, 5):
        cpu_kernels.rms_norm(drawn(rows, 8), torch.ones(8), 1e-6)
    before = cpu_kernels._threads.cache_info().misses
    for rows in (2, 5, 2):
        cpu_kernels.rms_norm(drawn(rows, 8), torch.ones(8), 1e-6)
    assert cpu_kernels._threads.cache_info().misses == before


def test_other_numbers_and_devices_are_not_served():
    assert cpu_kernels.serve(torch.zeros(1))
    assert not cpu_kernels.serve(torch.zeros(1, dtype=torch.bfloat16))
    assert not cpu_kernels.serve(torch.zeros(1, device="meta"))
