"""Packed attention and packed rows against one dense mask, and against each row on its own."""

import copy
import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from veritune.model import packing
from veritune.model.decoder_layer import packed_hidden_states
from veritune.model.packing import pack_rows, packed_attention, plain_attention, plain_attention_backward

CPU = torch.device("cpu")
groups_of_rows = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)


def rows_of(groups):
    """Groups of (prompt length, response lengths) as rows; an empty response and one of a single token are rows too."""
    prompts = [[index] * prompt for index, (prompt, lengths) in enumerate(groups) for _ in lengths]
    responses = [[50 + place for place in range(length)] for _, lengths in groups for length in lengths]
    return prompts, responses


def dense_mask(groups):
    """(N, N), True where the position of the first index attends to that of the second, written down token by token."""
    places = []  # (group, response or None, position)
    for group, (prompt, lengths) in enumerate(groups):
        places += [(group, None, position) for position in range(prompt)]
        for response, length in enumerate(lengths):
            places += [(group, response, prompt + position) for position in range(length - 1)]

    def attends(query, key):
        return query[0] == key[0] and key[1] in (None, query[1]) and key[2] <= query[2]

    return torch.tensor([[attends(query, key) for key in places] for query in places])


def test_a_packing_by_hand():
    packed = pack_rows([[1, 2, 3], [1, 2, 3], [4]], [[5, 6, 7], [8], [9, 5]], CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 5, 6, 4, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert packed.predictors.tolist() == [2, 3, 4, 2, 5, 6]
    assert packed.labels.tolist() == [5, 6, 7, 8, 9, 5]
    assert packed.packing.own.queries == (3, 2, 1, 1)
    assert packed.packing.across.bounds == [(0, 2, 0, 3), (2, 3, 3, 4)]
    assert packed.packing.response_positions.tolist() == [3, 4, 6]
    assert packed.packing.prompt_positions.tolist() == [0, 1, 2, 5]


class FlashKernels:
    """What torch's CUDA kernels for runs of queries and keys are given and return, computed span by span on a CPU.

    The arguments go through the operators themselves on the meta device, which refuses what their schemas do not allow
    and tells the shapes that they return.
    """

    def _flash_attention_forward(self, query, key, value, *bounds, scale):
        tensors = (query, key, value)
        shapes = torch.ops.aten._flash_attention_forward(*map(on_meta, (*tensors, *bounds)), scale=scale)
        spans = self.spans(*bounds)
        output, logsumexp = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        for queries, keys in spans:
            parts = (part.transpose(0, 1) for part in (query[queries], *self.shared(query, key[keys], value[keys])))
            mixed, logsumexp[:, queries] = plain_attention(*parts, scale, bounds[5])
            output[queries] = mixed.transpose(0, 1)
        results = (output, logsumexp, *shapes[2:])
        assert [result.shape for result in results] == [shape.shape for shape in shapes]
        return results

    def _flash_attention_backward(self, gradient, query, key, value, output, logsumexp, *bounds, scale):
        tensors = (gradient, query, key, value, output, logsumexp)
        shapes = torch.ops.aten._flash_attention_backward(*map(on_meta, (*tensors, *bounds)), scale=scale)
        assert logsumexp.is_contiguous()
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for queries, keys in self.spans(*bounds):
            parts = (gradient[queries], query[queries], *self.shared(query, key[keys], value[keys]), output[queries])
            heads_first = [part.transpose(0, 1) for part in parts]
            found = plain_attention_backward(*heads_first, logsumexp[:, queries], scale, bounds[5])
            for result, part, place in zip(results, found, (queries, keys, keys), strict=True):
                result[place] = part.transpose(0, 1).unflatten(1, (result.shape[1], -1)).sum(dim=2)
        assert [result.shape for result in results] == [shape.shape for shape in shapes]
        return results

    @staticmethod
    def spans(query_ends, key_ends, longest_queries, longest_keys, dropout, *_):
        assert dropout == 0
        spans = []
        for ends, longest in ((query_ends, longest_queries), (key_ends, longest_keys)):
            assert ends.dtype == torch.int32
            assert ends.diff().max() == longest
            spans.append([slice(start, stop) for start, stop in pairwise(ends.tolist())])
        return list(zip(*spans, strict=True))

    @staticmethod
    def shared(query, *keys):
        """Fewer key than query heads, each for as many of them."""
        return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in keys]


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@settings(max_examples=90, deadline=None)
@given(groups=groups_of_rows, key_heads=st.sampled_from([1, 2, 4]), kernel=st.sampled_from(["cpu", "cuda", "none"]))
def test_output_and_gradients_are_those_of_a_dense_mask(groups, key_heads, kernel):
    packed = pack_rows(*rows_of(groups), CPU)
    length = packed.input_ids.shape[1]
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(length, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    upstream = torch.randn(length, 4, 8, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "cuda":
            patch.setattr(packing, "_has_flash_kernel", lambda query: True)
            patch.setattr(packing, "aten", FlashKernels())
        if kernel == "none":  # what a device without a kernel runs
            patch.setattr(packing, "_cpu_attention", plain_attention)
            patch.setattr(packing, "_cpu_attention_backward", plain_attention_backward)
        output = packed_attention(query, key, value, packed.packing, scale=0.3)
        gradients = torch.autograd.grad(output, (query, key, value), upstream)
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    expected = scaled_dot_product_attention(*heads_first, attn_mask=dense_mask(groups), scale=0.3, enable_gqa=True)
    expected = expected[0].transpose(0, 1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (query, key, value), upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def exact_rms_norm(norm, hidden):
    return norm.weight * hidden / (hidden.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_models_hidden_states_and_gradient_are_those_of_rows_on_their_own(random_policy, dtype):
    generator = random.Random(3)
    size = random_policy.model.config.vocab_size
    prompts, responses = [], []
    for siblings in (3, 1, 4):
        prompt = [generator.randrange(size) for _ in range(generator.randint(1, 9))]
        for _ in range(siblings):
            prompts.append(prompt)
            responses.append([generator.randrange(size) for _ in range(generator.choice([1, 2, 17]))])
    alone, together = copy.deepcopy(random_policy.model).to(dtype), copy.deepcopy(random_policy.model).to(dtype)
    for module in alone.modules():
        if type(module).__name__.endswith("RMSNorm"):  # the model's own are in single precision
            module.forward = partial(exact_rms_norm, module)
    expected = torch.cat(
        [
            alone.base_model(torch.tensor([[*prompt, *response]])).last_hidden_state[0, len(prompt) - 1 : -1]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    hidden = packed_hidden_states(together, pack_rows(prompts, responses, CPU))
    allowed = 1e-5 if dtype == torch.float32 else 1e-12
    assert (hidden - expected).norm() / expected.norm() < allowed
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = []
    for model, states in ((alone, expected), (together, hidden)):
        (states * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.base_model.parameters()]).double())
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < allowed
