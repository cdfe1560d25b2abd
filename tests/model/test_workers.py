"""Work that several processes share is the work of one."""

import copy
import dataclasses
import os
import signal
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from veritune.core.config import CommonConfig
from veritune.core.errors import ConfigError, EngineError, TrainingError
from veritune.core.types import Completion, Example, Rollout, Sampling, Score
from veritune.engines.native.engine import NativeEngine
from veritune.model.parallel import ALONE, share_rows, start_workers
from veritune.recipes.config import GRPOConfig
from veritune.trainer.microbatches import supervised_rank_backward
from veritune.trainer.optimizer import prepare_model
from veritune.trainer.policy_gradient import batch_backward

CONFIG = GRPOConfig(rollout_batch_size=8, train_batch_size=8, group_size=2, microbatch_tokens=20, max_tokens=12)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16, 17, 18]]


def test_shares_hold_about_as_many_positions_and_siblings_stay_together():
    prompts = [(1,), (2, 2), (1,), (3,), (4,)]
    # Groups by positions: (1,) 1 + 10 + 4 = 15, (2, 2) 2 + 7 = 9, (3,) 1 + 6 = 7, (4,) 1 + 2 = 3.
    lengths = [10, 7, 4, 6, 2]
    assert share_rows([4, 3, 2, 1, 0], prompts, lengths, 2) == [[4, 2, 0], [3, 1]]  # 15 + 3, 9 + 7
    assert share_rows([4, 3, 2, 1, 0], prompts, lengths, 1) == [[4, 3, 2, 1, 0]]
    assert share_rows([0, 2], prompts, lengths, 3) == [[0, 2]]
    assert share_rows([], prompts, lengths, 2) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=40), st.integers(1, 6))
def test_every_row_is_in_one_share_and_no_share_could_do_without_its_smallest_group(rows, count):
    prompts, lengths = [(prompt,) for prompt, _ in rows], [length for _, length in rows]
    shares = share_rows(range(len(rows)), prompts, lengths, count)
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
    assert all(share == sorted(share) and share for share in shares) and len(shares) <= count
    groups = [
        {
            prompt: 1 + sum(lengths[row] for row in share if prompts[row] == prompt)
            for prompt in map(prompts.__getitem__, share)
        }
        for share in shares
    ]
    assert sum(map(len, groups)) == len(set(prompts))
    least = min((sum(group.values()) for group in groups), default=0) if len(shares) == count else 0
    assert all(sum(group.values()) - min(group.values()) <= least for group in groups)


@pytest.fixture(scope="module")
def policy(random_policy):
    return dataclasses.replace(random_policy, model=copy.deepcopy(random_policy.model))


@pytest.fixture(scope="module")
def workers(policy):
    started = start_workers(policy, 3)
    yield started
    started.close()


def gradient_of(policy):
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()]).clone()
    policy.model.zero_grad(set_to_none=True)
    return gradient


