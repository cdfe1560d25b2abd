"""A compiled decode step against the whole sequence in the model's own forward pass."""

import numpy as np
import pytest
import torch
import transformers
from test_decode import Rollout, make_model, take_rows_in_and_out

from veritune.engines.native.compiled import PAGE, PANEL, CompiledSteps, PagedCache, layers_in_panels
from veritune.model.architectures import layers_of
from veritune.model.kernels import cpu as cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="installed without a C compiler")


class PoisonedCache(PagedCache):
    """Whatever a row has not written is nobody's, or another's."""

    def admit(self, prefilled, lengths, prompts):
        for tensor in (tensor for pair in prefilled for tensor in pair):
            for prompt, length in enumerate(lengths):
                tensor[prompt, :, length:] = float("nan")
        super().admit(prefilled, lengths, prompts)

    def _new_page(self):
        return super()._new_page().fill_(float("nan"))


def compiled(model, seed=1):
    return Rollout(model, layers_in_panels(layers_of(model)), seed, PoisonedCache(), CompiledSteps())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral"])
@torch.inference_mode()
def test_every_step_gives_the_logits_of_the_whole_sequence(name):
    take_rows_in_and_out(compiled(make_model(name)))


def random_model(hidden, inner, heads, kv_heads, size):
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2, "head_dim": size}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 50}
    torch.manual_seed(size)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, max_position_embeddings=64)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [6, 10, 32, 64, 128])
@torch.inference_mode()
def test_heads_of_all_sizes_and_shared_keys(heads, kv_heads, size):
    rollout = compiled(random_model(20, 30, heads, kv_heads, size))
    rollout.admit([9, 1, 4], [1, 0, 2, 1, 1])
    for _ in range(10):
        rollout.step(rows=5)


@pytest.mark.parametrize(("hidden", "inner"), [(16, 256), (48, 257), (300, 520), (1, 3)])
@torch.inference_mode()
def test_products_of_every_number_of_rows(hidden, inner):
    """Panels that are full and not, more inputs than one part of a panel has, and every remainder of six rows."""
    model = random_model(hidden, inner, 2, 1, 6)
    for rows in range(1, 14):
        rollout = compiled(model, seed=rows)
        rollout.admit([3], [0] * rows)
        rollout.step(rows=rows)


@torch.inference_mode()
def test_a_score_far_above_all_others_takes_all_of_the_weight():
    model = make_model("mistral")
    for layer in model.base_model.layers:
        layer.self_attn.q_proj.weight.data *= 1e3
    rollout = compiled(model)
    rollout.admit([9, 5], [0, 1, 1])
    for _ in range(9):
        rollout.step(rows=3)


@torch.inference_mode()
def test_a_matrix_in_panels():
    layer = layers_of(make_model("llama"))[0]
    panels = layers_in_panels([layer])[0]
    matrix = torch.cat((layer.mlp.gate, layer.mlp.up))  # (80, 24), and five panels
    assert panels.gate_and_up.shape == (5, 24, PANEL)
    assert panels.gate_and_up[3, 7, 2] == matrix[3 * PANEL + 2, 7]
    assert panels.o_proj.shape == (2, 24, PANEL)
    assert np.count_nonzero(panels.o_proj[1].numpy()[:, 8:]) == 0


@torch.inference_mode()
def test_rows_over_many_pages_that_come_and_go():
    model = random_model(20, 30, 2, 1, 6)
    rollout = compiled(model)
    rollout.admit([5, 2], [0, 0, 1])
    for _ in range(PAGE - 1):
        rollout.step(rows=3)
    rollout.admit([3], [0, 0])  # at the beginning of a page, beside rows at the end of theirs
    for _ in range(2):
        rollout.step(rows=5)
    rollout.release(1, 4)
    for _ in range(2 * PAGE):  # in the pages of those that went, and others
        rollout.step(rows=3)


def test_a_row_has_a_page_for_sixteen_tokens_and_gives_them_up():
    cache = PagedCache()
    cache.admit([(torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 5))] * 2, [3], np.zeros(7, dtype=np.int64))
    for step in range(3 * PAGE):
        cache.begin_step()
        assert cache.written.tolist() == [step] * cache.live
        begun = cache.addresses[:, : step // PAGE + 1]
        assert len(np.unique(begun)) == begun.size  # a page belongs to one row
        assert [[page.data_ptr() for page in pages] for pages in cache._pages] == begun.tolist()
        if step == PAGE:
            cache.release(np.arange(7) < 4)
    assert begun.shape == (3, 3)
    assert cache._pages[0][0].shape == (2, 2, 1, PAGE, 5)
