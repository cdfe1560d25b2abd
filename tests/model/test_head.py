"""The head in chunks against whole logits and autograd, and the one helper that writes gradients."""

import math

import pytest
import torch
from torch.profiler import profile

from veritune.losses import selected_log_probs
from veritune.model import head
from veritune.model.gradients import Embedding, make_gradients
from veritune.model.head import label_log_probs


def make_head(bias, dtype=torch.float64, vocabulary=23):
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(6, vocabulary, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(17, 6, generator=generator, dtype=dtype)
    labels = torch.randint(0, vocabulary, (17,), generator=generator)
    return layer, hidden, labels


def scored(layer, hidden, labels, temperature=1.0):
    return label_log_probs(hidden, layer.weight, layer.bias, labels, temperature)


@pytest.mark.parametrize("chunk", [1, 23 * 5, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, chunk, bias, temperature):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, labels = make_head(bias)
    factors = torch.linspace(-2, 3, 17, dtype=torch.float64)

    def loss_of(log_probs):
        return (factors * (0.3 * log_probs).exp()).sum()  # not linear, so that the gradient depends on the value

    leaf = hidden.clone().requires_grad_()
    expected_log_probs = selected_log_probs(layer(leaf) / temperature, labels)
    expected = torch.autograd.grad(loss_of(expected_log_probs), [leaf, *layer.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(scored(layer, hidden, labels, temperature), expected_log_probs)
    for times in (1, 2):  # the second call adds to the first one's gradient
        states = hidden.clone().requires_grad_()
        log_probs = scored(layer, states, labels, temperature)
        torch.testing.assert_close(log_probs, expected_log_probs)
        loss_of(log_probs).backward()
        torch.testing.assert_close(states.grad, expected[0])
        for parameter, gradient in zip(layer.parameters(), expected[1:], strict=True):
            torch.testing.assert_close(parameter.grad, times * gradient)


@pytest.mark.parametrize(("vocabulary", "rounding"), [(23, 1e-6), (5000, 5e-6)])
def test_single_precision_stays_within_its_rounding(monkeypatch, vocabulary, rounding):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 4 * vocabulary)
    exact, hidden, labels = make_head(bias=False, vocabulary=vocabulary)
    rough = torch.nn.Linear(6, vocabulary, bias=False)
    rough.load_state_dict(exact.state_dict())
    losses, states = [], [hidden.requires_grad_(), hidden.detach().float().requires_grad_()]
    for layer, leaf in zip((exact, rough), states, strict=True):
        losses.append(-scored(layer, leaf, labels).sum())
        losses[-1].backward()
    assert abs(losses[1].item() / losses[0].item() - 1) < 1e-6
    for ours, theirs in ((states[1].grad, states[0].grad), (rough.weight.grad, exact.weight.grad)):
        assert (ours.double() - theirs).norm() / theirs.norm() < rounding


@pytest.mark.parametrize("made", [False, True])
def test_many_small_gradients_in_bfloat16_are_summed_in_single_precision(monkeypatch, made):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 2)
    layer = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(layer.weight)
    if made:
        make_gradients(layer)
    hidden, labels = torch.ones(1000, 1, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long)
    scored(layer, hidden, labels).sum().backward()
    # Each token adds 1/2 and -1/2; a sum in bfloat16 would stand still at 128.
    assert layer.weight.grad.tolist() == [[500.0], [-500.0]]


def test_a_small_gradient_of_a_sure_policy_survives_bfloat16():
    layer = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[10.0], [0.0]]))
    scored(layer, torch.ones(1, 1).bfloat16(), torch.tensor([0])).sum().backward()
    # 1 - p and p - 1 with p = 1 / (1 + exp(-10)); in bfloat16, p itself would be 1.
    slope = 1 / (1 + math.exp(10))
    assert layer.weight.grad.flatten().tolist() == [pytest.approx(slope, rel=2**-8), pytest.approx(-slope, rel=2**-8)]


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_head_that_is_not_trained_gets_no_gradient_and_costs_no_second_product(monkeypatch, chunk):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    layer, hidden, labels = make_head(bias=True)

    def backward_operations(**trained):
        layer.weight.requires_grad_(trained["weight"])
        layer.bias.requires_grad_(trained["weight"])
        leaf = hidden.clone().requires_grad_(trained["hidden"])
        loss = -scored(layer, leaf, labels).sum()
        with profile() as profiled:
            loss.backward()
        return leaf.grad, sum(event.key in ("aten::mm", "aten::addmm_") for event in profiled.events())

    of_hidden, both = backward_operations(weight=True, hidden=True)
    assert layer.weight.grad.norm() > 0
    layer.zero_grad(set_to_none=True)
    frozen, one = backward_operations(weight=False, hidden=True)
    assert layer.weight.grad is None and layer.bias.grad is None
    torch.testing.assert_close(frozen, of_hidden, rtol=0, atol=0)
    alone, other = backward_operations(weight=True, hidden=False)
    assert alone is None and layer.weight.grad.norm() > 0
    chunks = 17 if chunk == 1 else 1
    again = chunks if chunk == 1 else 0  # the logits of more than one chunk are made again
    assert (both - again, one - again, other - again) == (3 * chunks, chunks, 2 * chunks)  # a bias has a product too


