"""The same odd answers to everything that asks over HTTP: one kind of error, in time, and another attempt."""

import json
import math
import time
from dataclasses import replace

import pytest
from fake_vllm import FakeVLLM

from odd_answers import DEEP, FAULTS, LOG_PROBS, REFUSALS, SLOW, RawServer, play, respond, with_choice
from veritune.core import http
from veritune.core.errors import EngineError
from veritune.core.types import Sampling
from veritune.discovery.config import DiscoverConfig, ModelSettings
from veritune.discovery.proposers import Request, build_proposer, model_endpoint
from veritune.engines import shared_prompts, vllm_server
from veritune.engines.api import APIEngine, APISettings
from veritune.engines.vllm_server import VLLMServerEngine
from veritune.engines.vllm_settings import VLLMServerSettings

ALWAYS = 10**9
SAMPLING = Sampling(max_tokens=5, n=2, seed=3)


class Asked:
    """A client and its server: `ask()` has the server answer by a fault first, so many times."""

    def __init__(self, server, ask, set_seconds):
        self.server, self._ask, self.set_seconds = server, ask, set_seconds

    def ask(self, fault, times):
        self.server.fault, self.server.faulty_answers = fault, times
        return self._ask()


def scripted(answer, encode):
    def respond_or_not(send, path, payload):
        server.faulty_answers -= 1
        if server.faulty_answers >= 0:
            play(server.fault, send, json.loads(json.dumps(answer)), encode)
        else:
            respond(send, encode(json.dumps(answer)))

    server = RawServer(respond_or_not)
    return server


@pytest.fixture(scope="module")
def api(random_policy):
    choice = {"index": 0, "text": "fine", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5]}}

    def as_event(text):
        return b"data: " + (text if isinstance(text, bytes) else text.encode()) + b"\n\n"

    with scripted({"choices": [choice]}, as_event) as server:
        engine = APIEngine(random_policy.tokenizer, APISettings(url=server.url, model="m", retries=1))

        def ask():
            ((completion,),) = engine.generate([[20]], Sampling(max_tokens=5))
            return completion.text, completion.logprobs

        def set_seconds(seconds):
            engine.settings = replace(engine.settings, seconds=seconds, retries=0 if seconds < 9 else 1)

        yield Asked(server, ask, set_seconds)
        engine.close()


@pytest.fixture(scope="module")
def proposer():
    message = {"role": "assistant", "content": "fine"}
    answer = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}], "usage": {"prompt_tokens": 3}}
    with scripted(answer, lambda text: text) as server:
        configs = [DiscoverConfig(engine_settings=ModelSettings(model="m", url=server.url, retries=1))]

        def set_seconds(seconds):
            settings = ModelSettings(model="m", url=server.url, seconds=seconds, retries=0 if seconds < 9 else 1)
            configs.append(DiscoverConfig(engine_settings=settings))

        def ask():
            propose = build_proposer(configs[-1], model_endpoint(configs[-1]))
            answer = propose(Request([{"role": "user", "content": "?"}], None, 0, math.inf), lambda *_: None)
            return answer.answer, answer.finish_reason, answer.prompt_tokens, answer.completion_tokens

        yield Asked(server, ask, set_seconds)


@pytest.fixture(scope="module")
def servers(random_policy, tmp_path_factory):
    server = FakeVLLM(random_policy)
    settings = VLLMServerSettings(url=(server.url,), weights_folder=tmp_path_factory.mktemp("weights"), seconds=60)
    engine = VLLMServerEngine(random_policy, settings)

    def ask():
        (group,) = engine.generate([[20, 21]], SAMPLING)
        return [(completion.ids, completion.logprobs) for completion in group]

    def set_seconds(seconds):
        engine.settings = replace(settings, seconds=seconds)

    asked = Asked(server, ask, set_seconds)
    asked.load_weights = engine.load_weights
    yield asked
    engine.close()
    server.kill()


