"""A server that answers by script, byte for byte, and everything odd that a server may answer.

Each fault of `FAULTS` is a function of (send, answer, encode): `send` writes raw bytes, `answer` is a well-formed
answer, which the fault may change, and `encode` makes the body of an answer that is given as JSON text.
"""

import gzip
import json
import socketserver
import threading
import time
from contextlib import suppress

DEEP = "[" * 100_000 + "]" * 100_000
HUGE_INTEGER = "9" * 5000


class RawServer:
    """Reads each request and lets `answer(send, path, payload)` write whatever it likes; then hangs up."""

    def __init__(self, answer):
        server = self
        self.answer, self.requests, self.headers, self.sent, self.lost = answer, [], [], 0, threading.Event()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                path = self.rfile.readline().split()[1].decode()
                headers = {}
                while (line := self.rfile.readline().strip()) != b"":
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                payload = json.loads(self.rfile.read(int(headers.get("content-length", 0))) or "null")
                server.requests.append((path, payload))
                server.headers.append(headers)

                def send(data):
                    self.wfile.write(data)
                    server.sent += len(data)

                try:
                    server.answer(send, path, payload)
                except OSError:
                    server.lost.set()

        self.tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.tcp.daemon_threads = True
        self.place = f"127.0.0.1:{self.tcp.server_address[1]}"
        self.url = f"http://{self.place}"
        threading.Thread(target=self.tcp.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tcp.shutdown()
        self.tcp.server_close()


def respond(send, body, status="200 OK", headers=""):
    """One whole answer."""
    body = body if isinstance(body, bytes) else body.encode()
    send(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)


def forever(send, data, pause=0.0, first=b""):
    """`data` again and again until the other side hangs up, or for 20 seconds."""
    send(first)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        send(data)
        time.sleep(pause)


START = b"HTTP/1.1 200 OK\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"

BYTES = {
    "hangs up at once": lambda send, answer, encode: None,
    "hangs up in a header": lambda send, answer, encode: send(START + b"Content-"),
    "hangs up in the body": lambda send, answer, encode: send(START + b'Content-Length: 999\r\n\r\n{"choices": ['),
    "is no web server": lambda send, answer, encode: send(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "sends a chunk of no size": lambda send, answer, encode: send(CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    "sends header lines for ever": lambda send, answer, encode: forever(send, b"X-A: b\r\n" * 1000, first=START),
    "sends one header for ever": lambda send, answer, encode: forever(send, b"a" * 8000, first=START + b"X-A: "),
    "sends one line for ever": lambda send, answer, encode: forever(send, b" " * 65536, first=START + b"\r\n"),
    "sends a bomb": lambda send, answer, encode: respond(
        send, gzip.compress(b" " * 50_000_000), headers="Content-Encoding: gzip\r\n"
    ),
    "fails": lambda send, answer, encode: respond(send, "<h1>\x1b[31mboom</h1>", "500 Internal Server Error"),
    "is busy for a time that is no number": lambda send, answer, encode: respond(
        send, "later", "429 Too Many Requests", "Retry-After: nan\r\n"
    ),
    "says nothing": lambda send, answer, encode: respond(send, ""),
    "says that there is nothing": lambda send, answer, encode: send(b"HTTP/1.1 204 No Content\r\n\r\n"),
}
SLOW = {
    "is silent": lambda send, answer, encode: time.sleep(20),
    "drips a header": lambda send, answer, encode: forever(send, b"a", 0.05, START + b"X-A: "),
    "drips a body": lambda send, answer, encode: forever(send, b" ", 0.05, START + b"Content-Length: 99999\r\n\r\n"),
    "sends small chunks for ever": lambda send, answer, encode: forever(send, b"1\r\n\n\r\n" * 5000, first=CHUNKED),
    "says 103 for ever": lambda send, answer, encode: forever(send, b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.01),
}
REFUSALS = {
    "sends elsewhere": lambda send, answer, encode: respond(send, "", "302 Found", "Location: /v1/other\r\n"),
    "refuses": lambda send, answer, encode: respond(send, '{"error": "no"}', "403 Forbidden"),
}
TEXTS = {
    "a web page": "<html>gateway</html>",
    "half of its JSON": '{"choices": [{"index": 0, "text": "a',
    "bytes that are no UTF-8": b'{"choices": "\xff\xfe"}',
    "deep JSON": DEEP,
    "choices that are deep JSON": f'{{"choices": {DEEP}}}',
    "a huge integer": f'{{"choices": {HUGE_INTEGER}}}',
    "a lone surrogate": '{"choices": [], "x": "\\ud800"}',
    **{
        f"only {text}": text
        for text in (
            *("NaN", "null", "7", "[]", '"text"', '{"choices": {"a": 1}}', '{"choices": "text"}', '{"choices": 7}'),
            *('{"choices": []}', '{"choices": [null]}', '{"choices": [[]]}', '{"choices": [{}]}', '{"choices": null}'),
        )
    },
}


def says(text):
    return lambda send, answer, encode: respond(send, encode(text))


def with_choice(**fields):
    """The first choice of the answer has other fields."""

    def fault(send, answer, encode):
        answer["choices"][0].update(fields)
        respond(send, encode(json.dumps(answer)))

    return fault


FAULTS = {
    **BYTES,
    **{f"says {name}": says(text) for name, text in TEXTS.items()},
    "ends for a reason that is a number": with_choice(finish_reason=7),
    "ends for a reason that is a list": with_choice(finish_reason=["stop"]),
}
LOG_PROBS = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "0.5": 0.5,
    "-1e300": -1e300,
    "a huge integer": -(10**400),
    "a text": "-0.5",
    "true": True,
    "a list": [-0.5],
}


def play(fault, send, answer, encode):
    """Let `fault` write its answer; whoever listens may have hung up."""
    with suppress(OSError):
        fault(send, answer, encode)
