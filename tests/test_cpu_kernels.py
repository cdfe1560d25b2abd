"""The compiled kernels against the same formulas in float64."""

import math

import numpy as np
import pytest
import torch

from test_decode import Rollout, make_model, take_rows_in_and_out
from veritune import cpu_kernels
from veritune.decode import Cache, layers_of

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="installed without a C compiler")


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [1, 7, 192, 1536])
def test_rms_norm(size):
    hidden, weight = torch.randn(5, size) * 3, torch.randn(size)
    square = hidden.double().square().mean(dim=1, keepdim=True)
    close(cpu_kernels.rms_norm(hidden, weight, 1e-5), hidden * weight.double() / (square + 1e-5).sqrt())


def test_rms_norm_of_nothing_but_zeros():
    assert cpu_kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).tolist() == [[0.0] * 8] * 2


def test_swiglu_by_hand():
    product = cpu_kernels.swiglu(torch.tensor([[1.0, -1.0, 0.0, 2.0, 3.0, 5.0]]))
    sigmoid = 1 / (1 + math.exp(-1))
    close(product[0], torch.tensor([2 * sigmoid, -3 * (1 - sigmoid), 0.0], dtype=torch.float64))


def test_swiglu_over_all_of_its_range():
    gate = torch.linspace(-200, 200, 40001)
    product = cpu_kernels.swiglu(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    close(product, gate.double() * torch.sigmoid(gate.double()))


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
@pytest.mark.parametrize("threads", [1, 3])
def test_attention(heads, kv_heads, size, threads):
    random = np.random.default_rng(size)
    slots, lengths = np.array([1, 0, 2, 1, 1]), np.array([1, 9, 4])
    first_columns, column = np.array([0, 5, 11, 3, 0]), 11  # the third row has nothing behind it
    vectors = torch.randn(5, heads + 2 * kv_heads, size) * 2
    rotary = torch.randn(5, 1, size), torch.randn(5, 1, size)
    stored = [torch.randn(rows, kv_heads, width, size) for rows, width in ((3, 9), (3, 9), (7, 16), (7, 16))]
    expected = attended(vectors, rotary, stored, slots, lengths, first_columns, column, heads)
    kept = [tensor.clone() for tensor in stored]
    for prompt, own in zip(stored[:2], stored[2:], strict=True):  # whatever no row has written is nobody's
        prompt[0, :, 1:], prompt[2, :, 4:], own[:, :, 12:], own[2, :, :11] = (float("nan"),) * 4
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mixed = cpu_kernels.attend(
            vectors[:, : heads + kv_heads], vectors[:, heads + kv_heads :], rotary, stored,
            random.permutation(5), slots, lengths, first_columns, column,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
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
    take_rows_in_and_out(Rollout(model, layers_of(model), 1, Cache(compiled=True)))


def test_other_numbers_and_devices_are_not_served():
    assert cpu_kernels.serve(torch.zeros(1))
    assert not cpu_kernels.serve(torch.zeros(1, dtype=torch.bfloat16))
    assert not cpu_kernels.serve(torch.zeros(1, device="meta"))
