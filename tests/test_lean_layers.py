"""Layers that keep less for the backward pass, beside autograd's own."""

import copy

import pytest
import torch
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm

from veritune import cpu_kernels
from veritune.lean_layers import RMSNorm, SwiGLU, lean_layers

CONFIG = Qwen3Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_rms_norm_by_hand():
    """x = (3, 4), mean square 12.5, weight (2, 10), slope (1, 0).

    y_0 = 2 x_0 / r with r = sqrt(12.5); dy_0/dx_0 = 2 (1/r - x_0^2 / (2 r^3)) and dy_0/dx_1 = -2 x_0 x_1 / (2 r^3).
    """
    hidden, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([2.0, 10.0], requires_grad=True)
    result = RMSNorm.apply(hidden, weight, 0.0)
    root = 12.5**0.5
    assert result.tolist()[0] == pytest.approx([6 / root, 40 / root])
    result.backward(torch.tensor([[1.0, 0.0]]))
    assert hidden.grad.tolist()[0] == pytest.approx([2 / root - 9 / root**3, -12 / root**3])
    assert weight.grad.tolist() == pytest.approx([3 / root, 0.0])


@pytest.fixture
def torch_alone(monkeypatch):
    """Without the compiled kernels, whose rounding is their own (tests/test_cpu_kernels.py)."""
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_the_models_own(dtype, tolerance):
    norm = Qwen3RMSNorm(16, eps=1e-5).to(dtype)
    norm.weight.data = drawn(16, seed=1, dtype=dtype)
    hidden, slope = drawn(1, 9, 3, 16, dtype=dtype).requires_grad_(), drawn(1, 9, 3, 16, seed=2, dtype=dtype)
    ours, theirs = RMSNorm.apply(hidden, norm.weight, 1e-5), norm(hidden)
    assert torch.equal(ours, theirs)
    wanted = torch.autograd.grad(theirs, (hidden, norm.weight), slope)
    for got, want in zip(torch.autograd.grad(ours, (hidden, norm.weight), slope), wanted, strict=True):
        assert got.dtype == want.dtype and (got - want).norm() / want.norm() < tolerance


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_autograds_bit_for_bit(dtype):
    gate, up, down = (drawn(*s, seed=s[0], dtype=dtype).requires_grad_() for s in ((1, 7, 12), (2, 7, 12), (6, 12)))
    up = up[1:].detach().requires_grad_()
    ours, theirs = SwiGLU.apply(gate, up, down), torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
    slope = drawn(1, 7, 6, seed=9, dtype=dtype)
    assert torch.equal(ours, theirs)
    wanted = torch.autograd.grad(theirs, (gate, up, down), slope)
    for got, want in zip(torch.autograd.grad(ours, (gate, up, down), slope), wanted, strict=True):
        assert torch.equal(got, want)


def loss_of(model):
    return model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), labels=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).loss


def kept_bytes(model):
    """What autograd keeps of one pass, each memory once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return loss, sum(size for place, size in kept.items() if place not in parameters)


def test_a_models_gradient_is_its_own_and_less_is_kept():
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(CONFIG)
    lean = copy.deepcopy(plain)
    loss, most = kept_bytes(plain)
    loss.backward()
    with lean_layers(lean):
        lean_loss, least = kept_bytes(lean)
        lean_loss.backward()
    assert lean_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip(lean.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
    # 8 tokens: of each layer, two SwiGLU matrices of 48, two norms' 32, and the heads' (4 + 2) * 8; the last norm's 32.
    assert most - least == 4 * 8 * (2 * (2 * 48 + 2 * 32 + 6 * 8) + 32)


def test_a_model_is_itself_again_afterwards_and_others_are_left_alone():
    model = Qwen3ForCausalLM(copy.deepcopy(CONFIG))
    with lean_layers(model):
        assert sum("forward" in vars(module) for module in model.modules()) == 2 * (2 + 2 + 1) + 1
    assert not any("forward" in vars(module) for module in model.modules())
    model.config.model_type = "gemma"  # whose norms add one to their weight
    with lean_layers(model):
        assert not any("forward" in vars(module) for module in model.modules())


def test_an_mlp_with_adapters_keeps_its_own_forward():
    class Adapted(torch.nn.Linear):
        pass

    model = Qwen3ForCausalLM(CONFIG)
    model.model.layers[0].mlp.up_proj = Adapted(32, 48, bias=False)
    with lean_layers(model):
        assert "forward" not in vars(model.model.layers[0].mlp) and "forward" in vars(model.model.layers[1].mlp)
