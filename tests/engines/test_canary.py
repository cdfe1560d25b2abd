"""The canary: every way in which weights can fail to arrive is refused at the load itself, with both sides' numbers."""

import copy
import dataclasses
import re

import pytest
import torch

from veritune.core.errors import EngineError
from veritune.core.types import Completion
from veritune.engines.native.engine import NativeEngine
from veritune.engines.weight_check import (
    SAMPLING,
    canary_prompt,
    is_canary,
    load_proven_weights,
    require_served,
    trainer_log_probs,
)
from veritune.trainer.optimizer import make_optimizer


class CopyingEngine:
    """Serves a copy of the weights, as an engine in another process does; `load` says what arrives of them."""

    def __init__(self, policy, load):
        self.served = copy.deepcopy(policy.model)
        self.inner = NativeEngine(dataclasses.replace(policy, model=self.served))
        self.load = load

    def load_weights(self, model, version):
        self.load(self.served, model)
        self.inner.weights_version = version

    def generate(self, prompts_ids, sampling):
        return self.inner.generate(prompts_ids, sampling)

    def close(self):
        self.inner.close()


def everything(served, model):
    served.load_state_dict(model.state_dict())


def one_tensor_in_two(served, model):
    half = list(model.state_dict().items())[::2]
    served.load_state_dict(dict(half), strict=False)


def other_checkpoint(served, model):
    served.load_state_dict({name: tensor * 1.01 for name, tensor in model.state_dict().items()})


def one_layer_swapped(served, model):
    everything(served, model)
    served.model.layers[0].load_state_dict(model.model.layers[1].state_dict())


@pytest.fixture
def after_one_step(random_policy):
    """The model that the trainer holds after one small step, which an engine has not seen yet."""
    model = copy.deepcopy(random_policy.model)
    optimizer = make_optimizer(model, learning_rate=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    model(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    optimizer.step()
    return model


def test_weights_that_arrived_pass(random_policy, after_one_step):
    load_proven_weights(CopyingEngine(random_policy, everything), after_one_step, 1)


@pytest.mark.parametrize(
    "load",
    [lambda served, model: None, one_tensor_in_two, other_checkpoint, one_layer_swapped],
    ids=["nothing loaded", "one tensor in two", "another checkpoint", "one layer swapped"],
)
def test_weights_that_did_not_arrive_whole_are_refused_at_the_load(random_policy, after_one_step, load):
    engine = CopyingEngine(random_policy, load)
    with pytest.raises(EngineError, match="stale or wrong weights: after loading version 3") as caught:
        load_proven_weights(engine, after_one_step, 3)
    engines, trainers = re.search(
        r"log-probability (\S+) in the engine and (\S+) in the trainer", str(caught.value)
    ).groups()
    (completions,) = engine.generate([canary_prompt(288)], SAMPLING)
    assert float(engines) in [round(value, 6) for completion in completions for value in completion.logprobs]
    own = torch.cat(trainer_log_probs(after_one_step, completions)).tolist()
    assert min(abs(float(trainers) - value) for value in own) < 1e-5


def test_a_version_that_was_not_asked_for_and_numbers_that_are_none_are_refused(random_policy):
    (completions,) = NativeEngine(random_policy).generate([canary_prompt(288)], SAMPLING)
    require_served(random_policy.model, completions, 0)
    with pytest.raises(EngineError, match=r"version 1 was loaded, but the engine serves \[0\]"):
        require_served(random_policy.model, completions, 1)
    broken = [dataclasses.replace(completion, logprobs=(float("nan"),) * 8) for completion in completions]
    with pytest.raises(EngineError, match="nan in the engine"):
        require_served(random_policy.model, broken, 0)


def test_the_trainers_numbers_are_log_softmax_at_the_canarys_temperature(random_policy):
    completions = [
        Completion((5, 6, 7), (8, 9), "", (0.0, 0.0), "length", 0),
        Completion((5, 6, 7), (10,), "", (0.0,), "length", 0),
    ]
    rows = trainer_log_probs(random_policy.model, completions)
    assert [len(row) for row in rows] == [2, 1]
    with torch.no_grad():
        logits = random_policy.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0].double() / SAMPLING.temperature
    by_hand = [logits[2, 8] - logits[2].logsumexp(0), logits[3, 9] - logits[3].logsumexp(0)]
    torch.testing.assert_close(rows[0].double(), torch.stack(by_hand), rtol=0, atol=1e-5)
    torch.testing.assert_close(rows[1][0].double(), logits[2, 10] - logits[2].logsumexp(0), rtol=0, atol=1e-5)


def test_scoring_leaves_the_trainers_mode_as_it_was(random_policy):
    model = copy.deepcopy(random_policy.model).train()
    (completions,) = NativeEngine(random_policy).generate([canary_prompt(288)], SAMPLING)
    require_served(model, completions, 0)
    assert model.training


def test_the_prompt_is_fixed_in_the_vocabulary_and_longer_than_a_cache_block():
    assert canary_prompt(151_936) == canary_prompt(256) == canary_prompt(100_000)
    assert set(canary_prompt(50)) <= set(range(50))
    assert len(canary_prompt(50)) > 32
    assert is_canary([list(canary_prompt(300))], 300)
    assert not is_canary([list(canary_prompt(300))] * 2, 300) and not is_canary([[5, 6]], 300)
