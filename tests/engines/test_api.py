"""The endpoint engine against a scripted endpoint: streams, stop strings, refusals, and faults worth another try."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from veritune.cli import main
from veritune.commands.launch import launch
from veritune.core import http
from veritune.core.config import from_mapping, read_toml
from veritune.core.errors import ConfigError, EngineError
from veritune.core.run_folder import RunFolder
from veritune.core.tables import flatten
from veritune.core.types import Sampling
from veritune.engines.api import APIEngine, APISettings
from veritune.model import policy as policies
from veritune.model.parallel import ALONE
from veritune.recipes.config import EvalConfig, GRPOConfig


class Endpoint:
    """Answers every request by `script(payload, attempt)`: a list of events, or (status, headers, body)."""

    def __init__(self, script):
        self.script, self.requests, self.keys, self.broken = script, [], [], 0
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.endpoint.lock:
            attempt = sum(earlier == payload for earlier in self.endpoint.requests)
            self.endpoint.requests.append(payload)
            self.endpoint.keys.append(self.headers["Authorization"])
        assert self.path == "/v1/completions"
        answer = self.endpoint.script(payload, attempt)
        if isinstance(answer, tuple):
            status, headers, body = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())
            return
        self.send_response(200)
        self.end_headers()
        try:
            for event in answer:
                self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        except OSError:
            self.endpoint.broken += 1

    def log_message(self, *_):
        pass


ECHO = """
from dataclasses import dataclass
from veritune.core.types import Completion, EngineSettings

@dataclass(frozen=True, kw_only=True)
class EchoSettings(EngineSettings):
    text: str = "hello"
    can_load_weights = False

    def create(self, policy, workers):
        return Echo(self, policy.tokenizer)

class Echo:
    def __init__(self, settings, tokenizer):
        self.text, self.ids = settings.text, tuple(tokenizer(settings.text)["input_ids"])

    def generate(self, prompts_ids, sampling):
        one = [(tuple(prompt), self.ids, self.text, (0.0,) * len(self.ids), "eos", 0) for prompt in prompts_ids]
        return [[Completion(*each)] * sampling.n for each in one]

    def load_weights(self, model, version): ...
    def close(self): ...
