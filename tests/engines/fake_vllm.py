"""A stand-in for a vLLM server: the same requests and answers over HTTP, torch behind them, faults on demand."""

import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file

from odd_answers import play
from veritune.core.types import Sampling
from veritune.engines.native.engine import NativeEngine
from veritune.engines.weight_check import canary_prompt

VOCABULARY = 288
"""Ids of the policy that the tests use."""


class FakeVLLM:
    """Serves `policy` with its weights scaled by a half, as the label "default", until it is told otherwise."""

    def __init__(self, policy):
        self.policy = policy
        self.port = self.life = 0
        self.generated = 0
        self.delay = 0.0
        self.silent = threading.Event()
        self.before_generate = lambda server: None
        self.ignore_reloads = False
        self.missing = ()
        self.fault, self.faulty_answers, self.faulty_path = None, 0, "/inference/v1/generate"
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Listen, with the weights and the label that a new process has; on the same port as before."""
        self.model = copy.deepcopy(self.policy.model)
        for parameter in self.model.parameters():
            parameter.data.mul_(0.5)
        self.label, self.alive, self.life = "default", True, self.life + 1
        handler = type("Handler", (_Handler,), {"fake": self, "life": self.life})
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self):
        """Stop listening; requests under way lose their connection without an answer."""
        if self.alive:
            self.alive = False
            self.http.shutdown()
            self.http.server_close()

    def answer(self, path, payload):
        """The JSON of one request, or a status and a message."""
        if path.lstrip("/") in self.missing:
            return 404, {"detail": "Not Found"}
        if path == "/collective_rpc":
            assert payload["method"] == "reload_weights"
            if not self.ignore_reloads:
                weights = load_file(Path(payload["kwargs"]["weights_path"]) / "model.safetensors")
                assert not self.model.load_state_dict(weights, strict=False).unexpected_keys
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            self.label = payload["new_version"]
        if path == "/inference/v1/generate":
            return self.generate(payload)
        return 200, {"success": True}

    def generate(self, payload):
        label, fields = self.label, payload["sampling_params"]
        self.before_generate(self)
        time.sleep(self.delay)
        if len(payload["token_ids"]) > 200:
            return 400, {"error": {"message": "too long"}}
        sampling = Sampling(
            temperature=fields["temperature"],
            top_p=fields["top_p"],
            max_tokens=fields["max_tokens"],
            min_tokens=fields["min_tokens"],
            stop=tuple(fields["stop"]),
            n=fields["n"],
            seed=fields["seed"],
        )
        engine = NativeEngine(self.policy)
        engine.model = self.model
        (group,) = engine.generate([payload["token_ids"]], sampling)
        self.generated += 1
        return 200, {"choices": [_choice(index, completion, label) for index, completion in enumerate(group)]}


def _choice(index, completion, label):
    return {
        "index": index,
        "token_ids": list(completion.ids),
        "logprobs": {
            "content": [
                {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
                for token, value in zip(completion.ids, completion.logprobs, strict=True)
            ]
        },
        "finish_reason": "length" if completion.finish_reason == "length" else "stop",
        "stop_reason": "the stop string" if completion.finish_reason == "stop" else None,
        "weight_versions": [{"version": label, "start": 0, "end": len(completion.ids)}],
    }


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    life: int

    def do_GET(self):
        self._answer({})

    def do_POST(self):
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, payload):
        while self.fake.silent.is_set():
            time.sleep(0.02)
        status, body = self.fake.answer(self.path, payload)
        if not self.fake.alive or self.fake.life != self.life:
            self.close_connection = True
            return
        if self.path == self.fake.faulty_path and payload.get("token_ids") != list(canary_prompt(VOCABULARY)):
            self.fake.faulty_answers -= 1
            if self.fake.faulty_answers >= 0:
                self.close_connection = True
                play(self.fake.fault, self.wfile.write, body, lambda text: text)
                return
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
