"""A scripted OpenAI-compatible endpoint: a real HTTP server on the loopback interface that misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Step = dict[str, Any]


def answers(text: str, **fields: Any) -> Step:
    """A well-formed completion; `fields` replace those of the body."""
    return {"text": text, "fields": fields}


def fails(status: int, headers: dict[str, str] | None = None, message: str = "scripted") -> Step:
    return {"status": status, "headers": headers or {}, "message": message}


STALLS: Step = {"stall": True}
DRIPS: Step = {"drip": True}
DISCONNECTS: Step = {"disconnect": True}
CUT_OFF: Step = {"cut": True}


def raw(body: bytes, content_type: str) -> Step:
    return {"raw": body, "content_type": content_type}


class ScriptedEndpoint:
    """Answers the n-th request with the n-th step, and the last step for ever."""

    def __init__(self, script: Iterable[Step]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.served = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with endpoint._lock:
                    step = endpoint.script[min(len(endpoint.requests), len(endpoint.script) - 1)]
                    endpoint.requests.append(body)
                    endpoint.keys.append(self.headers.get("authorization"))
                try:
                    endpoint._play(self, step)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _play(self, handler: BaseHTTPRequestHandler, step: Step) -> None:
        if "stall" in step:
            self.closing.wait(30)
            handler.close_connection = True
        elif "drip" in step:
            handler.send_response(200)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", "100000")
            handler.end_headers()
            while not self.closing.is_set():
                handler.wfile.write(b" ")
                time.sleep(0.05)
        elif "disconnect" in step:
            handler.connection.close()
            handler.close_connection = True
        elif "cut" in step:
            handler.send_response(200)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"id": "x", "choices": [')
            handler.wfile.flush()
            handler.connection.close()
            handler.close_connection = True
        elif "status" in step:
            body = json.dumps({"error": {"message": step["message"], "type": "scripted"}}).encode()
            self._send(handler, step["status"], body, "application/json", step["headers"])
        elif "raw" in step:
            self._send(handler, 200, step["raw"], step["content_type"], {})
        else:
            self._send(handler, 200, json.dumps(_completion(step)).encode(), "application/json", {})
            self.served += 1

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, content_type: str, headers: dict[str, str]
    ) -> None:
        handler.send_response(status)
        for name, value in {"content-type": content_type, "content-length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def _completion(step: Step) -> dict[str, Any]:
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": step["text"]}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        **step["fields"],
    }
