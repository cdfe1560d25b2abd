"""The plan against numbers counted by hand, against what autograd keeps, and as a person meets it."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from veritune.cli import _resolve, main
from veritune.commands.plan import PlanConfig, make_plan
from veritune.commands.plan.devices import DEVICES, Device, measure_device
from veritune.commands.plan.memory import cache_columns, kept_by_layer, rollout_memory, training_memory
from veritune.commands.plan.planning import command_line, step_tokens
from veritune.commands.plan.seconds import Work, decode_seconds, prefill_seconds, prompt_passes, survival
from veritune.commands.plan.shapes import shape_of
from veritune.core.errors import ConfigError
from veritune.engines.native.decode import Cache
from veritune.model.decoder_layer import packed_hidden_states
from veritune.model.packing import pack_rows
from veritune.model.policy import ATTENTION
from veritune.recipes.grpo import GRPOConfig
from veritune.trainer.loop import make_optimizer
from veritune.trainer.microbatches import cut_microbatches

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Qwen2.5-Math-1.5B."""
TINY = {
    **QWEN,
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SLOW = Device("slow", 1.0, 1000.0, 500.0, 100.0, "made up")
"""A thousand operations a second in bfloat16, five hundred in float32, a hundred bytes."""


def folder_of(tmp_path, **config):
    """A model folder of config.json alone."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("qwen"), **QWEN)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("tiny"), **TINY)


# --- Shapes


def test_the_parameters_of_qwen_by_hand(qwen):
    shape = shape_of(qwen)
    # q and o 1536², k and v 1536 × 256, three of 1536 × 8960; biases of q, k and v; two norms
    matrices = 2 * 2_359_296 + 2 * 393_216 + 3 * 13_762_560
    layer = matrices + (1536 + 256 + 256) + 2 * 1536
    assert matrices == 46_792_704
    assert shape.parameters == 28 * layer + 233_373_696 + 1536 == 1_543_714_304
    assert shape.layer_matrices == 28 * 46_792_704
    assert shape.head_matrix == 233_373_696
    assert shape.tensors == 28 * (7 + 3 + 2) + 2
    assert shape.cache_bytes(2) == 28_672  # 28 layers × keys and values × 2 heads × 128 × 2 bytes
    assert (shape.query, shape.key_value, shape.key_value_heads, shape.head_norms) == (1536, 256, 2, False)


def test_an_untied_head_is_counted_twice_over(tmp_path):
    tied = shape_of(folder_of(tmp_path / "tied", **TINY))
    untied = shape_of(folder_of(tmp_path / "untied", **{**TINY, "tie_word_embeddings": False}))
    assert untied.parameters - tied.parameters == 50 * 24
    assert (untied.layer_matrices, untied.head_matrix) == (tied.layer_matrices, tied.head_matrix)


def test_the_embedded_policy_has_its_parameters():
    from veritune.model.policy import load_policy

    loaded = load_policy("embedded").model
    assert shape_of("embedded").parameters == sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}, "type 'gpt2'; its layers must be alike"),
        ({**TINY, "hidden_size": "wide"}, "expected int, got str"),
        ({**TINY, "num_attention_heads": 0}, "makes no model"),
        ({**TINY, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "not full in all layers"),
        ({**TINY, "num_hidden_layers": 0}, "its layers must be alike"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}, "makes no model"),
    ],
)
def test_a_config_that_makes_no_countable_model_is_refused(tmp_path, config, said):
    with pytest.raises(ConfigError, match=r"^model is ") as refused:
        shape_of(folder_of(tmp_path, **config))
    assert said in str(refused.value)


# --- Memory


def bytes_kept(config_class, layers, dtype, of_family, **changes):
    """Bytes that autograd keeps for 37 packed positions, weights left out, as hooks see them."""
    import transformers

    config = getattr(transformers, f"{config_class}Config")(**{**TINY, "num_hidden_layers": layers, **changes})
    model = getattr(transformers, f"{config_class}ForCausalLM")(config).to(dtype).train()
    model.set_attn_implementation(ATTENTION)
    if not of_family:
        model.config.model_type = "of another family"
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # the reference keeps the address from being given away again
        return tensor

    packed = pack_rows(
        [list(range(1, 8))] * 3, [list(range(11)), list(range(12)), list(range(10))], torch.device("cpu")
    )
    assert packed.input_ids.shape == (1, 37)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packed_hidden_states(model, packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        ("Qwen2", {}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Mistral", {"num_key_value_heads": 1}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
@pytest.mark.parametrize("of_family", [True, False])
def test_a_layer_keeps_what_autograd_keeps_of_it(tmp_path, config_class, changes, dtype, of_family):
    config = {**TINY, **changes, "model_type": config_class.lower()}
    shape = shape_of(folder_of(tmp_path, **config))
    if not of_family:
        shape = dataclasses.replace(shape, model_type="of another family")
    three, two = (bytes_kept(config_class, layers, dtype, of_family, **changes) for layers in (3, 2))
    another_layer = three - two
    assert 37 * kept_by_layer(shape, dtype) == another_layer


def test_what_a_layer_of_qwen_keeps_by_hand(qwen):
    # bfloat16: two norms' 1536; q, out, k, v and 12 normalisers; two of 8960
    by_hand = 2 * 2 * 1536 + 2 * (2 * 1536 + 2 * 256) + 4 * 12 + 2 * 2 * 8960
    assert kept_by_layer(shape_of(qwen), torch.bfloat16) == by_hand == 49_200


def test_weights_gradients_and_moments_are_those_of_the_optimiser(tiny):
    import transformers

    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY)).to(dtype)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = make_optimizer(model, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.step()
        state = [value for kept in optimizer.state.values() for value in kept.values()]
        memory = training_memory(shape_of(tiny), PlanConfig(model=tiny), SLOW, dtype, 100)
        assert memory.moments == sum(value.nbytes for value in state)
        assert memory.weights == sum(parameter.nbytes for parameter in model.parameters())
        assert memory.gradients == memory.weights
        assert memory.reference == 0


def test_the_head_and_a_layer_of_qwen_by_hand(qwen):
    shape, config = shape_of(qwen), PlanConfig(model=qwen, device="h200")
    memory = training_memory(shape, config, DEVICES["h200"], torch.bfloat16, 8192)
    # 2²⁷ logits a chunk are 883 tokens of 151,936: logits in bfloat16, which their gradient replaces, and log-softmax
    # in float32, 2 + 4 bytes; beside the matrix's float32 gradient and two tensors as large as the hidden state.
    chunk = 883 * 151_936
    assert memory.head == 4 * 233_373_696 + 6 * chunk + 2 * 8192 * 1536 * 2
    # In float32 there are the logits, whatever they are turned into, and the gradient that is there is added to.
    exact = training_memory(shape, config, DEVICES["h200"], torch.float32, 100)
    assert exact.head == 4 * 100 * 151_936 + 2 * 100 * 1536 * 4
    assert memory.layer == 8192 * 2 * (2 * 8960 + 4 * 1536)
    # Without a kernel, attention over one response of 320 tokens has four float32 tensors of every head's scores.
    assert exact.layer == 100 * 4 * (2 * 8960 + 4 * 1536) + 4 * 4 * 12 * 320**2
    # Where compiled layers turn SwiGLU's inputs into their gradients, only its product's is beside them.
    on_cpu = training_memory(shape, config, dataclasses.replace(SLOW, is_gpu=False), torch.float32, 100)
    assert on_cpu.layer == 100 * 4 * (8960 + 4 * 1536)
    # Beside the layers the hidden state, and a cosine and sine a head's place.
    assert memory.activations == 8192 * (28 * 49_200 + 2 * 1536 + 2 * 2 * 128)
    assert memory.peak == memory.resident + memory.gradients + memory.activations + max(memory.head, memory.layer)


def test_checkpointing_keeps_the_layers_inputs_and_works_on_one_layer(qwen):
    shape, config = shape_of(qwen), PlanConfig(model=qwen, device="h200", activation_checkpointing=True)
    memory = training_memory(shape, config, DEVICES["h200"], torch.bfloat16, 1000)
    assert memory.activations == 1000 * (28 * 1536 * 2 + 2 * 1536 + 2 * 2 * 128)
    assert memory.layer == 1000 * (49_200 + 2 * (2 * 8960 + 4 * 1536))


def test_a_reference_is_another_copy_of_the_weights(tiny):
    without = training_memory(shape_of(tiny), PlanConfig(model=tiny), SLOW, torch.float32, 10)
    held = training_memory(shape_of(tiny), PlanConfig(model=tiny, kl_coefficient=0.1), SLOW, torch.float32, 10)
    assert held.resident - without.resident == without.weights


def test_the_cache_of_the_native_engine_by_hand(qwen):
    plan = make_plan(PlanConfig(model=qwen, device="h200", prompt_tokens=200, max_tokens=1024))
    # A column for each of 1,023 tokens and some to spare, and the prompts of 32 groups once
    assert plan.rollouts.cache == (256 * cache_columns(1023)[1] + 32 * 200) * 28_672
    assert plan.rollouts.weights == 2 * 28 * 46_792_704  # the layers' matrices again, side by side
    few = make_plan(PlanConfig(model=qwen, device="h200", prompt_tokens=200, max_tokens=1024, max_rows=100))
    assert few.rollouts.places == 100
    assert few.rollouts.cache == (100 * cache_columns(1023)[1] + 13 * 200) * 28_672


def test_the_pages_of_compiled_steps_by_hand(qwen):
    config = PlanConfig(model=qwen, prompt_tokens=200, max_tokens=1024, rollout_batch_size=256, group_size=8)
    memory = rollout_memory(shape_of(qwen), config, dataclasses.replace(SLOW, is_gpu=False), torch.float32)
    # 64 pages of 16 tokens hold the 1,023 that are written, at 56 KiB a token; the prompts of 32 groups once.
    assert memory.cache == (256 * 1024 + 32 * 200) * 57_344
    # They do not grow by copies: the most beside is sampling, 28 bytes for each number of the logits.
    assert memory.working == 256 * 151_936 * 28


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 60, 200, 701])
def test_the_cache_has_as_many_columns_as_the_engines(tokens):
    cache = Cache()
    cache.admit([(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))], [3], np.zeros(2, dtype=np.int64))
    widths = [0]
    for number in range(1, tokens):  # the last token is not written
        cache.begin_step(2, tokens - number)
        if cache.width != widths[-1]:
            widths.append(cache.width)
    assert cache_columns(tokens - 1) == ((widths[-2], widths[-1]) if tokens > 1 else (0, 0))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("device", ["l40s", "a100-80", "h200"])
def test_one_token_more_than_the_largest_microbatch_does_not_fit(qwen, device, checkpointing):
    config = PlanConfig(
        model=qwen, device=device, max_tokens=2048, activation_checkpointing=checkpointing, rollout_batch_size=512
    )
    plan = make_plan(config)
    largest = plan.largest_microbatch
    assert largest is not None and config.prompt_tokens + config.max_tokens < largest < step_tokens(config)
    peaks = [
        make_plan(dataclasses.replace(config, microbatch_tokens=tokens)).training.peak
        for tokens in (largest, largest + 1)
    ]
    assert peaks[0] <= 0.95 * DEVICES[device].gib * 2**30 < peaks[1]


def test_the_largest_microbatch_is_at_most_the_step(tiny):
    config = PlanConfig(model=tiny, device="h200", rollout_batch_size=16, prompt_tokens=10, max_tokens=20)
    assert make_plan(config).largest_microbatch == 2 * 10 + 16 * 20 == 340
    assert make_plan(dataclasses.replace(config, microbatch_tokens=341)).training.tokens == 340


def test_a_response_longer_than_the_budget_stands_alone(tiny):
    plan = make_plan(PlanConfig(model=tiny, device="h200", prompt_tokens=40, max_tokens=60, microbatch_tokens=8))
    assert plan.training.tokens == 100


# --- Time


def test_lengths_by_hand():
    assert survival(1.5, 2).tolist() == pytest.approx([1, 0.5])
    assert survival(1, 3).tolist() == pytest.approx([1, 0, 0])
    assert survival(4, 4).tolist() == [1, 1, 1, 1]
    # 1 + r + r² = 1.75 has r = 1/2
    assert survival(1.75, 3).tolist() == pytest.approx([1, 0.5, 0.25])


@given(longest=st.integers(1, 300), share=st.floats(0, 1))
def test_lengths_have_the_mean_and_each_token_ends_as_many(longest, share):
    mean = 1 + share * (longest - 1)
    alive = survival(mean, longest)
    assert float(alive.sum()) == pytest.approx(mean, rel=1e-9)
    assert alive[0] == 1 and bool((alive[1:] <= alive[:-1]).all())
    if longest > 2 and float(alive[1]) > 1e-3:
        assert float(alive[2]) == pytest.approx(float(alive[1]) ** 2)


def test_the_decoding_of_a_tiny_model_by_hand(tiny):
    shape, work = shape_of(tiny), Work(SLOW, torch.float32)
    # q and o 24², k and v 24 × 12, three of 24 × 40, two layers; and 50 × 24
    matrices = 2 * (2 * 576 + 2 * 288 + 3 * 960) + 1200
    assert shape.layer_matrices + shape.head_matrix == matrices == 10_416
    # Three rows of two tokens: one step with three rows, each of which reads a prompt of 5 and one token.
    step = max(2 * matrices * 3 / 500, matrices * 4 / 100)
    operations, moved = 4 * 2 * 24 * 3 * 6, 2 * 2 * 12 * 4 * 3 * 6
    attention = max(operations / 500, moved / 100)
    assert decode_seconds(shape, work, 3, 1, 10, 5, survival(2, 2)) == pytest.approx(step + attention)
    # Siblings read the prompt together: 3 tokens and 5 of the prompt, in place of 18.
    together = max(operations / 500, 2 * 2 * 12 * 4 * 8 / 100)
    assert decode_seconds(shape, work, 3, 3, 10, 5, survival(2, 2)) == pytest.approx(step + together)
    # With half of them alive, 1 - 1/8 of the prompt is expected to be read, and one and a half rows.
    halved = max(operations / 2 / 500, 2 * 2 * 12 * 4 * (1.5 + 5 * 7 / 8) / 100)
    step = max(2 * matrices * 1.5 / 500, matrices * 4 / 100)
    assert decode_seconds(shape, work, 3, 3, 10, 5, survival(1.5, 2)) == pytest.approx(step + halved)
    # Two side by side: one step of two rows and half a step more; the attended positions stay the same.
    step = max(2 * matrices * 2 / 500, matrices * 4 / 100)
    assert decode_seconds(shape, work, 3, 1, 2, 5, survival(2, 2)) == pytest.approx(1.5 * step + attention)


def test_the_prefill_of_a_tiny_model_by_hand(tiny):
    seconds = prefill_seconds(shape_of(tiny), Work(SLOW, torch.bfloat16), 3, 5)
    matrices = 2 * 3 * (5 * 9216 + 1200)  # logits at three ends alone
    attention = 4 * 2 * 24 * 3 * 15  # 1 + 2 + 3 + 4 + 5 pairs for each prompt
    assert seconds == pytest.approx(matrices / 1000 + attention / 1000)


LIMIT = {"device": "h200", "prompt_tokens": 200, "max_tokens": 1024, "microbatch_tokens": 1 << 20}
"""256 rollouts of 32 prompts, in one microbatch."""


def test_qwen_on_an_h200_takes_the_counted_limits(qwen):
    """256 rollouts of 1024 tokens, counted apart from this code: 2.27 s to decode, 3.26 s to train on."""
    seconds = make_plan(PlanConfig(**{**LIMIT, "model": qwen}, engine="vllm")).seconds
    assert seconds.decode == pytest.approx(2.27, abs=0.01)
    assert seconds.train == pytest.approx(3.26, abs=0.01)
    assert seconds.total == pytest.approx(seconds.prefill + seconds.decode + seconds.train + seconds.update)


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("budget", [1, 60, 100, 130, 199, 260, 1000, 5000])
def test_prompts_are_computed_as_often_as_the_trainer_packs_them(group_size, budget):
    config = PlanConfig(
        rollout_batch_size=32, group_size=group_size, prompt_tokens=37, max_tokens=24, microbatch_tokens=budget
    )
    prompts = [[row // group_size] * 37 for row in range(32)]
    cut = cut_microbatches(prompts, [[1] * 24] * 32, range(32), token_budget=budget, device=torch.device("cpu"))
    positions = sum(microbatch.packed.input_ids.numel() for microbatch in cut)
    assert prompt_passes(config) == (positions - 32 * 23) / 37


def test_checkpointing_computes_the_layers_once_more(qwen):
    common = {**LIMIT, "model": qwen}
    plain = make_plan(PlanConfig(**common)).seconds.train
    again = make_plan(PlanConfig(**common, activation_checkpointing=True)).seconds.train
    head = 6 * 233_373_696 * 256 * 1024 / 790e12
    assert again - plain == pytest.approx((plain - head) / 3)


def test_a_reference_costs_one_forward_pass(qwen):
    common = {**LIMIT, "model": qwen}
    seconds = make_plan(PlanConfig(**common, kl_coefficient=0.1)).seconds
    assert seconds.reference == pytest.approx(seconds.train / 3)
    assert make_plan(PlanConfig(**common)).seconds.reference == 0


def test_the_cpu_is_measured():
    (memory,) = re.findall(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
    device = measure_device(torch.device("cpu"), torch.float32)
    assert device.gib * 2**20 == pytest.approx(int(memory), rel=1e-3)
    assert device.float32 > 1e8 and device.copy > 1e7 and not device.is_gpu


# --- GPUs


@pytest.mark.parametrize(
    ("settings", "engines", "flags"),
    [
        ({}, (1, 1), {"device": "cuda:0"}),
        (
            {"gpus": 4},
            (3, 1),
            {"device": "cuda:0", "engine": "vllm-server", "engine_start": "cuda:1,cuda:2,cuda:3"},
        ),
        (
            {"gpus": 2, "engine": "vllm"},
            (1, 2),
            {"device": "cuda:0", "engine": "vllm", "tensor_parallel_size": "2", "sleep_level": "2"},
        ),
        ({"engine": "vllm"}, (1, 1), {"device": "cuda:0", "engine": "vllm", "sleep_level": "2"}),
        ({"activation_checkpointing": True}, (1, 1), {"activation_checkpointing": True}),
    ],
)
def test_the_command_uses_the_gpus_as_planned(qwen, settings, engines, flags):
    config = PlanConfig(model=qwen, device="h100", max_tokens=1024, rollout_batch_size=512, **settings)
    assert config.engines == engines
    words = command_line(make_plan(config))
    assert words[:2] == ["veritune", "grpo"]
    given, name = {}, ""
    for word in words[2:]:
        if word.startswith("--"):
            given[name := word.removeprefix("--").replace("-", "_")] = True
        else:
            given[name] = word
    assert flags.items() <= given.items()
    resolved = _resolve("grpo", GRPOConfig, None, given)  # the command's own reading of its flags
    assert (resolved.policy, resolved.max_tokens, resolved.rollout_batch_size) == (qwen, 1024, 512)
    assert not resolved.off_policy and resolved.engine == config.sampler


def test_servers_share_the_rollouts_and_hold_a_cache_of_their_own(qwen):
    alone = make_plan(PlanConfig(model=qwen, device="h200", engine="vllm", prompt_tokens=200, max_tokens=1024))
    config = PlanConfig(model=qwen, device="h200", gpus=3, prompt_tokens=200, max_tokens=1024, rollout_batch_size=512)
    shared = make_plan(config)
    # Twice the rollouts on two servers take the time that one needs for half of them; training takes twice as long.
    assert shared.seconds.decode == pytest.approx(alone.seconds.decode)
    assert shared.seconds.train == pytest.approx(2 * alone.seconds.train, rel=1e-3)
    weights = 2 * 1_543_714_304
    assert shared.rollouts.cache + weights == pytest.approx(0.85 * 139.7 * 2**30, abs=1)
    assert shared.rollouts.places == 256


def test_a_split_engine_holds_a_share_of_weights_and_cache(qwen):
    config = PlanConfig(model=qwen, device="h200", gpus=4, engine="vllm", prompt_tokens=200, max_tokens=1024)
    config = dataclasses.replace(config, gpu_memory_utilization=0.01)
    memory = make_plan(config).rollouts
    share = int(0.01 * 139.7 * 2**30)
    assert memory.weights == 2 * 1_543_714_304 // 4
    # Two heads of keys and values on four GPUs: each GPU holds one of them.
    assert memory.places == (share - memory.weights) // (1224 * 28_672 // 2) == 41
    with pytest.raises(ConfigError, match=r"^gpus is 5; it must be a divisor of the model's 12 heads"):
        make_plan(dataclasses.replace(config, gpus=5))


def test_what_does_not_fit_is_said_with_a_way_out(qwen):
    small = make_plan(PlanConfig(model=qwen, device="h200", gpu_memory=16, microbatch_tokens=8192))
    assert small.largest_microbatch is not None
    assert [f"microbatch_tokens must be at most {small.largest_microbatch:,}" in fault for fault in small.faults] == [
        True
    ]
    assert make_plan(PlanConfig(model=qwen, gpu_memory=16, device="h200", microbatch_tokens=500)).faults == ()
    # 17 GiB hold 11.5 of weights, moments and gradients, but no pass over 3,000 tokens unless it is computed twice.
    long = PlanConfig(model=qwen, device="h200", gpus=2, gpu_memory=17, prompt_tokens=1000, max_tokens=2000)
    (fault,) = make_plan(long).faults
    (fits,) = re.search(r"with activation_checkpointing, microbatch_tokens of up to ([\d,]+) fit", fault).groups()
    remedied = dataclasses.replace(long, activation_checkpointing=True, microbatch_tokens=int(fits.replace(",", "")))
    assert make_plan(remedied).faults == ()
    assert make_plan(dataclasses.replace(remedied, microbatch_tokens=remedied.microbatch_tokens + 1)).faults != ()
    faults = make_plan(PlanConfig(model=qwen, device="h200", gpu_memory=8)).faults
    assert "weights, moments and gradients alone are too large" in faults[0]
    assert "the trainer's weights and moments alone are too large" in faults[1]
    crowded = make_plan(PlanConfig(model=qwen, device="h200", engine="vllm", gpu_memory_utilization=0.88))
    assert crowded.faults == ()
    crowded = make_plan(PlanConfig(model=qwen, device="h200", engine="vllm", gpu_memory_utilization=0.9))
    assert "lower gpu_memory_utilization" in crowded.faults[0]
    empty = make_plan(PlanConfig(model=qwen, device="h200", gpus=2, gpu_memory_utilization=0.01, microbatch_tokens=500))
    assert "does not hold the weights" in empty.faults[0] and math.isfinite(empty.seconds.total)


# --- As a person meets it


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("gpus", 0, "at least 1"),
        ("gpu_memory", 0.0, "positive, in GiB"),
        ("gpu_memory", math.nan, "positive, in GiB"),
        ("gpu_memory_utilization", 1.5, r"in \(0, 1\]"),
        ("rollout_batch_size", 100, r"a multiple of group_size \(8\)"),
        ("group_size", 1, "at least 2: siblings are compared"),
        ("prompt_tokens", 0, "at least 1"),
        ("max_tokens", 0, "at least 1"),
        ("mean_tokens", 321.0, r"between 1 and max_tokens \(320\)"),
        ("mean_tokens", 0.5, "between 1"),
        ("mean_tokens", math.nan, "between 1"),
        ("microbatch_tokens", 0, "at least 1"),
        ("max_rows", 0, "at least 1"),
        ("kl_coefficient", -0.1, "0 or positive"),
        ("engine", "vllm-server", "native or vllm where gpus is 1"),
    ],
)
def test_an_impossible_value_is_refused_by_name(field, value, allowed):
    with pytest.raises(ConfigError, match=f"^{field} is .*{allowed}"):
        PlanConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": 2, "engine": "native"}, "^engine is 'native'; it must be vllm or vllm-server where gpus is above 1"),
        ({"gpus": 2, "device": "cpu"}, "^gpus is 2; it must be 1 where "),
        ({"engine": "vllm", "device": "cpu"}, "^engine is 'vllm'; it must be native where "),
        ({"max_tokens": 1000}, "^max_tokens is 1000; it must be at most 896: the model's context of 1024"),
        ({"model": "./nowhere"}, "^model is './nowhere', but there is no such folder"),
        ({"model": "no-such/model"}, "^model is 'no-such/model', which is no folder and not in the hub's cache"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_plan(PlanConfig(**settings))


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", *arguments])
    return exit_info.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("columns", [80, 140])
def test_the_command_prints_what_was_counted(capsys, monkeypatch, qwen, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = call(
        *(capsys, "--model", qwen, "--device", "h200", "--gpus", "1"),
        *("--prompt-tokens", "200", "--max-tokens", "1024", "--microbatch-tokens", "40000"),
    )
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= columns  # the command itself is one line, to be copied
    for told in ("1,543,714,304", "790 TFLOP/s", "4.3 TB/s", "measured", "1.96 s", "3.27 s", "28,672 bytes"):
        assert told in out, told
    plan = make_plan(PlanConfig(**{**LIMIT, "model": qwen}))
    assert f"microbatch_tokens that fits: {plan.largest_microbatch:,}" in out


def test_the_command_fails_where_it_does_not_fit(capsys, qwen):
    code, out, _ = call(capsys, "--model", qwen, "--device", "rtx-4090", "--gpu-memory", "8")
    assert code == 1 and "does not fit: training needs" in out and "veritune grpo" not in out


def test_bad_flags_are_one_line_and_exit_code_2(capsys):
    code, _, error = call(capsys, "--device", "tpu")
    assert code == 2 and "device is 'tpu'; allowed are auto, cpu, h200" in error and error.count("\n") == 1
