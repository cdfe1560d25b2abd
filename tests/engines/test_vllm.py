"""The real vLLM on a CPU: how weights go in, the published helpers, and whole GRPO runs. Run by `make test-vllm`."""

import copy
import json
import os
import signal
import threading
import time
import weakref
from collections import Counter

import pytest
import torch

pytest.importorskip("vllm")

from veritune.commands.launch import launch
from veritune.core.errors import EngineError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Sampling
from veritune.engines import vllm as vllm_engine
from veritune.engines import vllm_server
from veritune.engines.vllm import VLLMEngine, evaluate_vllm, init_vllm, load_policy_into_vllm_instance
from veritune.engines.vllm_server import VLLMServerEngine
from veritune.engines.vllm_settings import VLLMServerSettings, VLLMSettings
from veritune.engines.weight_check import load_proven_weights
from veritune.model.policy import encode_prompts, load_policy, save_policy
from veritune.recipes.config import GRPOConfig
from veritune.recipes.grpo import run as run_grpo
from veritune.tasks import load_task
from veritune.trainer.session import Session

SMALL = {
    "steps": 3,
    "rollout_batch_size": 32,
    "group_size": 4,
    "train_batch_size": 32,
    "max_tokens": 48,
    "validation_examples": 16,
    "validate_every": 2,
    "checkpoint_every": 3,
    "skip_zero_advantages": False,
    "threads": 1,
}


@pytest.fixture(scope="module")
def engine(random_policy):
    made = VLLMEngine(random_policy, VLLMSettings())
    yield made
    made.close()


@pytest.fixture
def moved(random_policy):
    """The model after one small step."""
    model = copy.deepcopy(random_policy.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3e-5 * torch.randn(parameter.shape, generator=generator).sign())
    return model


def reload(engine, weights):
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights)})


def skipped(engine, model):
    pass


def wrong_checkpoint(engine, model):
    load_policy_into_vllm_instance(_scaled(model, 1.01), engine.llm)


def half_of_the_layers(engine, model):
    reload(engine, [(name, tensor) for name, tensor in model.named_parameters() if ".layers.0." in name])
    engine.llm.reset_prefix_cache()


def head_left_stale(engine, model):
    reload(engine, model.named_parameters())
    engine.llm.reset_prefix_cache()


def cache_left_stale(engine, model):
    reload(engine, model.named_parameters())
    engine.llm.apply_model(vllm_engine._pack_head_again)


def _scaled(model, factor):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(factor)
    return other


@pytest.mark.parametrize(
    "load", [skipped, wrong_checkpoint, half_of_the_layers, head_left_stale, cache_left_stale], ids=lambda f: f.__name__
)
def test_weights_that_did_not_arrive_whole_are_refused_at_the_load(engine, random_policy, moved, load, monkeypatch):
    load_proven_weights(engine, random_policy.model, 1)

    def faulty(model, version):
        load(engine, model)
        engine.weights_version = version

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load_weights", faulty)
        with pytest.raises(EngineError, match="stale or wrong weights: after loading version 2"):
            load_proven_weights(engine, moved, 2)
    load_proven_weights(engine, moved, 2)


def test_the_engine_keeps_what_it_was_given_when_the_trainer_moves_on(engine, random_policy):
    model = copy.deepcopy(random_policy.model)
    load_proven_weights(engine, model, 1)
    sampling, prompt = Sampling(temperature=0, max_tokens=20), [5, 6, 7]
    before = engine.generate([prompt], sampling)[0][0].ids
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    assert engine.generate([prompt], sampling)[0][0].ids == before


def test_torch_in_this_process_still_works(engine):
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3] and weight.dtype == torch.float32


def test_sleeping_follows_generating_but_not_the_canary(random_policy, moved):
    engine = VLLMEngine(random_policy, VLLMSettings(sleep_level=2))
    load_proven_weights(engine, moved, 1)
    assert not engine.asleep
    first = engine.generate([[5, 6, 7]], Sampling(max_tokens=8))
    assert engine.asleep
    with pytest.raises(EngineError, match="dropped its weights"):
        engine.generate([[5, 6, 7]], Sampling(max_tokens=8))
    load_proven_weights(engine, moved, 2)
    engine.sleep_level = 1
    second = engine.generate([[5, 6, 7]], Sampling(max_tokens=8))
    third = engine.generate([[5, 6, 7]], Sampling(max_tokens=8))
    assert engine.asleep and first[0][0].ids == second[0][0].ids == third[0][0].ids
    held = weakref.ref(engine.llm)
    engine.close()
    assert held() is None


