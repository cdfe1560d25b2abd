"""Any OpenAI-compatible completions endpoint, for measuring what it serves: text in, text out, streamed.

The text is streamed so that a stop string is looked for here, as the protocol drops it and most endpoints do not say
whether a stop string or the end of the sequence ended a response; the connection is closed where it is found.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from veritune.core.errors import EngineError
from veritune.core.http import (
    EndpointError,
    EndpointSettings,
    ask_patiently,
    completions_endpoint,
    require_log_prob,
    require_type,
)
from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, Engine, EngineSettings, FinishReason, Sampling

if TYPE_CHECKING:
    from veritune.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class APISettings(EndpointSettings, EngineSettings):
    """An endpoint that serves its own weights."""

    can_load_weights: ClassVar[bool] = False
    shares_device: ClassVar[bool] = False

    def create(self, policy: Policy, workers: object) -> Engine:
        return APIEngine(policy.tokenizer, self)


class APIEngine:
    """Samples from the settings' model and endpoint (a url without a path gets "/v1").

    A completion's ids are its text in `tokenizer`'s tokens, good for counting; its log-probabilities are the
    endpoint's, of its own tokens, and none where it gives none. Training needs the sampled ids, so weights cannot be
    loaded.
    """

    def __init__(self, tokenizer: Any, settings: APISettings) -> None:
        self.endpoint = completions_endpoint(settings.url, settings.api_key)
        self.tokenizer, self.settings = tokenizer, settings
        from veritune.model.policy import bos_ids  # here, because the settings are read without torch

        self._bos = bos_ids(tokenizer)  # which the endpoint puts before a text by itself
        self._closed = False
        self._given_up = threading.Event()  # set when nobody waits any more for the completions of a call
        self._encoding = threading.Lock()  # a tokenizer that encodes in two threads at once may refuse

    def load_weights(self, model: object, version: int) -> None:
        """Always an EngineError: an endpoint serves its own weights."""
        raise EngineError(
            f"the endpoint {self.endpoint.url} serves its own weights; train with engine native, vllm, vllm-server"
        )

    def close(self) -> None:
        """Stop waiting and asking."""
        self._closed = True
        self._give_up()

    def _give_up(self) -> None:
        self._given_up.set()
        self.endpoint.hang_up()

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions, asked for side by side; EngineError if one never comes."""
        if self._closed:
            raise EngineError("this engine is closed")
        if sampling.min_tokens:
            raise EngineError(
                f"min_tokens is {sampling.min_tokens}; the completions protocol has none, so it must be 0"
            )
        self._given_up = given_up = threading.Event()
        places = [(index, sibling) for index in range(len(prompts_ids)) for sibling in range(sampling.n)]
        pool = ThreadPoolExecutor(max_workers=max(1, min(self.settings.concurrency, len(places))))
        try:
            futures = [
                pool.submit(self._complete, prompts_ids[index], sampling, index, i, given_up) for index, i in places
            ]
            completions = [future.result() for future in futures]
        except BaseException:
            self._give_up()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [completions[start : start + sampling.n] for start in range(0, len(completions), sampling.n)]

    def _complete(
        self, prompt: Sequence[int], sampling: Sampling, index: int, sibling: int, given_up: threading.Event
    ) -> Completion:
        def pause(seconds: float) -> None:
            if given_up.wait(seconds):
                raise EngineError("this engine is closed")

        ask = partial(self._ask, prompt, sampling, index, sibling)
        return ask_patiently(ask, retries=self.settings.retries, pause=pause)

    def _ask(self, prompt: Sequence[int], sampling: Sampling, index: int, sibling: int) -> Completion:
        payload = {
            "model": self.settings.model,
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
        longest_stop = max(map(len, sampling.stop), default=0)
        events = self.endpoint.stream(
            "/completions", payload, seconds=self.settings.seconds, tokens=sampling.max_tokens
        )
        with closing(events):
            for piece, values, finish_reason in self._pieces(events):
                start = max(0, len(text) - longest_stop)
                text += piece
                logprobs += values
                ended = finish_reason or ended
                end = sampling.end_of_stop(text[start:])
                if end is not None:
                    text, ended = text[: start + end], "stop string"
                    break
        reasons: dict[str, FinishReason] = {"stop string": "stop", "stop": "eos", "length": "length"}
        if ended not in reasons:
            raise EndpointError(f"{self.endpoint.url} ended a response with {ended or 'no finish_reason'!r:.100}")
        with self._encoding:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion(tuple(prompt), tuple(ids), text, tuple(logprobs), reasons[ended], 0)

    def _pieces(self, events: Iterator[Any]) -> Iterator[tuple[str, list[float], str | None]]:
        """Text, log-probabilities and finish reason of each event that has a choice."""
        for event in events:
            with self.endpoint.reading("a text completion"):
                if event.get("error"):
                    raise EngineError(f"it broke off with {reprlib.repr(event['error'])}")
                for choice in require_type(event["choices"], list)[:1]:
                    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    values = [require_log_prob(value) for value in logprobs if value is not None]
                    finish_reason = require_type(choice.get("finish_reason"), str, type(None))
                    yield require_type(choice["text"], str, type(None)) or "", values, finish_reason

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