@pytest.fixture(params=["api", "proposer", "servers"])
def asked(request, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(vllm_server, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(shared_prompts, "MOST_ATTEMPTS", 2)
    found = request.getfixturevalue(request.param)
    yield found
    found.set_seconds(60.0)


@pytest.mark.parametrize("name", FAULTS)
def test_an_odd_answer_is_asked_for_again_and_without_end_an_error(asked, name):
    right = asked.ask(None, 0)
    assert asked.ask(FAULTS[name], 1) == right
    with pytest.raises(EngineError):
        asked.ask(FAULTS[name], ALWAYS)


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_answer_is_given_up_in_time(asked, name, monkeypatch):
    monkeypatch.setattr(shared_prompts, "MOST_ATTEMPTS", 1)
    asked.ask(None, 0)
    asked.set_seconds(0.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no complete answer within 0\.5 s"):
        asked.ask(SLOW[name], ALWAYS)
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_not_asked_for_again(asked, name):
    asked.ask(None, 0)
    with pytest.raises(EngineError, match=r"answered (302|403)"):
        asked.ask(REFUSALS[name], ALWAYS)
    assert asked.server.faulty_answers == ALWAYS - 1


WRONG_TEXTS = {"a number": 7, "a list": ["fine"], "an object": {"text": "fine"}, "true": True}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_a_text_is_a_text(api, proposer, name, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    with pytest.raises(EngineError, match="is not str"):
        api.ask(with_choice(text=WRONG_TEXTS[name]), ALWAYS)
    with pytest.raises(EngineError, match="is not str"):
        proposer.ask(with_choice(message={"content": WRONG_TEXTS[name]}), ALWAYS)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_a_log_probability_is_finite_and_at_most_0(api, servers, name, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(vllm_server, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(shared_prompts, "MOST_ATTEMPTS", 2)
    with pytest.raises(EngineError, match=r"log-probability|is not float"):
        api.ask(with_choice(logprobs={"token_logprobs": [-0.1, LOG_PROBS[name]]}), ALWAYS)

    def fault(send, answer, encode):
        answer["choices"][1]["logprobs"]["content"][1]["logprob"] = LOG_PROBS[name]
        respond(send, json.dumps(answer))

    with pytest.raises(EngineError, match=r"failed 2 times.*(log-probability|is not float)"):
        servers.ask(fault, ALWAYS)


def token(choice, value):
    choice["token_ids"][0] = value


def lengthen(choices):
    ids, steps = choices[0]["token_ids"], choices[0]["logprobs"]["content"]
    ids += ids[:1] * (6 - len(ids))
    steps += steps[:1] * (6 - len(steps))


UNTRAINABLE = {
    "one choice too few": lambda choices: choices.pop(),
    "one choice too many": lambda choices: choices.append({**choices[0], "index": 2}),
    "one choice twice": lambda choices: choices[1].update(index=0),
    "an index that is a text": lambda choices: choices[1].update(index="1"),
    "an id beyond the vocabulary": lambda choices: token(choices[1], 288),
    "an id below 0": lambda choices: token(choices[0], -1),
    "an id that is a float": lambda choices: token(choices[0], 5.0),
    "an id that is true": lambda choices: token(choices[0], True),
    "ids that are a text": lambda choices: choices[0].update(token_ids="12345"),
    "no ids": lambda choices: choices[0].update(token_ids=[], logprobs={"content": []}),
    "more ids than max_tokens": lengthen,
    "an id without log-probability": lambda choices: choices[0]["logprobs"]["content"].pop(),
    "no log-probabilities": lambda choices: choices[0].update(logprobs=None),
    "no version": lambda choices: choices[1].update(weight_versions=[]),
    "another version": lambda choices: choices[1]["weight_versions"].append({"version": "default"}),
    "a version that is a list": lambda choices: choices[1].update(weight_versions=[{"version": []}]),
    "an end that is none": lambda choices: choices[0].update(finish_reason=None),
    "an abort": lambda choices: choices[0].update(finish_reason="abort"),
    "a stop reason that is a list": lambda choices: choices[0].update(stop_reason=["x"]),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_was_not_sampled_as_asked_is_not_trained_on(servers, name, monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(shared_prompts, "MOST_ATTEMPTS", 2)
    right = servers.ask(None, 0)

    def fault(send, answer, encode):
        UNTRAINABLE[name](answer["choices"])
        respond(send, json.dumps(answer))

    assert servers.ask(fault, 1) == right
    with pytest.raises(EngineError, match=r"prompt 0 failed 2 times, at last: .* answered unlike vLLM"):
        servers.ask(fault, ALWAYS)


CONTROLS = ["/abort_requests", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/health"]


@pytest.mark.parametrize("path", CONTROLS)
@pytest.mark.parametrize("body", ["[1]", "7", '"yes"', "<html>", DEEP], ids=["list", "number", "text", "page", "deep"])
def test_odd_answers_to_a_load_leave_the_server_out(servers, random_policy, path, body):
    if path == "/health" and body in ("[1]", "7", '"yes"'):
        pytest.skip("any answer is health")
    servers.server.faulty_path = path
    servers.server.fault, servers.server.faulty_answers = lambda send, answer, encode: respond(send, body), ALWAYS
    with pytest.raises(EngineError, match=f"no vLLM server could be given weights version 1: {servers.server.url}"):
        servers.load_weights(random_policy.model, 1)
    servers.server.faulty_answers = 0
    servers.load_weights(random_policy.model, 2)
    servers.server.faulty_path = "/inference/v1/generate"