def test_without_a_gradient_nothing_is_kept_or_differentiated():
    layer, hidden, labels = make_head(bias=False)
    with torch.no_grad(), profile() as profiled:
        assert not scored(layer, hidden, labels).requires_grad
    assert not {"aten::exp", "aten::expm1"} & {event.key for event in profiled.events()}


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_gradient_holds_one_chunk_of_logits(monkeypatch, chunks):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", 50 // chunks * 5000)
    layer = torch.nn.Linear(4, 5000, bias=False)
    make_gradients(layer)
    hidden, labels = torch.randn(50, 4, requires_grad=True), torch.arange(50)
    chunk = 50 // chunks * 5000 * 4
    with profile(profile_memory=True) as profiled:
        scored(layer, hidden, labels).sum().backward()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert chunk <= most < 1.1 * chunk and held < 0.1 * chunk


def test_nothing_to_score():
    layer, hidden, labels = make_head(bias=False)
    loss = scored(layer, hidden[:0].requires_grad_(), labels[:0]).sum()
    loss.backward()
    assert loss == 0 and not layer.weight.grad.any()


# --- The gradients' helper ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_there_is_added_to_in_place(dtype):
    layer, hidden, labels = make_head(bias=False, dtype=dtype)
    make_gradients(layer)
    there = layer.weight.grad
    scored(layer, hidden, labels).sum().backward()
    assert layer.weight.grad is there and there.norm() > 0


@pytest.mark.parametrize("made", [False, True])
def test_a_tied_head_and_embedding_by_hand(made):
    """One number an id, 0 and w with w^2 = log 3; id 1 is looked up, so the logits are (0, log 3) and p = (1/4, 3/4).

    The loss is -log p(0), whose gradient by the logits is (-3/4, 3/4). Through the head, the rows get that times the
    hidden state, (-3/4 w, 3/4 w); through the embedding, row 1 gets its product with the rows, 3/4 w.
    """
    width = math.sqrt(math.log(3))
    weight = torch.nn.Parameter(torch.tensor([[0.0], [width]]))
    weight.grad = torch.ones(2, 1) if made else None
    hidden = Embedding.apply(weight, torch.tensor([1]), None)
    (-label_log_probs(hidden, weight, None, torch.tensor([0]), 1.0)).sum().backward()
    expected = torch.tensor([[-0.75 * width], [1.5 * width]]) + made
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("made", [False, True])
def test_an_embeddings_gradient_is_torchs_own(made):
    theirs = torch.nn.Embedding(7, 3, padding_idx=2)
    ours = torch.nn.Parameter(theirs.weight.detach().clone())
    ids, upstream = torch.tensor([0, 2, 5, 0, 6, 2]), torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    if made:
        ours.grad, theirs.weight.grad = torch.ones(7, 3), torch.ones(7, 3)
    theirs(ids).backward(upstream)
    looked_up = Embedding.apply(ours, ids, 2)
    assert torch.equal(looked_up, theirs(ids))
    looked_up.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.weight.grad)