def test_the_published_helpers(random_policy, moved, tmp_path):
    from vllm import SamplingParams

    save_policy(random_policy, tmp_path / "policy")
    llm = init_vllm(str(tmp_path / "policy"), "cpu", seed=3)
    load_policy_into_vllm_instance(moved, llm)
    prompts, params = ["Use 9, 5", "18-5="], SamplingParams(temperature=0, max_tokens=10, logprobs=0)
    reward = {"Use 9, 5": 1.0, "18-5=": 0.5}
    means = evaluate_vllm(
        llm,
        lambda text, prompt: {"reward": reward[prompt], "rule": "r"},
        prompts,
        params,
        output=tmp_path / "out.jsonl",
    )
    assert means == {"reward": 0.75}
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts and rows[1]["reward"] == {"reward": 0.5, "rule": "r"}
    ids = random_policy.encode(prompts[0])
    expected = moved.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10, pad_token_id=0)[0, len(ids) :]
    assert rows[0]["response"] == random_policy.tokenizer.decode(expected, skip_special_tokens=True)
    llm.llm_engine.engine_core.shutdown()


def test_grpo_trains_with_vllm_on_the_trainers_own_numbers(tmp_path):
    config = GRPOConfig(engine="vllm", run=tmp_path / "run", **SMALL)
    assert config.corrects_importance
    run = RunFolder.open(launch("grpo", config))
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["mismatch_kl"] < 1e-4 and row["grad_norm"] > 0 for row in rows[1:])
    for step in (1, 2, 3):
        rollouts = run.read_rows("rollouts", step)
        assert len(rollouts) == 32 and {row["weights_version"] for row in rollouts} == {step - 1}


def test_a_server_killed_in_a_step_and_restarted_costs_no_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSE_SECONDS", 0.2)
    policy = load_policy("embedded")
    engine = VLLMServerEngine(policy, VLLMServerSettings(start=("cpu", "cpu"), seconds=300, concurrency=8))
    victim, killed = engine.servers[0], []

    def kill_in_a_step():
        while engine.weights_version != 1 or not engine.stepping:
            time.sleep(0.005)
        os.killpg(victim.process.process.pid, signal.SIGKILL)
        killed.append(victim.life)

    engine.stepping = False
    generate = engine.generate

    def watched_generate(prompts_ids, sampling):
        engine.stepping = len(prompts_ids) == 24
        if engine.weights_version == 3 and engine.stepping:
            while not victim.is_healthy(30):  # it may take longer to start than the steps take
                time.sleep(0.2)
            engine.load_weights(engine.model, 3)
        return generate(prompts_ids, sampling)

    monkeypatch.setattr(engine, "generate", watched_generate)
    threading.Thread(target=kill_in_a_step, daemon=True).start()
    config = GRPOConfig(
        engine="vllm-server",
        engine_settings=engine.settings,
        **{**SMALL, "steps": 5, "rollout_batch_size": 96, "train_batch_size": 96, "validate_every": 5},
    )
    run = RunFolder.create(tmp_path / "run", "", {})
    run_grpo(Session(config, policy, load_task(config), engine, run))
    assert killed and victim.ready and victim.life > killed[0]
    for step in range(1, 6):
        rows = run.read_rows("rollouts", step)
        assert len(rows) == 96 and {row["weights_version"] for row in rows} == {step - 1}
        assert set(Counter(row["id"] for row in rows).values()) == {4}, "a rollout was lost or doubled"
    assert all(row["mismatch_kl"] < 1e-4 and row["grad_norm"] > 0 for row in run.metrics()[1:])
    processes = [server.process for server in engine.servers]
    engine.close()
    assert not any(process.is_running() for process in processes) and not engine.folder.exists()


def test_an_untied_policy_loads_exactly_too(random_policy, tmp_path):
    vllm_server.save_for_servers(random_policy, tmp_path / "untied", untied=True)
    untied = load_policy(str(tmp_path / "untied"))
    engine = VLLMEngine(untied, VLLMSettings())
    for parameter in untied.model.parameters():
        parameter.data.mul_(0.9)
    load_proven_weights(engine, untied.model, 1)
    prompts_ids = encode_prompts(untied, ["Use 9, 5, 18 to make 4.\n"])
    assert len(engine.generate(prompts_ids, Sampling(max_tokens=4, n=2))[0]) == 2
    engine.close()
