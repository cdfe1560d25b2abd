"""The plan against numbers counted by hand, against autograd's own, and as a person meets it."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from veritune.cli import main
from veritune.commands.plan import (
    DEVICES,
    Device,
    PlanConfig,
    make_plan,
    measure_device,
    sampling_memory,
    shape_of,
    step_seconds,
    step_tokens,
    total,
    training_memory,
)
from veritune.core.config import from_mapping
from veritune.core.errors import ConfigError
from veritune.model.decoder_layer import packed_hidden_states
from veritune.model.packing import pack_rows
from veritune.model.policy import ATTENTION
from veritune.trainer.optimizer import make_optimizer

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
    assert shape.vocabulary * shape.hidden == 233_373_696
    assert shape.cache_bytes(2) == 28_672  # 28 layers × keys and values × 2 heads × 128 × 2 bytes
    assert (shape.heads, shape.key_value_heads, shape.head_size, shape.feed_forward) == (12, 2, 128, 8960)


def test_an_untied_head_is_counted_twice_over(tmp_path):
    tied = shape_of(folder_of(tmp_path / "tied", **TINY))
    untied = shape_of(folder_of(tmp_path / "untied", **{**TINY, "tie_word_embeddings": False}))
    assert untied.parameters - tied.parameters == 50 * 24
    assert untied.layer_matrices == tied.layer_matrices


def test_the_embedded_policy_has_its_parameters():
    from veritune.model.policy import load_policy

    loaded = load_policy("embedded").model
    assert shape_of("embedded").parameters == sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}, "type 'gpt2'; its config.json must give"),
        ({**TINY, "hidden_size": "wide"}, "expected int, got str"),
        ({**TINY, "num_attention_heads": 0}, "makes no model"),
        ({**TINY, "num_hidden_layers": 0}, "its config.json must give"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}, "makes no model"),
    ],
)
def test_a_config_that_makes_no_countable_model_is_refused(tmp_path, config, said):
    with pytest.raises(ConfigError, match=r"^policy is ") as refused:
        shape_of(folder_of(tmp_path, **config))
    assert said in str(refused.value)


# --- Memory


def planned(folder, device="h200", **settings):
    rows = {"rollout_batch_size": 256, "train_batch_size": settings.get("rollout_batch_size", 256)}
    return from_mapping(PlanConfig, {"policy": folder, "device": device, **rows, **settings}, "test")


def bytes_kept(config_class, layers, dtype, **changes):
    """Bytes that autograd keeps for 37 packed positions, weights left out, as hooks see them."""
    import transformers

    config = getattr(transformers, f"{config_class}Config")(**{**TINY, "num_hidden_layers": layers, **changes})
    model = getattr(transformers, f"{config_class}ForCausalLM")(config).to(dtype).train()
    model.set_attn_implementation(ATTENTION)
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
    [("Qwen2", {}), ("Llama", {"num_key_value_heads": 4}), ("Mistral", {"num_key_value_heads": 1})],
)
def test_activations_grow_by_what_autograd_keeps_of_a_layer(tmp_path, config_class, changes, dtype):
    def activations(layers):
        config = {**TINY, **changes, "model_type": config_class.lower(), "num_hidden_layers": layers}
        shape = shape_of(folder_of(tmp_path / str(layers), **config))
        return training_memory(shape, PlanConfig(), SLOW, dtype, 37)["activations"][0]

    three, two = (bytes_kept(config_class, layers, dtype, **changes) for layers in (3, 2))
    # Attention's normalisers, 4 bytes a head, are left out of the plan.
    assert activations(3) - activations(2) == three - two - 37 * 4 * 4


def test_weights_gradients_and_moments_are_those_of_the_optimiser(tiny):
    import transformers

    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY)).to(dtype)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = make_optimizer(model, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.step()
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        memory = training_memory(shape_of(tiny), PlanConfig(policy=tiny), SLOW, dtype, 100)
        assert memory["AdamW's moments"][0] == sum(value.nbytes for value in moments)
        assert memory["weights"][0] == sum(parameter.nbytes for parameter in model.parameters())
        assert memory["gradients"] == memory["weights"]
        assert memory["reference"][0] == 0


def test_a_pass_over_qwen_by_hand(qwen):
    shape, config = shape_of(qwen), planned(qwen)
    memory = training_memory(shape, config, DEVICES["h200"], torch.bfloat16, 8192)
    # A layer: two norms' 1536; q, attention's output, k and v; two of 8960; all in 2 bytes. Beside the layers two
    # tensors as large as the hidden state.
    kept = 2 * 2 * 1536 + 2 * (2 * 1536 + 2 * 256) + 2 * 2 * 8960
    assert memory["activations"][0] == 8192 * (28 * kept + 2 * 2 * 1536)
    # 2²⁷ logits a chunk: in bfloat16, and their log-softmax in float32; the matrix's gradient in float32.
    head = 2 * 8192 * 1536 * 2 + 6 * 2**27 + 4 * 233_373_696
    assert memory["head, or a layer's backward"][0] == head
    # In float32 a few tokens' logits are all there is; without a kernel attention makes every head's scores four times.
    exact = training_memory(shape, config, DEVICES["h200"], torch.float32, 10)
    scores = 4 * 4 * 12 * 320**2
    assert exact["head, or a layer's backward"][0] == scores + 10 * 4 * (2 * 8960 + 4 * 1536)
    on_cpu = training_memory(shape, config, dataclasses.replace(SLOW, is_gpu=False), torch.float32, 100)
    assert on_cpu["head, or a layer's backward"][0] == 2 * 100 * 1536 * 4 + 4 * min(100 * 151_936, 2**24)


def test_checkpointing_keeps_the_layers_inputs_and_works_on_one_layer(qwen):
    shape, config = shape_of(qwen), planned(qwen, activation_checkpointing=True)
    memory = training_memory(shape, config, DEVICES["h200"], torch.bfloat16, 20_000)
    assert memory["activations"][0] == 20_000 * (28 * 1536 * 2 + 2 * 2 * 1536)
    kept = 2 * 2 * 1536 + 2 * (2 * 1536 + 2 * 256) + 2 * 2 * 8960
    assert memory["head, or a layer's backward"][0] == 20_000 * (kept + 2 * (2 * 8960 + 4 * 1536))


def test_a_reference_is_another_copy_of_the_weights(tiny):
    without = make_plan(planned(tiny, max_tokens=20, prompt_tokens=10))
    held = make_plan(planned(tiny, max_tokens=20, prompt_tokens=10, kl_coefficient=0.1))
    assert held.resident - without.resident == without.training["weights"][0]


def test_the_cache_of_the_native_engine_by_hand(qwen):
    plan = make_plan(planned(qwen, prompt_tokens=200, max_tokens=1024))
    # A place for each of 1,024 tokens of 256 responses, and the prompts of 32 groups once.
    assert plan.sampling["cache"][0] == (256 * 1024 + 32 * 200) * 28_672
    assert plan.sampling["the engine's weights"][0] == 2 * 28 * 46_792_704  # the layers' matrices again, side by side
    assert plan.sampling["logits, sampling"][0] == 256 * 151_936 * 26
    few = make_plan(planned(qwen, prompt_tokens=200, max_tokens=1024, engine={"max_rows": 100}))
    assert few.places == 100
    assert few.sampling["cache"][0] == (100 * 1024 + 13 * 200) * 28_672


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("device", ["l40s", "a100-80", "h200"])
def test_one_token_more_than_the_largest_microbatch_does_not_fit(qwen, device, checkpointing):
    config = planned(qwen, device, max_tokens=2048, activation_checkpointing=checkpointing, rollout_batch_size=512)
    plan = make_plan(config)
    largest = plan.largest(config)
    assert largest is not None and config.prompt_tokens + config.max_tokens < largest < step_tokens(config)
    peaks = [
        total(make_plan(dataclasses.replace(config, microbatch_tokens=tokens)).training)
        for tokens in (largest, largest + 1)
    ]
    assert peaks[0] <= 0.95 * DEVICES[device].gib * 2**30 < peaks[1]


def test_the_largest_microbatch_is_at_most_the_step(tiny):
    config = planned(tiny, rollout_batch_size=16, prompt_tokens=10, max_tokens=20)
    assert make_plan(config).largest(config) == 2 * 10 + 16 * 20 == 340
    assert make_plan(dataclasses.replace(config, microbatch_tokens=341)).training["activations"][1] == "340 tokens"


def test_a_response_longer_than_the_budget_stands_alone(tiny):
    plan = make_plan(planned(tiny, prompt_tokens=40, max_tokens=60, microbatch_tokens=8))
    assert plan.training["activations"][1] == "100 tokens"


# --- Time


def test_the_seconds_of_a_tiny_model_by_hand(tiny):
    shape = shape_of(tiny)
    config = planned(tiny, rollout_batch_size=4, group_size=2, prompt_tokens=5, max_tokens=2, microbatch_tokens=9)
    # q and o 24², k and v 24 x 12, three of 24 x 40, two layers; and 50 x 24
    layers, head = 2 * (2 * 576 + 2 * 288 + 3 * 960), 50 * 24
    assert shape.layer_matrices == layers == 9_216
    seconds = step_seconds(shape, config, SLOW, torch.float32, places=4)
    # Two prompts of 5 tokens with logits at their ends; 5² / 2 pairs each, 4 operations for each of 24 numbers a layer.
    # To read the weights takes longer.
    pair = 4 * 2 * 24
    prefill = 2 * (2 * (5 * layers + head) + pair * 12.5)
    assert prefill / 500 < (layers + head) * 4 / 100 == pytest.approx(seconds["sampling: prompts"])
    # Two steps of four rows; a row reads its prompt with its sibling, and one token on average.
    step = max(2 * (layers + head) * 4 / 500, (layers + head) * 4 / 100)
    attention = max(pair * 4 * 2 * (5 + 1) / 500, 2 * 2 * 12 * 4 * 4 * 2 * (1 + 5 / 2) / 100)
    assert seconds["sampling: responses"] == pytest.approx(2 * step + attention)
    # A microbatch of 9 tokens holds a prompt and two responses: the prompts are computed once for each of two.
    forward = 2 * layers * (2 * 5 + 4 * 2) + pair * (2 * 12.5 + 4 * 2 * 6) + 2 * head * 8
    assert seconds["training"] == pytest.approx(3 * forward / 500)
    assert seconds["AdamW"] == pytest.approx(10 * 4 * shape.parameters / 100)


LIMIT = {"prompt_tokens": 200, "max_tokens": 1024, "microbatch_tokens": 1 << 20}
"""256 rollouts of 32 prompts, in one microbatch."""


def test_qwen_on_an_h200_takes_the_counted_limits(qwen):
    """256 rollouts of 1024 tokens, counted apart from this code: 1.96 s to decode, 3.26 s to train on."""
    seconds = make_plan(planned(qwen, **LIMIT)).seconds
    assert seconds["sampling: responses"] == pytest.approx(1.96, abs=0.02)
    assert seconds["training"] == pytest.approx(3.26, abs=0.02)


def test_checkpointing_computes_the_layers_once_more(qwen):
    plain = make_plan(planned(qwen, **LIMIT)).seconds["training"]
    again = make_plan(planned(qwen, **LIMIT, activation_checkpointing=True)).seconds["training"]
    head = 6 * 233_373_696 * 256 * 1024 / 790e12
    assert again - plain == pytest.approx((plain - head) / 3)


def test_a_reference_costs_one_forward_pass(qwen):
    seconds = make_plan(planned(qwen, **LIMIT, kl_coefficient=0.1)).seconds
    assert seconds["reference"] == pytest.approx(seconds["training"] / 3)
    assert "reference" not in make_plan(planned(qwen, **LIMIT)).seconds


def test_the_cpu_is_measured():
    (memory,) = re.findall(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
    device = measure_device(torch.device("cpu"), torch.float32)
    assert device.gib * 2**20 == pytest.approx(int(memory), rel=1e-3)
    assert device.float32 > 1e8 and device.copy > 1e7 and not device.is_gpu


# --- Several GPUs


def test_servers_share_the_rollouts_and_hold_a_cache_of_their_own(qwen):
    servers = {"engine": {"name": "vllm-server", "start": ["cuda:1", "cuda:2"]}}
    one = make_plan(planned(qwen, prompt_tokens=200, max_tokens=1024, engine="vllm"))
    two = make_plan(planned(qwen, prompt_tokens=200, max_tokens=1024, rollout_batch_size=512, **servers))
    # Twice the rollouts on two servers take the time that one needs for half of them; training takes twice as long.
    assert two.seconds["sampling: responses"] == pytest.approx(one.seconds["sampling: responses"])
    assert two.seconds["training"] == pytest.approx(2 * one.seconds["training"], rel=1e-3)
    weights = 2 * 1_543_714_304
    assert two.sampling["cache"][0] + weights == pytest.approx(0.85 * 139.7 * 2**30, abs=1)
    assert two.places == 256


def test_a_split_engine_holds_a_share_of_weights_and_cache(qwen):
    split = {"name": "vllm", "tensor_parallel_size": 4, "gpu_memory_utilization": 0.01}
    config = planned(qwen, prompt_tokens=200, max_tokens=1024, engine=split)
    memory, places = sampling_memory(shape_of(qwen), config, DEVICES["h200"], torch.bfloat16)
    share, weights = int(0.01 * 139.7 * 2**30), memory["the engine's weights"][0]
    assert weights == 2 * 1_543_714_304 // 4
    # Two heads of keys and values on four GPUs: each GPU holds one of them.
    assert places == (share - weights) // (1224 * 28_672 // 2) == 41
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size is 5; it must be a divisor of the model's 12 heads"):
        make_plan(planned(qwen, engine={"name": "vllm", "tensor_parallel_size": 5}))


def test_a_step_that_does_not_fit_says_a_way_out(qwen):
    config = planned(qwen, gpu_memory=16.0, microbatch_tokens=8192)
    small = make_plan(config)
    assert f"microbatch_tokens must be at most {small.largest(config):,}" in next(small.faults)
    assert not list(make_plan(planned(qwen, gpu_memory=16.0, microbatch_tokens=500)).faults)
    # 17 GiB hold 11.5 of weights, moments and gradients, but no pass over 3,000 tokens unless it is computed twice.
    servers = {"name": "vllm-server", "start": ["cuda:1"]}
    long = planned(qwen, gpu_memory=17.0, prompt_tokens=1000, max_tokens=2000, engine=servers)
    (fault,) = make_plan(long).faults
    (fits,) = re.search(r"with activation_checkpointing, microbatch_tokens of up to ([\d,]+) fit", fault).groups()
    remedied = dataclasses.replace(long, activation_checkpointing=True, microbatch_tokens=int(fits.replace(",", "")))
    assert not list(make_plan(remedied).faults)
    assert list(make_plan(dataclasses.replace(remedied, microbatch_tokens=remedied.microbatch_tokens + 1)).faults)
    faults = list(make_plan(planned(qwen, gpu_memory=8.0)).faults)
    assert "not even a pass over the longest response fits" in faults[0]
    assert "8.63 GiB of it the trainer's" in faults[1]  # three times 2 bytes for each of 1,543,714,304 parameters
    roomy, crowded = ({"name": "vllm", "gpu_memory_utilization": share} for share in (0.88, 0.9))
    assert not list(make_plan(planned(qwen, engine=roomy)).faults)
    assert "lower engine.gpu_memory_utilization" in next(make_plan(planned(qwen, engine=crowded)).faults)
    empty = make_plan(planned(qwen, microbatch_tokens=500, engine={**servers, "gpu_memory_utilization": 0.01}))
    assert "does not hold the weights" in next(empty.faults)
    assert all(math.isfinite(each) for each in empty.seconds.values())


# --- As a person meets it


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("gpu_memory", 0.0, "positive, in GiB"),
        ("gpu_memory", math.nan, "positive, in GiB"),
        ("prompt_tokens", 0, "at least 1"),
        ("mean_tokens", 321.0, r"between 1 and max_tokens \(320\)"),
        ("mean_tokens", 0.5, "between 1"),
        ("mean_tokens", math.nan, "between 1"),
        ("microbatch_tokens", 0, "at least 1"),
    ],
)
def test_an_impossible_value_is_refused_by_name(field, value, allowed):
    with pytest.raises(ConfigError, match=f"^{field} is .*{allowed}"):
        PlanConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 1000}, "^max_tokens is 1000; it must be at most 896: the context less the prompt"),
        ({"policy": "./nowhere"}, "^policy is './nowhere', but there is no such folder"),
        ({"policy": "no-such/model"}, "^policy is 'no-such/model', which is no folder and not in the hub's cache"),
        ({"device": "tpu"}, "^device is 'tpu'"),
    ],
)
def test_a_setting_that_cannot_be_planned_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_plan(PlanConfig(**settings))


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", *arguments])
    return exit_info.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("columns", [80, 140])
def test_the_command_prints_the_counts(capsys, monkeypatch, qwen, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = call(
        *(capsys, "--policy", qwen, "--device", "h200", "--prompt-tokens", "200"),
        *("--max-tokens", "1024", "--microbatch-tokens", "40000"),
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    for told in ("1,543,714,304", "790 TFLOP/s", "4.3 TB/s", "measured", "1.96 s", "28,672 bytes"):
        assert told in out, told
    config = planned(qwen, **LIMIT)
    assert f"microbatch_tokens that fits: {make_plan(config).largest(config):,}" in out


def test_the_command_fails_where_it_does_not_fit(capsys, qwen):
    code, out, _ = call(capsys, "--policy", qwen, "--device", "rtx-4090", "--gpu-memory", "8")
    assert code == 1 and "does not fit: training needs" in out


def test_bad_flags_are_one_line_and_exit_code_2(capsys):
    code, _, error = call(capsys, "--device", "tpu")
    assert code == 2 and "device is 'tpu'" in error and error.count("\n") == 1
