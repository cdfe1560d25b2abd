"""Sharing prompts among servers, against stand-ins: nothing is lost, doubled or sampled from weights not asked for."""

import copy
import time

import pytest
import torch
from fake_vllm import FakeVLLM

from veritune.core.errors import EngineError
from veritune.core.http import EndpointError
from veritune.core.types import Sampling
from veritune.engines import vllm_server
from veritune.engines.vllm_server import VLLMServerEngine, save_for_servers, server_command
from veritune.engines.vllm_settings import VLLMServerSettings
from veritune.engines.weight_check import load_proven_weights
from veritune.model.policy import encode_prompts, load_policy
from veritune.trainer.microbatches import cut_microbatches, score_responses

SAMPLING = Sampling(max_tokens=12, n=3, seed=4)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(vllm_server, "HEALTH_SECONDS", 2.0)
    monkeypatch.setattr(vllm_server, "PAUSE_SECONDS", 0.05)


@pytest.fixture
def two(random_policy):
    servers = [FakeVLLM(random_policy), FakeVLLM(random_policy)]
    yield servers
    for server in servers:
        server.silent.clear()
        server.kill()


@pytest.fixture
def make(random_policy, tmp_path):
    engines = []

    def make_engine(servers, **settings):
        urls = tuple(server.url for server in servers)
        engine = VLLMServerEngine(
            random_policy, VLLMServerSettings(url=urls, weights_folder=tmp_path / "weights", seconds=60, **settings)
        )
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def prompts_ids(random_policy):
    return encode_prompts(random_policy, [f"Use {n}, 5, 18 to make {n}.\n" for n in range(10)])


@pytest.fixture(scope="module")
def moved(random_policy):
    """The policy's model after a step."""
    model = copy.deepcopy(random_policy.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator).sign())
    return model


def require_sampled_from(model, groups, prompts_ids):
    """Every completion is there once, in its prompt's place, with the log-probabilities that `model` gives it."""
    assert [[list(completion.prompt_ids) for completion in group] for group in groups] == [
        [prompt] * SAMPLING.n for prompt in prompts_ids
    ]
    completions = [completion for group in groups for completion in group]
    assert len({(completion.prompt_ids, completion.ids) for completion in completions}) == len(completions)
    microbatches = cut_microbatches(
        [c.prompt_ids for c in completions],
        [c.ids for c in completions],
        range(len(completions)),
        token_budget=10**6,
        device=torch.device("cpu"),
    )
    for microbatch in microbatches:
        scored = score_responses(model, microbatch, 1.0)
        sampled = torch.cat([torch.tensor(completions[row].logprobs) for row in microbatch.rows])
        torch.testing.assert_close(scored, sampled, rtol=0, atol=1e-4)


def test_both_servers_work_and_one_alone_gives_the_same(two, make, moved, prompts_ids):
    engine = make(two)
    load_proven_weights(engine, moved, 3)
    before = [server.generated for server in two]
    groups = engine.generate(prompts_ids, SAMPLING)
    require_sampled_from(moved, groups, prompts_ids)
    worked = [server.generated - earlier for server, earlier in zip(two, before, strict=True)]
    assert sum(worked) == 10 and min(worked) > 0
    assert {completion.weights_version for group in groups for completion in group} == {3}
    two[0].kill()
    alone = engine.generate(prompts_ids, SAMPLING)
    assert [[c.ids for c in group] for group in alone] == [[c.ids for c in group] for group in groups]


def test_a_server_killed_in_a_call_and_restarted_is_taken_back_with_the_present_weights(two, make, moved, prompts_ids):
    engine = make(two, concurrency=4)
    load_proven_weights(engine, moved, 1)
    lives = engine.servers[0].life
    requests = []

    def kill_once(server):
        requests.append(server.label)
        if len(requests) == 3:
            server.before_generate = lambda server: None
            server.kill()
            server.start()  # with its first weights and the label "default"

    two[0].before_generate = kill_once
    two[0].delay = two[1].delay = 0.05
    groups = engine.generate(prompts_ids * 2, SAMPLING)
    assert engine.servers[0].life > lives, "it was never taken back"
    again = engine.generate(prompts_ids * 2, SAMPLING)
    assert [[c.ids for c in group] for group in again] == [[c.ids for c in group] for group in groups]
    require_sampled_from(moved, groups[:10], prompts_ids)
    require_sampled_from(moved, groups[10:], prompts_ids)


def test_a_server_that_restarts_between_two_requests_is_found_out_by_its_label(two, make, moved, prompts_ids):
    engine = make(two[:1])
    load_proven_weights(engine, moved, 1)
    two[0].kill()
    two[0].start()
    require_sampled_from(moved, engine.generate(prompts_ids, SAMPLING), prompts_ids)
    assert two[0].label == engine.label


def test_a_stalled_server_loses_its_prompts_to_the_other(two, make, moved, prompts_ids):
    engine = make(two, concurrency=5)  # of ten prompts, so that one server cannot take them all
    load_proven_weights(engine, moved, 1)
    two[1].before_generate = lambda server: server.silent.set()
    # The other waits until the first has a prompt to lose: else it may answer them all before.
    two[0].before_generate = lambda server: two[1].silent.wait(60)
    began = time.monotonic()
    require_sampled_from(moved, engine.generate(prompts_ids, SAMPLING), prompts_ids)
    assert time.monotonic() - began < 50, "the stalled server was waited for"
    assert [server.ready for server in engine.servers] == [True, False]
    two[0].before_generate = two[1].before_generate = lambda server: None
    two[1].silent.clear()
    engine.load_weights(moved, 2)
    assert [server.ready for server in engine.servers] == [True, True]


