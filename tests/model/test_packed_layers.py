"""The layers of `families.FAMILY` over packed sequences, beside the models' own and beside autograd."""

import copy
import statistics

import pytest
import torch
from test_decode import make_model

from veritune.model.architectures import layers_of
from veritune.model.decoder_layer import (
    RMSNorm,
    packed_hidden_states,
    prefill,
    rms_norm,
    rms_norm_backward,
    rotate_,
    swiglu,
    swiglu_backward,
)
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.packing import pack_rows
from veritune.model.policy import ATTENTION, checkpoint_activations

FAMILY = ["llama", "mistral", "qwen2", "qwen3"]
CPU = torch.device("cpu")


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def torch_alone(monkeypatch):
    """Without the compiled kernels, whose rounding is their own (tests/test_cpu_kernels.py)."""
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)


@pytest.fixture(params=["compiled", "torch's operators"])
def kernels(request, monkeypatch):
    if request.param == "torch's operators":
        monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    elif cpu_kernels.library() is None:
        pytest.skip("no kernels were compiled")


def test_rms_norm_by_hand():
    """x = (3, 4), mean square 12.5, weight (2, 10), grad_output (1, 0).

    y_0 = 2 x_0 / r with r = sqrt(12.5); dy_0/dx_0 = 2 (1/r - x_0^2 / (2 r^3)) and dy_0/dx_1 = -2 x_0 x_1 / (2 r^3).
    """
    hidden, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([2.0, 10.0], requires_grad=True)
    result = RMSNorm.apply(hidden, weight, 0.0)
    root = 12.5**0.5
    assert result.tolist()[0] == pytest.approx([6 / root, 40 / root])
    result.backward(torch.tensor([[1.0, 0.0]]))
    assert hidden.grad.tolist()[0] == pytest.approx([2 / root - 9 / root**3, -12 / root**3])
    assert weight.grad.tolist() == pytest.approx([3 / root, 0.0])


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_the_models_own(dtype, tolerance):
    norm = copy.deepcopy(make_model("qwen3").model.norm).to(dtype)
    size = len(norm.weight)
    norm.weight.data = drawn(size, seed=1, dtype=dtype)
    hidden, grad_output = drawn(9, 3, size, dtype=dtype).requires_grad_(), drawn(9, 3, size, seed=2, dtype=dtype)
    theirs, epsilon = norm(hidden), norm.variance_epsilon
    assert torch.equal(rms_norm(hidden, norm.weight, epsilon), theirs)
    wanted = torch.autograd.grad(theirs, (hidden, norm.weight), grad_output)
    for got, want in zip(rms_norm_backward(grad_output, hidden, norm.weight, epsilon), wanted, strict=True):
        assert got.dtype == want.dtype and (got - want).norm() / want.norm() < tolerance


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_autograds_bit_for_bit(dtype):
    gate, up = (drawn(7, 12, seed=seed, dtype=dtype).requires_grad_() for seed in (1, 2))
    theirs, grad_output = torch.nn.functional.silu(gate) * up, drawn(7, 12, seed=9, dtype=dtype)
    wanted = torch.autograd.grad(theirs, (gate, up), grad_output)
    with torch.no_grad():
        assert torch.equal(swiglu(gate, up), theirs)
        for got, want in zip(swiglu_backward(grad_output, gate, up), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.usefixtures("kernels")
def test_a_quarter_turn_by_hand():
    vectors = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # of which 1 and 3 turn a quarter, and 2 and 4 not at all
    turned = rotate_(vectors, torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))
    assert turned.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


PROMPTS = [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5], [9, 2, 6], [5]]
RESPONSES = [[8, 9, 7], [9], [3, 2, 3, 8, 4], [6, 2]]


def trained_model(name, dtype):
    model = make_model(name).to(dtype).train()
    model.set_attn_implementation(ATTENTION)
    return model


def gradients(model, hidden):
    grad_output = drawn(*hidden.shape, seed=11, dtype=hidden.dtype)
    inner = dict(model.base_model.named_parameters())
    return dict(zip(inner, torch.autograd.grad(hidden, list(inner.values()), grad_output), strict=True))


