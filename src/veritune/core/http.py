"""JSON over HTTP: one client for engines and discovery, whose every failure is an EndpointError in time."""

from __future__ import annotations

import asyncio
import base64
import functools
import importlib
import ipaddress
import json
import math
import os
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from veritune.core.config import Rare, require
from veritune.core.errors import HIDDEN_LOGIN, ConfigError, EngineError, blot_logins

T = TypeVar("T")
_Arrived = queue.SimpleQueue["bytes | EndpointError | None"]
"""Where the chunks of one answer arrive, and at last None or the error that ended it."""
_MISREAD = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)

LOGIN_VARIABLE = "VERITUNE_ENGINE_LOGIN"
"""The environment variable that holds user:password for an address which is written http://***@host."""
OPENAI = "https://api.openai.com/v1"
REPEATED_STATUSES = (408, 409, 425, 429)
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
BODY_BYTES = LINE_BYTES = 2**20
TOKEN_BYTES = 2048
"""Most bytes of an answer for each token that was asked for, on top of BODY_BYTES."""
LATE_SECONDS = 1.0
"""After its deadline a request is given up even if its thread is too busy to say so."""
SHOWN_CHARACTERS = 500
SHORTEST_SECRET = 6
"""A shorter key or password is an ordinary word, such as the EMPTY that local servers take for a key."""
LOWEST_LOG_PROB, ROUNDING = -1e6, 1e-5


