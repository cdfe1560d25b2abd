"""The client against a server that answers byte for byte: bounds in time and size, logins, waits between attempts."""

import asyncio
import base64
import gzip
import threading
import time

import pytest

from odd_answers import CHUNKED, START, RawServer, forever, respond
from veritune.core import http
from veritune.core.errors import ConfigError, EngineError
from veritune.core.http import Endpoint, EndpointError, ask_patiently, completions_endpoint, require_log_prob

MIB = 2**20


def test_json_goes_out_and_comes_back():
    with RawServer(lambda send, path, payload: respond(send, '{"é": [1, "\\ud83d\\ude00"]}')) as server:
        endpoint = Endpoint(server.url + "/base/")
        assert endpoint.post("/path", {"a": "\ud800"}, seconds=10) == {"é": [1, "😀"]}
        assert server.requests == [("/base/path", {"a": "\ud800"})]
        assert server.headers[0]["accept-encoding"] == "identity" and "authorization" not in server.headers[0]
    with RawServer(lambda send, path, payload: respond(send, "")) as server:
        assert Endpoint(server.url).get("/health", seconds=10) == {}


def test_events_come_as_they_are_sent_in_whatever_pieces():
    go_on = threading.Event()

    def answer(send, path, payload):
        send(START + b'\r\n: comment\n\ndata: {"a"')
        time.sleep(0.05)
        send(b": 1}\r\n\r\ndata:[2]\n")
        assert go_on.wait(10)
        send(b"data: [DONE]\ndata: never\n")

    with RawServer(answer) as server:
        events = Endpoint(server.url).stream("/", {}, seconds=10, tokens=1)
        assert [next(events), next(events)] == [{"a": 1}, [2]]
        go_on.set()
        assert list(events) == []


@pytest.mark.parametrize("first", [b"", START, START + b"Content-Length: 10\r\n\r\n{"], ids=["head", "header", "body"])
def test_silence_ends_at_the_deadline_and_the_connection_with_it(first):
    def answer(send, path, payload):
        send(first)
        time.sleep(1.0)
        forever(send, b"x", 0.01)

    with RawServer(answer) as server:
        began = time.monotonic()
        with pytest.raises(EndpointError, match=r"gave no complete answer within 0\.3 s"):
            Endpoint(server.url).get("/", seconds=0.3)
        assert 0.3 <= time.monotonic() - began < 2.3
        assert server.lost.wait(10), "the connection outlives the request"


def test_a_body_without_end_is_cut_at_what_the_tokens_asked_for_may_need():
    with RawServer(lambda send, path, payload: forever(send, b"a" * 65536, first=START + b"\r\n")) as server:
        with pytest.raises(EndpointError, match=f"more than {MIB + 100 * 2048} bytes"):
            Endpoint(server.url).post("/", {}, seconds=60, tokens=100)
        assert server.lost.wait(10) and server.sent < 16 * MIB  # what the system's buffers hold came on top


def test_a_line_of_a_stream_without_end_is_cut_at_a_mebibyte():
    with RawServer(lambda send, path, payload: forever(send, b"a" * 65536, first=START + b"\r\ndata: ")) as server:
        with pytest.raises(EndpointError, match=f"a line of more than {MIB} bytes"):
            list(Endpoint(server.url).stream("/", {}, seconds=60, tokens=10**6))
        assert server.lost.wait(10) and server.sent < 16 * MIB


@pytest.mark.parametrize("data", [b"X-A: b\r\n" * 1000, b"a" * 65536], ids=["lines", "line"])
def test_headers_without_end_are_cut(data):
    with RawServer(lambda send, path, payload: forever(send, data, first=START + b"X-A: ")) as server:
        with pytest.raises(EndpointError, match="gave no answer: RemoteProtocolError"):
            Endpoint(server.url).get("/", seconds=60)
        assert server.lost.wait(10) and server.sent < 16 * MIB


def test_nothing_is_decompressed_and_no_redirect_followed():
    bomb = gzip.compress(b"{" + b" " * 10**8 + b"}")
    packed = "Content-Encoding: gzip\r\n"
    with RawServer(lambda send, path, payload: respond(send, bomb, headers=packed)) as server:
        endpoint = Endpoint(server.url)
        with pytest.raises(EndpointError, match="is not JSON"):
            endpoint.get("/", seconds=60)
    moved = "Location: /elsewhere\r\n"
    with RawServer(lambda send, path, payload: respond(send, "{}", "307 Moved", moved)) as server:
        with pytest.raises(EndpointError, match="answered 307") as caught:
            Endpoint(server.url).post("/", {}, seconds=60)
        assert caught.value.is_refusal and len(server.requests) == 1


