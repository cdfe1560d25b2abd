"""JSON over HTTP with the standard library: one request, one answer or a stream of events, one kind of failure."""

from __future__ import annotations

import http.client
import ipaddress
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import closing
from typing import Any

from veritune.core.errors import EngineError

REPEATED_STATUSES = (408, 409, 425, 429)
SHOWN_CHARACTERS = 500


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
        return self.status is not None and 400 <= self.status < 500 and self.status not in REPEATED_STATUSES


def get_json(url: str, *, seconds: float) -> Any:
    """The JSON that `url` answers, {} for an empty body; EndpointError after `seconds` or for any other failure."""
    return _as_json(url, _read(urllib.request.Request(url), url, seconds))


def post_json(url: str, payload: dict[str, Any], *, seconds: float) -> Any:
    """The same for a POST of `payload`."""
    return _as_json(url, _read(_post_request(url, payload), url, seconds))


def post_events(url: str, payload: dict[str, Any], *, seconds: float, api_key: str) -> Generator[Any, None, None]:
    """POST `payload` and yield each server-sent event's JSON up to "[DONE]"; closing the iterator hangs up.

    `seconds` bound the whole exchange.
    """
    deadline = time.monotonic() + seconds
    request = _post_request(url, payload)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with closing(_opener(url).open(request, timeout=seconds)) as response:
            for line in response:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no complete answer within {seconds:g} s")
                field, _, value = line.decode("utf-8", "replace").partition(":")
                if field == "data" and value.strip() == "[DONE]":
                    return
                if field == "data":
                    yield _as_json(url, value.encode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(url, error) from error


def _post_request(url: str, payload: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})


def _read(request: urllib.request.Request, url: str, seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    try:
        with closing(_opener(url).open(request, timeout=seconds)) as response:
            parts = []
            # The client's own timeout starts anew with every byte.
            while part := response.read1(1 << 20):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no complete answer within {seconds:g} s")
            return b"".join(parts)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(url, error) from error


def _as_json(url: str, body: bytes) -> Any:
    try:
        return json.loads(body) if body.strip() else {}
    except ValueError as error:
        raise EndpointError(f"{url} answered what is not JSON: {body[:SHOWN_CHARACTERS]!r}") from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A proxy stands between machines, never between a machine and itself."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))


def _failure(url: str, error: Exception) -> EndpointError:
    if isinstance(error, urllib.error.HTTPError):
        body = error.read(SHOWN_CHARACTERS).decode("utf-8", "replace")
        try:
            retry_after = float(error.headers.get("Retry-After", ""))
        except ValueError:  # absent, or a date
            retry_after = 0.0
        return EndpointError(f"{url} answered {error.code}: {' '.join(body.split())}", error.code, retry_after)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return EndpointError(f"{url} gave no answer: {str(reason) or type(reason).__name__}")
