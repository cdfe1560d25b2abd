"""The head in chunks against whole logits and autograd."""

import math

import pytest
import torch
from torch.profiler import profile

from veritune.losses import selected_log_probs
from veritune.model import head
from veritune.model.head import score_and_differentiate, score_tokens


def make_head(bias, dtype=torch.float64, vocabulary=23):
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(6, vocabulary, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(17, 6, generator=generator, dtype=dtype)
    labels = torch.randint(0, vocabulary, (17,), generator=generator)
    return layer, hidden, labels


@pytest.mark.parametrize("chunk", [1, 23 * 5, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, chunk, bias, temperature):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, labels = make_head(bias)
    factors = torch.linspace(-2, 3, 17, dtype=torch.float64)

    def token_loss(log_probs, part):
        return factors[part] * (0.3 * log_probs).exp()  # not linear, so that the slope depends on the value

    leaf = hidden.clone().requires_grad_()
    log_probs = selected_log_probs(layer(leaf) / temperature, labels)
    loss = token_loss(log_probs, slice(None)).sum()
    expected = torch.autograd.grad(loss, [leaf, *layer.parameters()])
    torch.testing.assert_close(score_tokens(hidden, layer, labels, temperature), log_probs.detach())
    for times in (1, 2):  # the second call adds to the first one's gradient
        done = score_and_differentiate(hidden, layer, labels, temperature, token_loss)
        assert done.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(done.log_probs, log_probs.detach())
        torch.testing.assert_close(done.hidden_gradient, expected[0])
        for parameter, gradient in zip(layer.parameters(), expected[1:], strict=True):
            torch.testing.assert_close(parameter.grad, times * gradient)


@pytest.mark.parametrize(("vocabulary", "rounding"), [(23, 1e-6), (5000, 5e-6)])
def test_single_precision_stays_within_its_rounding(monkeypatch, vocabulary, rounding):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 4 * vocabulary)
    exact, hidden, labels = make_head(bias=False, vocabulary=vocabulary)
    rough = torch.nn.Linear(6, vocabulary, bias=False)
    rough.load_state_dict(exact.state_dict())
    want = score_and_differentiate(hidden, exact, labels, 1.0, lambda scores, _: -scores)
    got = score_and_differentiate(hidden.float(), rough, labels, 1.0, lambda scores, _: -scores)
    assert abs(got.loss.item() / want.loss.item() - 1) < 1e-6
    for ours, theirs in ((got.hidden_gradient, want.hidden_gradient), (rough.weight.grad, exact.weight.grad)):
        assert (ours.double() - theirs).norm() / theirs.norm() < rounding


def test_many_small_gradients_in_bfloat16_are_summed_in_single_precision(monkeypatch):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 2)
    layer = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(layer.weight)
    hidden, labels = torch.ones(1000, 1, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long)
    score_and_differentiate(hidden, layer, labels, 1.0, lambda scores, _: scores)
    # Each token adds 1/2 and -1/2; a sum in bfloat16 would stand still at 128.
    assert layer.weight.grad.tolist() == [[500.0], [-500.0]]


def test_a_small_gradient_of_a_sure_policy_survives_bfloat16():
    layer = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[10.0], [0.0]]))
    score_and_differentiate(torch.ones(1, 1).bfloat16(), layer, torch.tensor([0]), 1.0, lambda scores, _: scores)
    # 1 - p and p - 1 with p = 1 / (1 + exp(-10)); in bfloat16, p itself would be 1.
    slope = 1 / (1 + math.exp(10))
    assert layer.weight.grad.flatten().tolist() == [pytest.approx(slope, rel=2**-8), pytest.approx(-slope, rel=2**-8)]


def test_a_head_that_is_not_trained_gets_no_gradient():
    layer, hidden, labels = make_head(bias=False)
    layer.requires_grad_(False)
    done = score_and_differentiate(hidden, layer, labels, 1.0, lambda scores, _: -scores)
    assert layer.weight.grad is None
    assert done.hidden_gradient.norm() > 0


def test_a_gradient_holds_one_chunk_of_logits(monkeypatch):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 10 * 5000)
    layer = torch.nn.Linear(4, 5000, bias=False)
    hidden, labels = torch.randn(50, 4), torch.arange(50)
    score_and_differentiate(hidden, layer, labels, 1.0, lambda scores, _: -scores)  # which leaves the matrix's gradient
    chunk = 10 * 5000 * 4
    with profile(profile_memory=True) as profiled:
        score_and_differentiate(hidden, layer, labels, 1.0, lambda scores, _: -scores)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert chunk <= most < 1.1 * chunk


def test_nothing_to_score():
    layer, hidden, labels = make_head(bias=False)
    assert score_tokens(hidden[:0], layer, labels[:0], 1.0).shape == (0,)
    assert score_and_differentiate(hidden[:0], layer, labels[:0], 1.0, lambda scores, _: -scores).loss == 0
