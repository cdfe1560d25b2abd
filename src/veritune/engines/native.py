"""Batched sampling in plain torch, for any causal language model of the transformers zoo.

A prompt is prefilled once for its whole group and its keys and values are copied to the siblings; the cache grows in
blocks; a finished row's place is taken at once by the last live row, so that every decode step works on live
rows only; new groups are admitted as places come free. The engine serves the trainer's own module, so it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veritune.errors import ConfigError, EngineError
from veritune.policies import Policy
from veritune.randomness import derive_seed
from veritune.types import Completion, FinishReason, Sampling


class NativeEngine:
    """Serves `policy.model` in place. `max_rows` bounds the completions that are decoded side by side."""

    def __init__(self, policy: Policy, *, max_rows: int = 512) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; it must be at least 1")
        if any(kind != "full_attention" for kind in getattr(policy.model.config, "layer_types", None) or ()):
            raise EngineError("the native engine serves full attention only; this model has other layer types")
        self.policy: Policy | None = policy
        self.model = policy.model
        self.max_rows = max_rows
        self.weights_version = 0
        self.texts = TokenTexts(policy.tokenizer)

    def load_weights(self, model: torch.nn.Module, version: int) -> None:
        """Serve `model` (shared, not copied) as `version`."""
        if model.config.vocab_size != self.model.config.vocab_size:  # type: ignore[union-attr]
            raise EngineError(
                f"cannot load a model with {model.config.vocab_size} ids into an engine of "  # type: ignore[union-attr]
                f"{self.model.config.vocab_size}"
            )
        self.model = model
        self.weights_version = version

    def close(self) -> None:
        self.policy = self.model = None

    @torch.inference_mode()
    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions. The same seed gives the same completions."""
        if self.policy is None:
            raise EngineError("this engine is closed")
        self._check_lengths(prompts_ids)
        was_training = self.model.training
        self.model.eval()
        try:
            decoder = _Decoder(self, prompts_ids, sampling)
            while decoder.live or decoder.waiting:
                decoder.admit()
                decoder.step()
        finally:
            self.model.train(was_training)
        if not torch.isfinite(decoder.logprobs).all():
            raise EngineError("the policy's logits are not finite: its weights are damaged, or training has diverged")
        rows = [self._completion(decoder, row) for row in range(len(prompts_ids) * sampling.n)]
        return [rows[start : start + sampling.n] for start in range(0, len(rows), sampling.n)]

    def _check_lengths(self, prompts_ids: Sequence[Sequence[int]]) -> None:
        assert self.policy is not None
        for index, prompt in enumerate(prompts_ids):
            if not 1 <= len(prompt) < self.policy.context_length:
                raise EngineError(
                    f"prompt {index} has {len(prompt)} tokens; it must have at least 1 and fewer than the context's "
                    f"{self.policy.context_length}"
                )

    def _completion(self, decoder: _Decoder, row: int) -> Completion:
        length, reason = int(decoder.generated[row]), decoder.finish_reasons[row]
        ids = tuple(decoder.ids[row, :length].tolist())
        text = self.texts.decode(ids)
        if reason == "stop":
            # A stop string may end inside its last token: the text ends with the string, the ids with that token.
            text = text[: decoder.sampling.end_of_stop(text)]
        logprobs = tuple(decoder.logprobs[row, :length].tolist())
        prompt = tuple(decoder.prompts[row // decoder.sampling.n])
        return Completion(prompt, ids, text, logprobs, reason, self.weights_version)


class TokenTexts:
    """What each token reads as, so that only tokens that could complete a stop string cost a decode of their row."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._may_end: dict[tuple[str, ...], dict[int, bool]] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def may_end(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether some stop string can end within `token`: decided once per token from its own text."""
        known = self._may_end.setdefault(stop, {})
        if token not in known:
            text = self.decode([token])
            # A character may be spread over several tokens; those read as the replacement character on their own.
            known[token] = "\ufffd" in text or any(
                string in text or text.startswith(tuple(string[cut:] for cut in range(1, len(string))))
                for string in stop
            )
        return known[token]

    def ends(self, ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the text of `ids` contains a stop string. Each token holds at least one byte of a character, so
        four tokens a character of the longest stop string reach back far enough."""
        window = 4 * max(len(string) for string in stop) + 4
        text = self.decode(ids[-window:])
        return any(string in text for string in stop)


BLOCK = 32
"""Positions by which the cache grows: so seldom that copying it costs little, and little of it is ever empty."""


class _Cache:
    """Keys and values of every layer, each (rows, heads, length, size) and contiguous, written in place.

    Stands where transformers expects a cache: `update` stores one new position per live row and returns all that is
    allocated for the live rows. The mask hides what a row has not written; it is zero, since 0 * NaN would be NaN.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.live = 0
        self.targets = torch.empty(0, dtype=torch.long)
        """Where the next key and value of each live row and head go, counted in positions of the flat store."""

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        size = key.shape[-1]
        self.keys[layer].view(-1, size)[self.targets] = key.reshape(-1, size)
        self.values[layer].view(-1, size)[self.targets] = value.reshape(-1, size)
        return self.keys[layer][: self.live], self.values[layer][: self.live]

    def aim(self, positions: Tensor) -> None:
        """Say where each live row's next key and value go, (B,): for all layers at once, as all have one layout."""
        self.live = len(positions)
        heads = self.keys[0].shape[1]
        places = torch.arange(self.live * heads, device=positions.device) * self.length
        self.targets = places + positions.repeat_interleave(heads)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length - 1

    def make_room(self, length: int, rows: int) -> None:
        """Have at least `length` positions, and `rows` places where that takes a new allocation."""
        if length <= self.length:
            return
        rounded = -(-length // BLOCK) * BLOCK
        for stored in (self.keys, self.values):
            for layer, old in enumerate(stored):
                new = old.new_empty(rows, old.shape[1], rounded, old.shape[3])
                new[: self.live, :, : old.shape[2]] = old[: self.live]
                new[: self.live, :, old.shape[2] :] = 0
                new[self.live :] = 0
                stored[layer] = new

    def fill(self, prefilled: Sequence[Any], sources: Tensor, first: int, places: int) -> None:
        """Copy the prompts' keys and values, (groups, heads, length, size) a layer, to the rows from `first` on."""
        if not self.keys:
            self.keys = [layer.keys[:0, :, :0] for layer in prefilled]
            self.values = [layer.values[:0, :, :0] for layer in prefilled]
        length = prefilled[0].keys.shape[2]
        self.make_room(length, places)
        for index, layer in enumerate(prefilled):
            self.keys[index][first : first + len(sources), :, :length] = layer.keys[sources]
            self.values[index][first : first + len(sources), :, :length] = layer.values[sources]
        self.live = first + len(sources)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for stored in (*self.keys, *self.values):
            stored[targets] = stored[sources]


class _Decoder:
    """One call of `generate`: the rows in flight, what they have produced, and who waits for a place."""

    def __init__(self, engine: NativeEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        assert engine.policy is not None
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.device = next(engine.model.parameters()).device
        rows = len(prompts) * sampling.n
        self.places = min(engine.max_rows, max(rows, 1))
        longest = max((len(prompt) for prompt in prompts), default=1)
        self.capacity = min(longest + sampling.max_tokens, engine.policy.context_length)
        self.ids = torch.zeros(rows, sampling.max_tokens, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(rows, sampling.max_tokens, device=self.device)
        self.generated = np.zeros(rows, dtype=np.int64)
        self.finish_reasons: list[FinishReason] = ["length"] * rows
        self.histories: list[list[int]] = [[] for _ in range(rows)]
        # Longest prompts first: the widest decode steps then come early, when every place is taken anyway.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        self.waiting = [index * sampling.n + sibling for index in reversed(order) for sibling in range(sampling.n)]
        self.rows = np.zeros(0, dtype=np.int64)
        self.positions = np.zeros(0, dtype=np.int64)
        self.cache = _Cache()
        self.eos_ids = engine.policy.eos_ids
        self.eos = torch.tensor(sorted(self.eos_ids), device=self.device)

    @property
    def live(self) -> int:
        return len(self.rows)

    def admit(self) -> None:
        """Fill free places with waiting rows, once at least an eighth of the places (or all that wait) fits."""
        free = self.places - self.live
        if not self.waiting or free < min(max(self.places // 8, 1), len(self.waiting)):
            return
        rows = [self.waiting.pop() for _ in range(min(free, len(self.waiting)))]
        first = self.live
        self.rows = np.concatenate([self.rows, np.array(rows)])
        lengths = [len(self.prompts[row // self.sampling.n]) for row in rows]
        self.positions = np.concatenate([self.positions, np.array(lengths)])
        self._sample(self._prefill(rows, first), first)

    def _prefill(self, rows: list[int], first: int) -> Tensor:
        """Run each group's prompt once, copy its keys and values to its rows' places from `first` on.

        Returns next-token logits (rows, V).
        """
        groups, group_of_row = np.unique(np.array(rows) // self.sampling.n, return_inverse=True)
        lengths = [len(self.prompts[group]) for group in groups]
        # Padding stands on the right, where causal attention cannot see it and later tokens overwrite it.
        input_ids = torch.zeros(len(groups), max(lengths), dtype=torch.long)
        for index, group in enumerate(groups):
            input_ids[index, : lengths[index]] = torch.tensor(self.prompts[group])
        model = self.engine.model
        hidden = model.base_model(input_ids=input_ids.to(self.device), use_cache=True)
        sources = torch.from_numpy(group_of_row).to(self.device)
        self.cache.fill(hidden.past_key_values.layers, sources, first, self.places)
        ends = torch.tensor(lengths, device=self.device) - 1
        last = hidden.last_hidden_state[torch.arange(len(groups), device=self.device), ends]
        return model.get_output_embeddings()(last)[sources]

    def step(self) -> None:
        """One more token for every live row."""
        if not self.live:
            return
        positions = torch.from_numpy(self.positions).to(self.device)
        rows = torch.from_numpy(self.rows).to(self.device)
        last = self.ids[rows, torch.from_numpy(self.generated[self.rows] - 1).to(self.device)]
        cache = self.cache
        cache.live = self.live
        # Places that nobody waits for are given up whenever the cache is allocated anew.
        cache.make_room(int(self.positions.max()) + 1, self.places if self.waiting else self.live)
        cache.aim(positions)
        future = torch.arange(cache.length, device=self.device) > positions[:, None]
        mask = torch.zeros(future.shape, dtype=cache.keys[0].dtype, device=self.device)
        mask = mask.masked_fill_(future, float("-inf"))[:, None, None, :]
        output = self.engine.model(
            input_ids=last[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        self.positions += 1
        self._sample(output.logits[:, -1], first=0)

    def _sample(self, logits: Tensor, first: int) -> None:
        """Draw one token for the live rows from `first` on, then give the places of finished rows away."""
        rows, sampling = self.rows[first:], self.sampling
        counts = self.generated[rows]
        if (early := counts < sampling.min_tokens).any():
            too_early = torch.from_numpy(np.flatnonzero(early)).to(self.device)
            logits[too_early[:, None], self.eos] = float("-inf")
        rows_there, counts_there = torch.from_numpy(rows).to(self.device), torch.from_numpy(counts).to(self.device)
        tokens, logprobs = sample_tokens(logits, sampling, rows_there, counts_there)
        self.ids[rows_there, counts_there] = tokens
        self.logprobs[rows_there, counts_there] = logprobs
        self.generated[rows] += 1
        finished = np.zeros(self.live, dtype=bool)
        for offset, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            finished[first + offset] = self._finishes(row, token)
        # A row ends at the edge of the context as it does at max_tokens; its newest token is not in the cache yet.
        finished |= self.positions + 1 >= self.capacity
        self._release(finished)

    def _finishes(self, row: int, token: int) -> bool:
        history, sampling, texts = self.histories[row], self.sampling, self.engine.texts
        history.append(token)
        if len(history) > sampling.min_tokens:
            if sampling.stop and texts.may_end(token, sampling.stop) and texts.ends(history, sampling.stop):
                self.finish_reasons[row] = "stop"
                return True
            if token in self.eos_ids:
                self.finish_reasons[row] = "eos"
                return True
        return len(history) >= sampling.max_tokens

    def _release(self, finished: np.ndarray) -> None:
        """Move the last live rows into the places of the finished ones, so that live rows stay side by side."""
        if not finished.any():
            return
        remaining = self.live - int(finished.sum())
        targets = np.flatnonzero(finished[:remaining])
        sources = remaining + np.flatnonzero(~finished[remaining:])
        if len(targets):
            self.cache.move(torch.from_numpy(sources).to(self.device), torch.from_numpy(targets).to(self.device))
            self.rows[targets], self.positions[targets] = self.rows[sources], self.positions[sources]
        self.rows, self.positions = self.rows[:remaining], self.positions[:remaining]


def sample_tokens(logits: Tensor, sampling: Sampling, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row and its log-probability under the distribution it was drawn from.

    `logits` (B, V); `rows` and `positions` (B,) address the randomness. At temperature 0 the most likely token is
    taken, with its log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        tokens = logprobs.argmax(dim=-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
    logits = logits.float() / sampling.temperature
    if sampling.top_p < 1:
        logits = keep_nucleus(logits, sampling.top_p)
    logprobs = torch.log_softmax(logits, dim=-1)
    # Inverse transform sampling needs one uniform number a row. Its cumulative sum is in double precision, since in
    # single precision the tail of a vocabulary of 150,000 would be lost.
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    uniform = addressed_uniform(sampling.seed, rows, positions)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits (B, V) with all but the smallest set of most likely tokens whose probability reaches top_p at -inf.

    Nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751; the most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))


def addressed_uniform(seed: int, rows: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), (B,) float64: a hash of (seed, row, position), whatever the batch looks like.

    The mixing function is SplitMix64's finaliser (Steele, Lea and Flood 2014) in wrapping int64 arithmetic.
    """
    state = torch.full_like(rows, _signed(derive_seed(seed, 0, "sampling")))
    for coordinate in (rows, positions):
        state = _mix(state + (coordinate + 1) * _signed(0x9E3779B97F4A7C15))
    return (state & ((1 << 52) - 1)).double() / (1 << 52)


def _mix(state: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # int64 shifts copy the sign bit; the mask makes the shift a logical one.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
