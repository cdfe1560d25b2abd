"""A decode step against the whole sequence in the model's own forward pass, whatever became of the rows before it."""

import numpy as np
import pytest
import torch
import transformers

from tracing import Tracer
from veritune.engines.native.decode import (
    Cache,
    assign_slots,
    close_gaps,
    decode,
    fill_gaps,
    graph_size,
    layers_for_decoding,
)
from veritune.engines.native.graphs import ReplayedSteps, can_be_captured
from veritune.model.architectures import layers_of

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "qwen2": (
        transformers.Qwen2Config,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}),
    "llama": (
        transformers.LlamaConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": (
        transformers.MistralConfig,
        {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None},
    ),
    "gemma": (transformers.GemmaConfig, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 128}),
}


def make_model(name):
    """Weights far from zero, norms and biases too, so that whatever is left out or attended by mistake shows."""
    config, options = MODELS[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SHAPE, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


class Rollout:
    """Random rows through the cache, and what each of them consists of by now."""

    def __init__(self, model, layers, seed, cache=None, decode=decode):
        self.model, self.layers, self.cache, self.decode = model, layers, cache or Cache(), decode
        self.random = np.random.default_rng(seed)
        self.sequences = []

    def admit(self, lengths, rows):
        prompts = [self.random.integers(50, size=length).tolist() for length in lengths]
        padded = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
        prefilled = self.model(input_ids=padded, use_cache=True).past_key_values.layers
        self.cache.admit([(layer.keys, layer.values) for layer in prefilled], lengths, np.array(rows))
        self.sequences += [list(prompts[index]) for index in rows]

    def step(self, rows):
        tokens = self.random.integers(50, size=len(self.sequences)).tolist()
        positions = [len(sequence) for sequence in self.sequences]
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)
        self.cache.begin_step(rows, 1000)
        beyond = [0] * (self.cache.rows - len(tokens))
        tokens, positions = torch.tensor([tokens + beyond, positions + beyond])
        logits = self.decode(self.model, self.layers, self.cache, tokens, positions)
        assert logits.isfinite().all()
        for sequence, row in zip(self.sequences, logits[: len(self.sequences)], strict=True):
            expected = self.model(input_ids=torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-5)

    def release(self, *gone):
        finished = np.isin(np.arange(len(self.sequences)), gone)
        self.cache.release(finished)
        for source, target in zip(*fill_gaps(finished), strict=True):
            self.sequences[target] = self.sequences[source]
        del self.sequences[len(self.sequences) - len(gone) :]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("own_forward", [False, True])
@torch.inference_mode()
def test_every_step_gives_the_logits_of_the_whole_sequence(name, own_forward):
    model = make_model(name)
    layers = layers_of(model)
    assert (layers is None) == (name in ("gemma", "gpt2"))
    take_rows_in_and_out(Rollout(model, None if own_forward or layers is None else layers_for_decoding(layers), seed=1))


def take_rows_in_and_out(rollout):
    rollout.admit([9, 5, 1], [0, 0, 0, 1, 1, 2])
    for _ in range(3):
        rollout.step(rows=8)
    rollout.release(0, 3, 5)  # a first, a middle and a last row; the third prompt goes with its only one
    rollout.step(rows=8)
    rollout.admit([7, 2], [0, 1, 1, 1])  # later, beside rows with a past, in rows with another row's remains
    for _ in range(12):  # across two growths of the cache
        rollout.step(rows=8)
    rollout.release(0, 1, 2)  # all rows of the two oldest prompts, so that the rest starts at a later column
    for _ in range(9):
        rollout.step(rows=4)
    rollout.release(0, 1, 2, 3)
    rollout.admit([4], [0, 0])
    rollout.step(rows=2)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral"])
@torch.inference_mode()
def test_replayed_steps_give_the_logits_of_the_whole_sequence(name):
    model, tracer = make_model(name), Tracer()
    take_rows_in_and_out(
        Rollout(model, layers_for_decoding(layers_of(model)), 1, Cache(most_siblings=3), ReplayedSteps(tracer))
    )
    # 26 steps in 5 allocations: three times rows come, twice all columns are full. The first step of each runs as it
    # is, and the last allocation has no other.
    assert (tracer.captures, tracer.replays) == (4, 21)


def test_the_cache_grows_in_blocks_and_not_beyond_what_will_be_written():
    cache, widths = Cache(), []
    cache.admit([(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))], [3], np.zeros(2, dtype=np.int64))
    for written in range(45):
        cache.begin_step(2, 45 - written)
        widths.append(cache.width)
    # Blocks of 8, 8 and 16 columns, by the root of 6 * 8 and of 6 * 16; after 32, of 16 again, of which 13 are needed.
    assert widths == [8] * 8 + [16] * 8 + [32] * 16 + [45] * 13


def test_few_sizes_of_rows_are_captured():
    assert [graph_size(rows) for rows in (1, 8, 9, 13, 24, 25, 33, 100, 256, 257)] == [
        *(8, 8, 12, 16, 24, 32, 48, 128, 256, 384)
    ]


@torch.inference_mode()
def test_steps_that_ask_the_host_are_not_captured():
    assert can_be_captured(make_model("llama"))
    assert not can_be_captured(make_model("gemma"))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.Qwen2Config(**{**SHAPE, **MODELS["qwen2"][1]}, rope_parameters=rope)
    assert not can_be_captured(transformers.AutoModelForCausalLM.from_config(config))


@torch.inference_mode()
def test_a_layer_with_an_adapter_is_left_to_the_model_itself():
    class Adapter(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states) + 1

    model = make_model("qwen2")
    model.model.layers[1].mlp.up_proj.__class__ = Adapter
    assert layers_of(model) is None


def test_the_last_rows_fill_the_gaps():
    gone = np.array([True, False, False, True, False, True, False])
    sources, targets = fill_gaps(gone)
    assert (sources.tolist(), targets.tolist()) == ([4, 6], [0, 3])
    assert close_gaps(np.arange(7), gone).tolist() == [4, 1, 2, 6]
    assert close_gaps(np.arange(14).reshape(7, 2), gone).tolist() == [[8, 9], [2, 3], [4, 5], [12, 13]]


def test_siblings_sit_side_by_side():
    slots = assign_slots(np.array([1, 0, 1, 1, 0]), 2, torch.device("cpu"))
    assert (slots.prompts, slots.slots) == (2, 3)
    assert slots.slot_of_row.tolist() == [3, 0, 4, 5, 1]
    assert slots.row_of_slot.tolist() == [1, 4, 0, 0, 2, 3]
    values = torch.arange(5 * 4 * 2.0).view(5, 4, 2)  # four heads of queries for two of keys
    gathered = slots.gather(values, 4)
    assert gathered.shape == (4, 6, 2)
    # The second head of the second prompt's keys is asked by the last two heads of its three rows 0, 2 and 3.
    assert torch.equal(gathered[3], torch.cat([values[0, 2:], values[2, 2:], values[3, 2:]]))
    assert torch.equal(slots.scatter(gathered), values)
    assert assign_slots(np.array([0, 0, 1, 1]), 2, torch.device("cpu")).slots == 2
    assert assign_slots(np.array([0, 0, 1, 1]), 2, torch.device("cpu")).row_of_slot is None
    assert assign_slots(np.array([0, 1, 0, 1]), 2, torch.device("cpu")).row_of_slot.tolist() == [0, 2, 1, 3]