def test_hanging_up_ends_requests_of_other_threads():
    with RawServer(lambda send, path, payload: forever(send, b" ", 0.05, CHUNKED)) as server:
        endpoint, errors = Endpoint(server.url), []

        def ask():
            try:
                endpoint.get("/", seconds=60)
            except EndpointError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(server.requests) < 3:
            time.sleep(0.01)
        endpoint.hang_up()
        for thread in threads:
            thread.join(10)
        assert errors == [f"{server.url} was hung up on"] * 3


def test_it_works_where_an_event_loop_runs_already():
    async def ask(endpoint):
        return endpoint.get("/", seconds=10)

    with RawServer(lambda send, path, payload: respond(send, "[1]")) as server:
        assert asyncio.run(ask(Endpoint(server.url))) == [1]


def test_a_login_in_the_address_is_sent_and_never_said():
    def answer(send, path, payload):
        echo = f"bad {server.headers[-1]['authorization']} of anna:pass%40word pass@word \x1b[2J key-123"
        respond(send, echo, "500 No")

    with RawServer(answer) as server:
        endpoint = Endpoint(f"http://anna:pass%40word@{server.place}/v1", "key-123")
        with pytest.raises(EndpointError) as caught:
            endpoint.get("/", seconds=10)
        assert server.headers[0]["authorization"] == f"Basic {base64.b64encode(b'anna:pass@word').decode()}"
        said = f"http://{server.place}/v1/ answered 500: bad Basic [key] of [key] [key] [2J [key]"
        assert str(caught.value) == said and endpoint.url == f"http://{server.place}/v1"
        with pytest.raises(EndpointError):
            Endpoint(server.url, "key-123").get("/", seconds=10)
        assert server.headers[1]["authorization"] == "Bearer key-123"


def test_a_hidden_login_comes_from_the_environment(monkeypatch):
    with RawServer(lambda send, path, payload: respond(send, "{}")) as server:
        monkeypatch.delenv("VERITUNE_ENGINE_LOGIN", raising=False)
        with pytest.raises(ConfigError, match="set VERITUNE_ENGINE_LOGIN to user:password"):
            Endpoint(f"http://***@{server.place}")
        monkeypatch.setenv("VERITUNE_ENGINE_LOGIN", "anna:secret")
        Endpoint(f"http://***@{server.place}").get("/", seconds=10)
        assert server.headers[0]["authorization"] == "Basic YW5uYTpzZWNyZXQ="


def test_only_an_address_without_a_path_is_given_one():
    assert completions_endpoint("http://a:80/", "").url == "http://a:80/v1"
    assert completions_endpoint("https://a/v1beta/openai/", "").url == "https://a/v1beta/openai"


def test_waits_double_up_to_a_minute_or_are_as_long_as_asked_for():
    waits, asked = [], iter([0.0, 7.5, 0.0, float("inf"), 0.0, 0.0, 0.0, 0.0])

    def ask():
        raise EndpointError("no", 503, next(asked))

    with pytest.raises(EndpointError, match="no completion after 8 attempts: no"):
        ask_patiently(ask, retries=7, pause=waits.append)
    assert waits == [1, 7.5, 4, 60, 16, 32, 60]


def test_a_refusal_and_a_wait_beyond_the_time_end_the_attempts():
    def refuse():
        raise EndpointError("no", 404)

    with pytest.raises(EndpointError, match="after 1 attempts"):
        ask_patiently(refuse, retries=7, pause=lambda seconds: pytest.fail("waited"))

    def fail():
        raise EndpointError("no", 500)

    with pytest.raises(EndpointError, match="after 1 attempts"):
        ask_patiently(fail, retries=7, pause=lambda seconds: pytest.fail("waited"), until=time.monotonic() + 0.9)
    told = []
    with pytest.raises(EndpointError, match="after 2 attempts"):
        ask_patiently(fail, retries=1, pause=lambda seconds: None, report=lambda *each: told.append(each))
    assert told == [("no", http.FIRST_WAIT_SECONDS)]


def test_log_probabilities_are_finite_and_at_most_0():
    assert [require_log_prob(value) for value in (-2.5, 0, 1e-6)] == [-2.5, 0.0, 0.0]
    for value in (float("nan"), float("-inf"), 0.01, -1e7, True, None, "-1"):
        with pytest.raises(EngineError):
            require_log_prob(value)