"""


def piece(text, finish_reason=None, logprobs=None):
    return {"choices": [{"text": text, "finish_reason": finish_reason, "logprobs": logprobs}]}


@pytest.fixture
def serve(random_policy, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    endpoints = []

    def start(script, **options):
        endpoints.append(Endpoint(script))
        options = {"url": endpoints[-1].url, "model": "some-model", "seconds": 5.0, "retries": 3, **options}
        return endpoints[-1], APIEngine(random_policy.tokenizer, APISettings(**options))

    yield start
    for endpoint in endpoints:
        endpoint.http.shutdown()
        endpoint.http.server_close()


def test_text_goes_out_and_streamed_text_comes_back_in_place(serve, random_policy, monkeypatch):
    def script(payload, attempt):
        numbers = {"token_logprobs": [None, -0.5]}
        return [piece("so: "), piece(payload["prompt"], logprobs=numbers), piece("", "stop"), "[DONE]"]

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint, engine = serve(script)
    prompts = [random_policy.encode(text) for text in ("Use 9, 5 to", "18-5=13")]
    groups = engine.generate(prompts, Sampling(n=3, temperature=0.6, top_p=0.9, max_tokens=7, seed=1))
    assert [[c.text for c in group] for group in groups] == [["so: Use 9, 5 to"] * 3, ["so: 18-5=13"] * 3]
    assert groups[0][0].prompt_ids == tuple(prompts[0]) and groups[0][0].logprobs == (-0.5,)
    assert groups[0][0].ids == tuple(random_policy.encode("so: Use 9, 5 to"))
    assert {c.finish_reason for group in groups for c in group} == {"eos"}
    assert set(endpoint.keys) == {"Bearer secret"}
    sent = endpoint.requests[0]
    assert (sent["model"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == ("some-model", 0.6, 0.9, 7)
    seeds = [request["seed"] for request in endpoint.requests]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**31 for seed in seeds)


def test_the_bos_that_the_endpoint_adds_by_itself_is_not_sent(serve, random_policy, monkeypatch):
    tag = random_policy.tokenizer.convert_tokens_to_ids("<think>")
    monkeypatch.setattr(policies, "bos_ids", lambda tokenizer: (tag,))
    endpoint, engine = serve(lambda payload, attempt: [piece("", "stop"), "[DONE]"])
    ids = random_policy.encode("two")
    for prompt in ([tag, *ids], ids, [tag, tag, *ids]):
        engine.generate([prompt], Sampling(max_tokens=7))
    assert [request["prompt"] for request in endpoint.requests] == ["two", "two", "<think>two"]


def test_a_stop_string_is_found_across_pieces_and_hung_up_on(serve):
    def script(payload, attempt):
        yield from (piece("<answer> 5 </ans"), piece("wer> and"))
        for _ in range(100_000):
            yield piece(" on and on")

    endpoint, engine = serve(script)
    ((completion,),) = engine.generate([[20]], Sampling(max_tokens=7, stop=("never", "</answer>")))
    assert (completion.text, completion.finish_reason) == ("<answer> 5 </answer>", "stop")
    deadline = time.monotonic() + 10
    while not endpoint.broken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert endpoint.broken == 1


def test_an_end_without_the_stop_string_stays_without_it(serve):
    _, engine = serve(lambda payload, attempt: [piece("<answer> 5", "stop"), "[DONE]"])
    ((completion,),) = engine.generate([[20]], Sampling(max_tokens=7, stop=("</answer>",)))
    assert (completion.text, completion.finish_reason) == ("<answer> 5", "eos")
    _, engine = serve(lambda payload, attempt: [piece("<answer> 5", "length"), "[DONE]"])
    ((completion,),) = engine.generate([[20]], Sampling(max_tokens=7))
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    "fault",
    [
        (500, {}, "boom"),
        (429, {"Retry-After": "0"}, "slow down"),
        [piece("half a resp")],
        [piece("half"), {"error": {"message": "engine died"}}],
        ["{not json"],
        [{"choices": [{"delta": {}}]}],
        [{"object": "error"}],
    ],
)
def test_a_fault_is_tried_again(serve, fault):
    whole = [piece("fine", "stop"), "[DONE]"]
    endpoint, engine = serve(lambda payload, attempt: fault if attempt < 2 else whole)
    ((completion,),) = engine.generate([[20]], Sampling(max_tokens=7))
    assert completion.text == "fine" and len(endpoint.requests) == 3


def test_faults_without_end_and_refusals_are_errors_that_say_why(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint, engine = serve(lambda payload, attempt: (503, {}, "loading the model"))
    with pytest.raises(EngineError, match=r"no completion after 4 attempts: .*503: loading the model") as caught:
        engine.generate([[20]], Sampling(max_tokens=7))
    assert len(endpoint.requests) == 4 and "secret" not in str(caught.value)
    endpoint, engine = serve(lambda payload, attempt: (401, {}, "bad key"))
    with pytest.raises(EngineError, match=r"after 1 attempts: .*401: bad key"):
        engine.generate([[20]] * 50, Sampling(max_tokens=7))


def test_silence_is_given_up_after_the_given_seconds(serve):
    release = threading.Event()
    _, engine = serve(
        lambda payload, attempt: [piece("late", "stop")] if release.wait(10) else [], seconds=0.2, retries=0
    )
    with pytest.raises(EngineError, match="no completion after 1 attempts"):
        engine.generate([[20]], Sampling(max_tokens=7))
    release.set()


def test_what_an_endpoint_cannot_do_is_refused_by_name(serve, random_policy):
    _, engine = serve(lambda payload, attempt: [])
    with pytest.raises(EngineError, match="serves its own weights"):
        engine.load_weights(random_policy.model, 1)
    with pytest.raises(EngineError, match="min_tokens is 3"):
        engine.generate([[20]], Sampling(max_tokens=7, min_tokens=3))
    assert engine.generate([], Sampling()) == []
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[20]], Sampling())


def test_the_key_comes_from_the_named_variable_and_nowhere_else(serve, random_policy, monkeypatch):
    endpoint, _ = serve(lambda payload, attempt: [piece("x", "stop"), "[DONE]"])
    monkeypatch.setenv("MY_KEY", "abc")
    settings = APISettings(url=endpoint.url + "/v1/", model="m", api_key_env="MY_KEY")
    engine = EvalConfig(engine="api", engine_settings=settings).engine_settings.create(random_policy, ALONE)
    engine.generate([[20]], Sampling(max_tokens=3))
    assert endpoint.keys == ["Bearer abc"]


def test_the_run_folder_of_an_endpoint_is_nobody_elses(serve, tmp_path, monkeypatch):
    endpoint, _ = serve(lambda payload, attempt: [piece("x", "stop"), "[DONE]"])
    monkeypatch.setenv("MY_KEY", "abc")
    settings = APISettings(url=endpoint.url + "/v1/", model="m", api_key_env="MY_KEY")
    config = EvalConfig(validation_examples=1, run=tmp_path / "asked", engine="api", engine_settings=settings)
    asked = launch("eval", config)
    assert asked.stat().st_mode & 0o777 == 0o700
    own = launch("eval", EvalConfig(validation_examples=1, run=tmp_path / "own", max_tokens=2))
    assert own.stat().st_mode & 0o077 == 0o055 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "api"}, "setting 'engine.model' is missing"),
        ({"name": "api", "model": ""}, "^engine.model is ''; it must be the name of the model"),
        ({"name": "api", "model": "m", "url": ["http://a", "http://b"]}, "engine.url is .*; it must be of type str"),
        ({"name": "api", "model": "m", "url": "localhost:8000"}, "^engine.url is 'localhost:8000'"),
        (
            {"name": "api", "model": "m", "url": "http://anna:hun/ter2@host"},
            r"^engine.url is 'http://\*\*\*@host'; it must be an address",
        ),
        ({"name": "api", "model": "m", "url": "http://host:8000x"}, "^engine.url is"),
        ({"name": "api", "model": "m", "url": "http:///v1"}, "^engine.url is"),
        ({"name": "api", "model": "m", "seconds": 0.0}, "^engine.seconds is 0.0; it must be positive"),
        ({"name": "api", "model": "m", "retries": -1}, "^engine.retries is -1; it must be 0 or more"),
        ({"name": "vllm-server"}, "^engine.url and start are empty"),
        ({"name": "vllm-server", "url": ["localhost:8000"]}, r"^engine.url is \('localhost:8000',\)"),
        ({"name": "vllm-server", "start": ["gpu"]}, r"^engine.start is \('gpu',\); it must be a list of cpu"),
        ({"name": "vllm-server", "start": ["cpu"], "concurrency": 0}, "^engine.concurrency is 0"),
        ({"name": "vllm", "max_model_len": 10}, "^engine.max_model_len is 10; it must be at least 64"),
        ({"name": "vllm", "gpu_memory_utilization": 1.5}, "^engine.gpu_memory_utilization is 1.5"),
        ({"name": "vllm", "url": ["http://a"]}, "engine vllm: unknown setting 'engine.url'; allowed are .*eager"),
        ({"name": "native", "max_rows": 0}, "^engine.max_rows is 0; it must be at least 1"),
        ({"name": "nativ"}, r"engine is 'nativ'; allowed are native, .* \(did you mean native\?\)"),
        ({"name": "veritune.core.types:Score"}, "is no EngineSettings"),
    ],
)
def test_impossible_engine_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(EvalConfig, {"engine": settings}, "test")


def test_an_engine_from_outside(tmp_path, monkeypatch, capsys):
    (tmp_path / "echo_engine.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    arguments = ["--engine", "echo_engine:EchoSettings", "--engine-text", "7", "--validation-examples", "3"]
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments, "--run", "run"])
    assert ended.value.code in (0, None), capsys.readouterr().err
    assert [row["response"] for row in RunFolder(tmp_path / "run").read_rows("validation", 0)] == ["7"] * 3
    assert flatten(read_toml(tmp_path / "run" / "config.toml"))["engine.text"] == "7"
    with pytest.raises(ConfigError, match="engine is 'echo_engine:EchoSettings'; it must be another while training"):
        GRPOConfig(engine="echo_engine:EchoSettings")


def test_a_password_in_the_address_is_written_nowhere(tmp_path, monkeypatch, capfd):
    endpoint = Endpoint(lambda payload, attempt: [piece("x", "stop"), "[DONE]"])
    address = endpoint.url.replace("://", "://anna:hunter2@")
    for name, port in (("good", ""), ("bad", "9")):
        run = ["--run", str(tmp_path / name), "--validation-examples", "2", "--engine-retries", "0"]
        arguments = ["eval", "--engine", "api", "--engine-url", address + port, "--engine-model", "m", *run]
        monkeypatch.setattr("sys.argv", ["veritune", *arguments])
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert bool(ended.value.code) == (name == "bad")
    assert set(endpoint.keys) == {"Basic YW5uYTpodW50ZXIy"}
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = "".join(capfd.readouterr())
    assert "error: " in said and "hunter2" not in said and len(written) > 5
    assert [path for path, data in written.items() if b"hunter2" in data] == []
    hidden = endpoint.url.replace("://", "://***@")
    assert read_toml(tmp_path / "good" / "config.toml")["engine"]["url"] == hidden
    assert hidden in json.loads((tmp_path / "good" / "environment.json").read_text())["arguments"]


def test_training_on_an_endpoint_is_refused():
    with pytest.raises(ConfigError, match="engine is 'api'; it must be another while training"):
        GRPOConfig(engine="api", engine_settings=APISettings(url="http://a", model="m"))