def test_a_server_that_nobody_waits_for_any_more_is_left_as_it_is(two, make, moved):
    engine = make(two)
    load_proven_weights(engine, moved, 1)
    with pytest.raises(EndpointError, match="came back too late"):  # as a thread of the last batch would try
        engine._take_in(engine.servers[0], lambda: False)
    assert [server.ready for server in engine.servers] == [True, True]


def test_a_load_that_one_server_ignores_stops_the_run(two, make, moved):
    engine = make(two)
    two[1].ignore_reloads = True
    with pytest.raises(EngineError, match=f"{two[1].url}: stale or wrong weights: after loading version 1"):
        engine.load_weights(moved, 1)


def test_no_server_left_is_an_error_that_names_each(two, make, moved, prompts_ids):
    engine = make(two)
    engine.settings = VLLMServerSettings(url=engine.settings.url, seconds=0.5)
    two[0].kill()
    two[1].kill()
    with pytest.raises(EngineError, match=rf"every vLLM server is lost: {two[0].url}.*{two[1].url}"):
        engine.generate(prompts_ids, SAMPLING)
    with pytest.raises(EngineError, match="no vLLM server could be given weights version 1"):
        engine.load_weights(moved, 1)


def test_a_refused_prompt_is_an_error_and_not_tried_for_ever(two, make):
    engine = make(two)
    with pytest.raises(EngineError, match=r"answered 400.*too long"):
        engine.generate([[5] * 250], SAMPLING)


def test_a_prompt_that_kills_servers_is_given_up(two, make, prompts_ids):
    engine = make(two)

    original = FakeVLLM.generate

    class Deadly(FakeVLLM):
        def generate(self, payload):
            return (500, {"error": "boom"}) if payload["token_ids"] == prompts_ids[3] else original(self, payload)

    for server in two:
        server.__class__ = Deadly
    with pytest.raises(EngineError, match=r"prompt 3 failed 5 times, at last: .*answered 500.*boom"):
        engine.generate(prompts_ids, SAMPLING)


def test_a_server_without_its_development_endpoints_says_what_to_start(two, make):
    two[0].missing = ("collective_rpc",)
    with pytest.raises(EngineError, match="/collective_rpc: start it with VLLM_SERVER_DEV_MODE=1"):
        make(two[:1])


def test_nobody_at_the_address_is_an_error_at_once(two, make):
    two[0].kill()
    with pytest.raises(EngineError, match=f"no vLLM server answers at {two[0].url}"):
        make(two[:1])


def test_weights_over_nccl_are_sent_once_for_each_server_and_load(two, random_policy, moved, tmp_path, prompts_ids):
    opened, sent = [], []

    def open_transfer(url, model, port, gpus):
        opened.append(url)
        server = next(server for server in two if server.url == url)

        def send():
            sent.append(url)
            server.model.load_state_dict(engine_model().state_dict())

        return send

    def engine_model():
        return moved if len(opened) == 2 and len(sent) > 2 else random_policy.model

    for server in two:
        answer = server.answer
        server.answer = lambda path, payload, answer=answer: (
            (200, {"world_size": 1}) if path == "/get_world_size" else answer(path, payload)
        )
    settings = VLLMServerSettings(url=tuple(server.url for server in two), weights_folder=tmp_path, seconds=20)
    engine = VLLMServerEngine(random_policy, settings, open_transfer=open_transfer)
    engine.load_weights(moved, 1)
    assert sorted(opened) == sorted(server.url for server in two)
    assert sorted(sent) == sorted([server.url for server in two] * 2)
    require_sampled_from(moved, engine.generate(prompts_ids, SAMPLING), prompts_ids)
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tied_policy_is_written_with_a_head_of_its_own(random_policy, tmp_path):
    save_for_servers(random_policy, tmp_path / "untied", untied=True)
    loaded = load_policy(str(tmp_path / "untied"))
    assert not loaded.model.config.tie_word_embeddings
    head, embeddings = loaded.model.get_output_embeddings().weight, loaded.model.get_input_embeddings().weight
    assert head.data_ptr() != embeddings.data_ptr() and torch.equal(head, embeddings)
    save_for_servers(random_policy, tmp_path / "tied")
    assert load_policy(str(tmp_path / "tied")).model.config.tie_word_embeddings


def test_a_server_of_our_own_listens_on_loopback_and_logs_what_was_sampled_from(tmp_path):
    arguments, environment = server_command(
        tmp_path, "cuda:1", 8123, "bfloat16", 4096, VLLMServerSettings(start=("cuda:1",), max_model_len=2048)
    )
    line = " ".join(arguments)
    assert "--host 127.0.0.1 --port 8123" in line and "--logprobs-mode processed_logprobs" in line
    assert "--max-model-len 2048" in line and "--dtype bfloat16" in line and "--enforce-eager" not in line
    assert environment["CUDA_VISIBLE_DEVICES"] == "1" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    arguments, environment = server_command(tmp_path, "cpu", 8123, "float32", 8192, VLLMServerSettings(start=("cpu",)))
    assert " ".join(arguments).endswith("--max-num-batched-tokens 8192")
    assert "--enforce-eager" in arguments and "CUDA_VISIBLE_DEVICES" not in environment
