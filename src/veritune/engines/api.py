"""Any OpenAI-compatible completions endpoint, for measuring what it serves: text in, text out, streamed.

The text is streamed so that a stop string is looked for here, as the protocol drops it and most endpoints do not say
whether a stop string or the end of the sequence ended a response; the connection is closed where it is found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from veritune.core.errors import EngineError
from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, FinishReason, Sampling
from veritune.engines.http import EndpointError, post_events
from veritune.model.policy import bos_ids

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0


class APIEngine:
    """Samples from `model` at `url` (up to and without /completions; "/v1" is added where it is missing).

    A completion's ids are its text in `tokenizer`'s tokens, good for counting; its log-probabilities are the
    endpoint's, of its own tokens, and none where it gives none. Training needs the sampled ids, so weights cannot be
    loaded.
    """

    def __init__(
        self,
        tokenizer: Any,
        url: str,
        model: str,
        *,
        api_key: str = "",
        concurrency: int = 64,
        retries: int = 5,
        seconds: float = 600.0,
    ) -> None:
        root = url.rstrip("/")
        self.url = f"{root}/completions" if root.endswith("/v1") else f"{root}/v1/completions"
        self.tokenizer, self.model = tokenizer, model
        self._bos = bos_ids(tokenizer)  # which the endpoint puts before a text by itself
        self.api_key, self.concurrency, self.retries, self.seconds = api_key, concurrency, retries, seconds
        self._closed = threading.Event()
        self._encoding = threading.Lock()  # a tokenizer that encodes in two threads at once may refuse

    def load_weights(self, model: object, version: int) -> None:
        """Always an EngineError: an endpoint serves its own weights."""
        raise EngineError(
            f"the endpoint {self.url} serves its own weights; train with engine native, vllm, vllm-server"
        )

    def close(self) -> None:
        """Stop waiting and asking."""
        self._closed.set()

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions, asked for side by side; EngineError if one never comes."""
        if self._closed.is_set():
            raise EngineError("this engine is closed")
        if sampling.min_tokens:
            raise EngineError(
                f"min_tokens is {sampling.min_tokens}; the completions protocol has none, so it must be 0"
            )
        places = [(index, sibling) for index in range(len(prompts_ids)) for sibling in range(sampling.n)]
        with ThreadPoolExecutor(max_workers=max(1, min(self.concurrency, len(places)))) as pool:
            futures = [pool.submit(self._patiently, prompts_ids[index], sampling, index, i) for index, i in places]
            try:
                completions = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        return [completions[start : start + sampling.n] for start in range(0, len(completions), sampling.n)]

    def _patiently(self, prompt: Sequence[int], sampling: Sampling, index: int, sibling: int) -> Completion:
        """One completion, asked for again after waits that double, or as long as the endpoint asks for."""
        for attempt in range(self.retries + 1):
            try:
                return self._ask(prompt, sampling, index, sibling)
            except EndpointError as error:
                if error.is_refusal or attempt == self.retries:
                    raise EngineError(f"no completion after {attempt + 1} attempts: {error}") from error
                wait = min(LONGEST_WAIT_SECONDS, max(FIRST_WAIT_SECONDS * 2**attempt, error.retry_after))
            if self._closed.wait(wait):
                raise EngineError("this engine is closed")
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _ask(self, prompt: Sequence[int], sampling: Sampling, index: int, sibling: int) -> Completion:
        payload = {
            "model": self.model,
            "prompt": self._decode(prompt[1:] if tuple(prompt[:1]) == self._bos else prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # 31 bits: some endpoints refuse more.
            "seed": derive_seed(sampling.seed, index, f"sibling {sibling}") >> 32,
            "logprobs": 0,
            "stream": True,
        }
        text, ended = "", ""
        logprobs: list[float] = []
        with closing(post_events(self.url, payload, seconds=self.seconds, api_key=self.api_key)) as events:
            for piece, values, finish_reason in self._pieces(events):
                text, logprobs, ended = text + piece, [*logprobs, *values], finish_reason or ended
                end = sampling.end_of_stop(text)
                if end is not None:
                    text, ended = text[:end], "stop string"
                    break
        reasons: dict[str, FinishReason] = {"stop string": "stop", "stop": "eos", "length": "length"}
        if ended not in reasons:
            raise EndpointError(f"{self.url} ended a response with {ended or 'no finish_reason'!r}")
        with self._encoding:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion(tuple(prompt), tuple(ids), text, tuple(logprobs), reasons[ended], 0)

    def _pieces(self, events: Iterator[Any]) -> Iterator[tuple[str, list[float], str | None]]:
        """Text, log-probabilities and finish reason of each event that has a choice."""
        for event in events:
            try:
                if event.get("error"):
                    raise EndpointError(f"{self.url} broke off: {event['error']}")
                for choice in event["choices"][:1]:
                    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    values = [float(value) for value in logprobs if value is not None]
                    yield choice["text"] or "", values, choice.get("finish_reason")
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise EndpointError(f"{self.url} streams what is no text completion: {str(event)[:200]}") from error

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