class EndpointError(EngineError):
    """A request without a usable answer. `status` is the HTTP status, None where no answer came at all."""

    def __init__(self, message: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds after which the server asks to be asked again; 0 where it does not say."""

    @property
    def is_refusal(self) -> bool:
        """Whether the server understood and refused: asking again cannot help."""
        return self.status is not None and 300 <= self.status < 500 and self.status not in REPEATED_STATUSES


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """How patiently servers are asked."""

    seconds: Rare[float] = 600.0
    """Seconds after which a request without a whole answer is given up: its server dropped, or the request repeated."""
    concurrency: Rare[int] = 64
    """Most requests that are under way at each server or at the endpoint."""

    def __post_init__(self) -> None:
        require(self, "seconds", 0 < self.seconds < math.inf, "positive and finite")
        require(self, "concurrency", self.concurrency >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(RequestSettings):
    """Which OpenAI-compatible endpoint is asked, and for which model."""

    url: str = OPENAI
    """The endpoint's address, up to and without /completions; default: OpenAI's own."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the endpoint's key, which is never written."""
    retries: Rare[int] = 5
    """How often a failed request is repeated, after waits that double."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "url", is_address(self.url), "an address such as http://localhost:8000")
        require(self, "model", bool(self.model), "the name of the model that the endpoint serves")
        require(self, "retries", self.retries >= 0, "0 or more")

    @property
    def api_key(self) -> str:
        return os.environ.get(self.api_key_env, "")


def is_address(url: str) -> bool:
    """Whether `url` leads to a server, and a password in it can be told from the rest."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an IPv6 address
        return False
    place = parts.netloc.rpartition("@")[2] + parts.path + parts.query + parts.fragment
    return usable and "@" not in place and url.isprintable() and " " not in url


class Endpoint:
    """A server at `address`. `url` and all messages leave out `api_key` and the address's user and password.

    A request ends within its seconds, whatever the server sends and however slowly. Redirects are not followed, bodies
    are not decompressed, and h11 takes no more than 100 KiB of headers.
    """

    def __init__(self, address: str, api_key: str = "") -> None:
        parts = urlsplit(address.rstrip("/"))
        login, _, place = parts.netloc.rpartition("@")
        self.url = parts._replace(netloc=place).geturl()
        if login == HIDDEN_LOGIN and not (login := os.environ.get(LOGIN_VARIABLE, "")):
            raise ConfigError(f"{address} needs the user and password: set {LOGIN_VARIABLE} to user:password")
        self.address = parts._replace(netloc=f"{login}@{place}" if login else place).geturl()
        """The url with user and password, for other clients; never to be shown."""
        password = login.partition(":")[2]
        basic = base64.b64encode(unquote(login).encode()).decode()
        authorization = f"Basic {basic}" if login else f"Bearer {api_key}" if api_key else ""
        self.secrets = [s for s in (api_key, login, password, unquote(password), basic) if len(s) >= SHORTEST_SECRET]
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._headers |= {"Authorization": authorization} if authorization else {}
        self._under_way: set[_Arrived] = set()

    def get(self, path: str, *, seconds: float) -> Any:
        """The JSON at `url` + `path`, {} for an empty body; EndpointError after `seconds` or for any failure."""
        return self._answer("GET", path, None, seconds, 0)

    def post(self, path: str, payload: dict[str, Any], *, seconds: float, tokens: int = 0) -> Any:
        """The same for a POST of `payload`, which asks for `tokens` tokens."""
        return self._answer("POST", path, payload, seconds, tokens)

    def stream(self, path: str, payload: dict[str, Any], *, seconds: float, tokens: int) -> Generator[Any, None, None]:
        """POST `payload` and yield each server-sent event's JSON up to "[DONE]"; closing the iterator hangs up."""
        rest = bytearray()
        for chunk in self._receive("POST", path, payload, seconds, tokens):
            rest += chunk
            *lines, rest = rest.split(b"\n") if b"\n" in chunk else [rest]
            if max(map(len, [*lines, rest])) > LINE_BYTES:
                raise EndpointError(f"{self.url}{path} sent a line of more than {LINE_BYTES} bytes")
            for line in lines:
                field, _, value = line.partition(b":")
                if field == b"data" and value.strip() == b"[DONE]":
                    return
                if field == b"data":
                    yield self._parse(path, value)

    def hang_up(self) -> None:
        """End every request that is under way, in whichever thread, as a failure."""
        for arrived in list(self._under_way):
            arrived.put(EndpointError(f"{self.url} was hung up on"))

    @contextmanager
    def reading(self, wanted: str) -> Iterator[None]:
        """Whatever goes wrong while the fields of an answer are read is an EndpointError: it is not as `wanted`."""
        try:
            yield
        except EndpointError:
            raise
        except (EngineError, *_MISREAD) as error:
            kind = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
            raise EndpointError(f"{self.url} answered unlike {wanted}: {kind}{self._shown(str(error))}") from error

    def _answer(self, method: str, path: str, payload: dict[str, Any] | None, seconds: float, tokens: int) -> Any:
        body = bytearray()  # one for all, so that many small chunks need no more memory than few
        for chunk in self._receive(method, path, payload, seconds, tokens):
            body += chunk
        return self._parse(path, body)

    def _receive(
        self, method: str, path: str, payload: dict[str, Any] | None, seconds: float, tokens: int
    ) -> Generator[bytes, None, None]:
        """The chunks of an answer's body, which the thread of the event loop reads."""
        content = None if payload is None else json.dumps(payload).encode()
        loop = _event_loop()
        deadline = time.monotonic() + seconds + LATE_SECONDS
        arrived: _Arrived = queue.SimpleQueue()
        self._under_way.add(arrived)
        most_bytes = BODY_BYTES + TOKEN_BYTES * tokens
        exchange = self._exchange(method, self.url + path, content, seconds, most_bytes, arrived)
        future = asyncio.run_coroutine_threadsafe(exchange, loop)
        try:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    chunk = arrived.get(timeout=left)
                except queue.Empty:
                    break
                if chunk is None:
                    return
                if isinstance(chunk, EndpointError):
                    raise chunk
                yield chunk
            raise _too_late(self.url + path, seconds)
        finally:
            self._under_way.discard(arrived)
            future.cancel()

    async def _exchange(
        self, method: str, url: str, content: bytes | None, seconds: float, most_bytes: int, arrived: _Arrived
    ) -> None:
        """One request, whose answer's body goes to `arrived`."""
        size, shown = 0, bytearray()
        try:
            async with (
                asyncio.timeout(seconds),
                _client(self.url) as client,
                client.stream(method, url, content=content, headers=self._headers) as response,
            ):
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if response.is_success and size <= most_bytes:
                        arrived.put(chunk)
                    elif response.is_success:
                        raise EndpointError(f"{url} answered more than {most_bytes} bytes")
                    else:
                        shown += chunk
                        if size >= SHOWN_CHARACTERS:
                            break
            if not response.is_success:
                text = f"{url} answered {response.status_code}: {self._shown(shown.decode('utf-8', 'replace'))}"
                raise EndpointError(text, response.status_code, _retry_after(response.headers.get("Retry-After")))
            arrived.put(None)
        except EndpointError as error:
            arrived.put(error)
        except TimeoutError:
            arrived.put(_too_late(url, seconds))
        except Exception as error:  # whatever the client or the network says, the caller hears of one kind
            arrived.put(EndpointError(f"{url} gave no answer: {type(error).__name__}: {self._shown(str(error))}"))

    def _parse(self, path: str, body: bytearray) -> Any:
        try:
            value = json.loads(body.decode()) if body.strip() else {}
            if b"\\u" in body:
                json.dumps(value, ensure_ascii=False).encode()  # refuses a lone surrogate, which no file could hold
        except (ValueError, RecursionError) as error:
            shown = self._shown(body[:SHOWN_CHARACTERS].decode("utf-8", "replace"))
            raise EndpointError(
                f"{self.url}{path} answered what is not JSON ({type(error).__name__}): {shown}"
            ) from error
        return value

    def _shown(self, text: str) -> str:
        """What the server sent, as part of a line: short, without secrets and control characters."""
        for secret in self.secrets:
            text = text.replace(secret, "[key]")
        words = "".join(character if character.isprintable() else " " for character in text).split()
        return blot_logins(" ".join(words))[:SHOWN_CHARACTERS]


def completions_endpoint(address: str, api_key: str) -> Endpoint:
    """The OpenAI-compatible endpoint at `address`, to which "/v1" is added where it has no path."""
    bare = urlsplit(address.rstrip("/"))
    return Endpoint(address if bare.path else f"{bare.geturl()}/v1", api_key)


def ask_patiently(
    ask: Callable[[], T],
    *,
    retries: int,
    pause: Callable[[float], object] = time.sleep,
    until: float = math.inf,
    report: Callable[[str, float], None] = lambda error, seconds: None,
) -> T:
    """`ask()`, repeated after EndpointErrors, with waits that double or that the endpoint asks for.

    A refusal, the last attempt and a wait beyond `until` (of time.monotonic) raise the EndpointError. `report` is
    told each (error, seconds until the next attempt).
    """
    for attempt in range(retries + 1):
        try:
            return ask()
        except EndpointError as error:
            wait = min(LONGEST_WAIT_SECONDS, max(FIRST_WAIT_SECONDS * 2**attempt, error.retry_after))
            if error.is_refusal or attempt == retries or time.monotonic() + wait >= until:
                raise EndpointError(f"no completion after {attempt + 1} attempts: {error}", error.status) from error
            report(str(error), wait)
        pause(wait)
    raise AssertionError("unreachable: the last attempt returns or raises")


def require_type(value: Any, *kinds: type) -> Any:
    """`value`, where it is of one of the types, else EngineError; a bool is no int."""
    if type(value) not in kinds:
        raise EngineError(f"{reprlib.repr(value)} is not {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def require_log_prob(value: Any) -> float:
    """`value`, where it can be a log-probability, else EngineError; 0 for what rounding puts above 0."""
    if not LOWEST_LOG_PROB <= require_type(value, float, int) <= ROUNDING:  # a NaN is refused too
        raise EngineError(f"log-probability {reprlib.repr(value)}: the weights are damaged, or training has diverged")
    return min(0.0, float(value))


def _too_late(url: str, seconds: float) -> EndpointError:
    return EndpointError(f"{url} gave no complete answer within {seconds:g} s")


def _retry_after(value: str | None) -> float:
    try:
        return max(0.0, float(value or ""))  # 0 for a NaN
    except ValueError:  # absent, or a date
        return 0.0


def _client(url: str) -> Any:
    """A client for one request. A proxy stands between machines, never between a machine and itself."""
    host = urlsplit(url).hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    return _httpx().AsyncClient(verify=_certificates(), timeout=None, trust_env=not local)


def _httpx() -> Any:
    return importlib.import_module("httpx2")  # late: nobody who asks no endpoint waits for it


@functools.cache
def _certificates() -> Any:
    return _httpx().create_ssl_context()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs all exchanges, in a thread of its own, as a caller's thread may run a loop already."""
    _certificates()  # imports and reads what takes long before a deadline counts
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_event_loop.cache_clear)