def rollouts():
    generator = torch.Generator().manual_seed(0)
    made = []
    for row in range(8):
        ids = torch.randint(0, 288, (3 + row,), generator=generator).tolist()
        completion = Completion(tuple(PROMPTS[row // 2]), tuple(ids), "", tuple(-0.5 for _ in ids), "eos", 0)
        made.append(Rollout(Example("", "", ""), completion, Score(0.0, 1.0, 0.0), [1.5, -0.5, 0.0, 0.75][row % 4]))
    return made


def test_what_is_sampled_does_not_depend_on_how_many_sample(policy, workers):
    sampling = Sampling(max_tokens=20, n=3, seed=4)
    alone = NativeEngine(policy).generate(PROMPTS, sampling)
    engine = NativeEngine(policy, workers=workers)
    engine.load_weights(policy.model, 7)
    shared = engine.generate(PROMPTS, sampling)
    assert [len(group) for group in shared] == [3, 3, 3, 3]
    for ours, theirs in zip(chain(*shared), chain(*alone), strict=True):
        assert ours == dataclasses.replace(theirs, logprobs=ours.logprobs, weights_version=7)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)  # logits of tens
    assert len({completion.ids for group in shared for completion in group}) == 12
    assert engine.generate(PROMPTS[:1], sampling)[0] == shared[0] and engine.generate([], sampling) == []


@pytest.mark.parametrize("old", [False, True])
def test_the_gradient_is_the_sum_of_the_shares(policy, workers, old):
    config = dataclasses.replace(CONFIG, loss_type="grpo_clip", epochs_per_rollout_batch=2) if old else CONFIG
    given_old = [torch.full((3 + row,), -5.0) for row in range(8)] if old else None
    metrics = batch_backward(config, policy, rollouts(), range(8), given_old)
    alone = gradient_of(policy)
    for _ in range(2):  # a second time, nothing of the first is left
        shared_metrics = batch_backward(config, policy, rollouts(), range(8), given_old, workers=workers)
        shared = gradient_of(policy)
        assert (shared - alone).norm() / alone.norm() < 1e-6 and alone.norm() > 0
        assert shared_metrics == pytest.approx(metrics, rel=1e-5)
        assert not policy.model.training


def test_a_batch_without_advantage_has_no_gradient_in_any_process(policy, workers):
    worthless = [dataclasses.replace(rollout, advantage=0.0) for rollout in rollouts()]
    metrics = batch_backward(CONFIG, policy, worthless, range(8), workers=workers)
    assert metrics["loss"] == 0 and gradient_of(policy).count_nonzero() == 0


def test_an_update_reaches_the_workers_without_being_sent(policy, workers):
    sampling = Sampling(max_tokens=20, n=1, seed=5)
    engine = NativeEngine(policy, workers=workers)
    before = engine.generate(PROMPTS, sampling)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.5)
    after = engine.generate(PROMPTS, sampling)
    assert [group[0].ids for group in after] == [
        group[0].ids for group in NativeEngine(policy).generate(PROMPTS, sampling)
    ]
    assert after != before


def shift_weights(policy, by):
    with torch.no_grad():
        first = next(policy.model.parameters())
        first.data = first + by


def test_workers_with_other_weights_are_refused(random_policy):
    policy = dataclasses.replace(random_policy, model=copy.deepcopy(random_policy.model))
    workers = start_workers(policy, 2)
    engine = NativeEngine(policy, workers=workers)
    engine.load_weights(policy.model, 1)
    workers.call(policy, shift_weights, [(0.0,), (1.0,)])
    with pytest.raises(EngineError, match="stale or wrong weights"):
        engine.load_weights(policy.model, 2)
    workers.close()


def fail(policy, message):
    if message:
        raise TrainingError(message)


def test_an_error_of_a_worker_is_the_leaders_and_ends_the_workers(policy):
    workers = start_workers(policy, 3)
    processes = [worker.process for worker in workers._others]
    with pytest.raises(TrainingError, match="the loss is nan") as raised:
        workers.call(policy, fail, [("",), ("",), ("the loss is nan",)])
    assert f"in worker process {processes[1].pid}:\nTraceback" in raised.value.__notes__[0]
    assert not any(process.is_alive() for process in processes) and workers.count == 1


def test_control_c_is_the_leaders_alone(policy):
    workers = start_workers(policy, 2)
    for _ in range(2):  # while it starts, and when it has
        os.kill(workers._others[0].process.pid, signal.SIGINT)
        assert workers.everywhere(policy, fail, "") == [None, None]
    workers.close()


def test_a_worker_that_was_killed_is_named(policy):
    workers = start_workers(policy, 2)
    assert workers.everywhere(policy, fail, "") == [None, None]
    process = workers._others[0].process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"worker process {process.pid} has ended \(exit code -9\)"):
        workers.everywhere(policy, fail, "")
    assert workers.count == 1


def test_one_process_is_this_one_and_more_need_a_cpu(random_policy):
    assert start_workers(random_policy, 1) is ALONE
    assert ALONE.everywhere(random_policy, fail, "") == [None]
    elsewhere = dataclasses.replace(random_policy, model=copy.deepcopy(random_policy.model).to("meta"))
    with pytest.raises(ConfigError, match="processes is 2; it must be 1 on meta"):
        start_workers(elsewhere, 2)
    with pytest.raises(ConfigError, match="processes is 0; it must be at least 1"):
        CommonConfig(processes=0)
    with pytest.raises(EngineError, match="2 shares of the work are too many for 1 processes"):
        ALONE.call(random_policy, fail, [("",), ("",)])


def test_a_supervised_share_counts_the_whole_batchs_tokens(policy, workers):
    pairs = [(prompt, [20 + index, 30, 40]) for index, prompt in enumerate(PROMPTS)]
    workers.everywhere(policy, prepare_model, False)
    loss = supervised_rank_backward(policy, pairs, 12, 100)
    alone = gradient_of(policy)
    losses = workers.add_gradients(policy, supervised_rank_backward, [([pair], 12, 100) for pair in pairs[:3]])
    losses.append(supervised_rank_backward(policy, pairs[3:], 12, 100))
    shared = gradient_of(policy)
    assert sum(losses) == pytest.approx(loss, rel=1e-6)
    assert (shared - alone).norm() / alone.norm() < 1e-6
