"""Microbatches, scoring and the optimiser against plain formulas; resume against the run that nobody stopped."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.errors import EngineError, TrainingError
from veritune.core.types import Completion, Example
from veritune.trainer.batches import draw_batch, require_version
from veritune.trainer.optimizer import clip_and_step, make_optimizer, scheduled_learning_rate


def test_learning_rates_by_hand():
    def rates(schedule, warmup):
        return [scheduled_learning_rate(8.0, step, 6, warmup, schedule) for step in range(1, 7)]

    assert rates("constant", 0) == [8.0] * 6
    assert rates("constant", 4) == [2, 4, 6, 8, 8, 8]
    assert rates("linear", 2) == [4, 8, 8, 6, 4, 2]
    expected = [4, 8, 8, 4 + 4 * math.cos(math.pi / 4), 4, 4 - 4 * math.cos(math.pi / 4)]
    assert rates("cosine", 2) == pytest.approx(expected)


def test_the_first_adamw_update_by_hand():
    layer = torch.nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight[:] = torch.tensor([[1.0, -2.0]])
        layer.bias[:] = 0.5
    optimizer = make_optimizer(layer, learning_rate=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    norm = clip_and_step(layer, optimizer, learning_rate=0.01, clip_grad_norm=1.0)
    assert norm == pytest.approx(5.0)
    # Adam's first step is the learning rate against the gradient's sign; matrices decay by rate times 0.1 first.
    assert layer.weight.tolist()[0] == pytest.approx([1.0 * 0.999 - 0.01, -2.0 * 0.999], abs=1e-6)
    assert layer.bias.item() == pytest.approx(0.5 - 0.01, abs=1e-6)
    assert layer.weight.grad is None
    state = optimizer.state[layer.weight]["exp_avg"]
    assert state.tolist()[0] == pytest.approx([0.1 * 3 / 5, 0.0], abs=1e-6)  # of the clipped gradient


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.clone()
    optimizer = make_optimizer(layer, learning_rate=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    layer.weight.grad = torch.tensor([[1.0, value]])
    with pytest.raises(TrainingError, match="refused"):
        clip_and_step(layer, optimizer, learning_rate=0.1, clip_grad_norm=1.0)
    assert torch.equal(layer.weight, before)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 9), size=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_example_is_drawn_once_in_each_pass(count, size, seed):
    examples = [Example(str(index), "", "") for index in range(count)]
    steps = 3 * count
    drawn = [example.id for step in range(1, steps + 1) for example in draw_batch(examples, size, step, seed)]
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == sorted(example.id for example in examples)


def test_completions_of_other_weights_are_refused():
    def completion(version):
        return Completion((1,), (2,), "", (0.0,), "eos", version)

    require_version([[completion(3), completion(3)]], 3)
    with pytest.raises(EngineError, match=r"version 3, got \[2, 3\]"):
        require_version([[completion(3), completion(2)]], 3)