def by_the_model(model, prompts=PROMPTS, responses=RESPONSES):
    """The hidden state before each response token, a row at a time through transformers' own layers."""
    rows = zip(prompts, responses, strict=True)
    return torch.cat(
        [
            model.base_model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
            for prompt, response in rows
        ]
    )


@pytest.mark.skipif(cpu_kernels.library() is None, reason="installed without a C compiler")
def test_a_second_backward_pass_over_what_the_first_has_overwritten_is_refused():
    hidden = packed_hidden_states(trained_model("qwen2", torch.float32), pack_rows(PROMPTS, RESPONSES, CPU)).sum()
    hidden.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.backward()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_states_and_gradients_are_the_models_own(name, checkpointing):
    model = trained_model(name, torch.float32)
    expected = by_the_model(model)
    wanted = gradients(model, expected)
    if checkpointing:
        checkpoint_activations(model)
    hidden = packed_hidden_states(model, pack_rows(PROMPTS, RESPONSES, CPU))
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients(model, hidden).items():
        assert (gradient - wanted[parameter]).norm() <= 1e-5 * wanted[parameter].norm(), parameter


@pytest.mark.parametrize("name", FAMILY)
def test_in_bfloat16_gradients_are_as_near_to_the_exact_ones_as_the_models(name):
    exact, model = trained_model(name, torch.float32), trained_model(name, torch.bfloat16)
    for parameter, rounded in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data = rounded.data.float()
    ratios = []
    for seed in range(20):  # a single draw may be off by half
        rows = torch.randint(50, (4, 11), generator=torch.Generator().manual_seed(seed))
        prompts, responses = rows[:, :5].tolist(), rows[:, 5:].tolist()
        wanted = gradients(exact, by_the_model(exact, prompts, responses))
        theirs = gradients(model, by_the_model(model, prompts, responses))
        ours = gradients(model, packed_hidden_states(model, pack_rows(prompts, responses, CPU)))
        away = [
            sum(((found[each].float() - wanted[each]).norm() / wanted[each].norm()).item() for each in wanted)
            for found in (ours, theirs)
        ]
        ratios.append(away[0] / away[1])
    assert statistics.median(ratios) < 1.1


def kept_bytes(model, packed):
    """What autograd keeps of one pass beside the parameters, each memory once."""
    kept, parameters = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packed_hidden_states(model, packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_with_checkpointing_a_layer_keeps_its_input_alone():
    packed = pack_rows(PROMPTS, RESPONSES, CPU)
    model = trained_model("qwen2", torch.float32)
    checkpoint_activations(model)
    layers, width = len(model.base_model.layers), model.config.hidden_size
    shorter = copy.deepcopy(model)
    del shorter.base_model.layers[-1]
    tokens = packed.input_ids.numel()
    assert layers > 1 and kept_bytes(model, packed) - kept_bytes(shorter, packed) == 4 * tokens * width


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FAMILY)
@torch.inference_mode()
def test_prompts_are_prefilled_as_the_model_does_it(name):
    model = make_model(name).eval()
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    last, stored = prefill(model, layers_of(model), prompts)
    for row, prompt in enumerate(prompts):
        alone = model.base_model(input_ids=torch.tensor([prompt]), use_cache=True)
        torch.testing.assert_close(last[row], alone.last_hidden_state[0, -1], rtol=1e-5, atol=1e-5)
        for (keys, values), expected in zip(stored, alone.past_key_values.layers, strict=True):
            for found, own in ((keys, expected.keys), (values, expected.values)):
                torch.testing.assert_close(found[row, :, : len(prompt)], own[0], rtol=1e-5, atol=1e-5)
                assert not found[row, :, len(prompt) :].any()


def test_a_model_with_an_adapter_runs_its_own_layers():
    class Adapter(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states) + 1

    model = trained_model("qwen2", torch.float32)
    model.base_model.layers[1].mlp.up_proj.__class__ = Adapter
    hidden = packed_hidden_states(model, pack_rows(PROMPTS, RESPONSES, CPU))
    torch.testing.assert_close(hidden, by_the_model(model), rtol=1e-5, atol=1e-5)
