"""Batched sampling in plain torch, for any causal language model of the transformers zoo.

A prompt is prefilled once and kept once for its whole group; a finished row's slot is taken at once by the last live
row, so that every decode step works on live rows only; new groups are admitted as slots come free. The engine serves
the trainer's own module, so it is exact. Where workers share a run, each process decodes the responses of a run of the
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veritune.core.errors import ConfigError, EngineError
from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, FinishReason, Sampling, require_lengths
from veritune.engines.native.compiled import CompiledSteps, PagedCache, layers_in_panels
from veritune.engines.native.decode import Cache, close_gaps, decode, layers_for_decoding
from veritune.engines.native.graphs import Capture, ReplayedSteps, can_be_captured
from veritune.model.architectures import LayerWeights, layers_of
from veritune.model.decoder_layer import prefill
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.parallel import ALONE, Workers
from veritune.model.policy import Policy, attends_to_all


class NativeEngine:
    """Serves `policy.model` in place. `max_rows` bounds the completions that a process decodes side by side.

    `workers` hold the same policy; what is sampled does not depend on how many they are, but for rounding. With
    `capture` (`decode_graphs.capture_cuda_graph`), decode steps are captured and replayed.
    """

    def __init__(
        self, policy: Policy, *, max_rows: int = 512, workers: Workers = ALONE, capture: Capture | None = None
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; it must be at least 1")
        if not attends_to_all(policy.model.config):
            raise EngineError("the native engine serves full attention only; this model's is not, in some layer")
        if getattr(policy.model.config, "alibi", False) or policy.model.config.model_type in ("bloom", "mpt"):
            raise EngineError("the native engine cannot serve ALiBi, which takes positions from the order of the cache")
        if capture and not can_be_captured(policy.model):
            raise EngineError("cuda_graphs is on, but decode steps of this model cannot be captured; turn it off")
        self.policy: Policy | None = policy
        self.model = policy.model
        self.max_rows = max_rows
        self.capture = capture
        self.workers = workers
        self.weights_version = 0

    def load_weights(self, model: torch.nn.Module, version: int) -> None:
        """Serve `model` (shared, not copied) as `version`."""
        if model.config.vocab_size != self.model.config.vocab_size:  # type: ignore[union-attr]
            raise EngineError(
                f"cannot load a model with {model.config.vocab_size} ids into an engine of "  # type: ignore[union-attr]
                f"{self.model.config.vocab_size}"
            )
        self.model = model
        self.weights_version = version
        if self.policy and self.workers.count > 1:
            sums = set(self.workers.everywhere(self._served(), weights_sum))
            if len(sums) > 1:
                raise EngineError(f"stale or wrong weights: the workers' sum to {sorted(sums)} for version {version}")

    def close(self) -> None:
        self.policy = self.model = None

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions. The same seed gives the same completions."""
        if self.policy is None:
            raise EngineError("this engine is closed")
        require_lengths(prompts_ids, self.policy.context_length)
        cuts = [len(prompts_ids) * share // self.workers.count for share in range(self.workers.count + 1)]
        shares = [
            (prompts_ids[start:stop], sampling, start * sampling.n, self.max_rows, self.capture, self.weights_version)
            for start, stop in pairwise(cuts)
            if start < stop
        ]
        return list(chain.from_iterable(self.workers.call(self._served(), complete, shares)))

    def _served(self) -> Policy:
        assert self.policy is not None
        return replace(self.policy, model=self.model)


def weights_sum(policy: Policy) -> float:
    """A number that two copies of the weights share only if they are the same, as good as certainly."""
    return sum(parameter.detach().double().sum().item() for parameter in policy.model.parameters())


@torch.inference_mode()
def complete(
    policy: Policy,
    prompts_ids: Sequence[Sequence[int]],
    sampling: Sampling,
    first_row: int,
    max_rows: int,
    capture: Capture | None,
    weights_version: int,
) -> list[list[Completion]]:
    """`sampling.n` completions for each prompt, of which the first is row `first_row` of all that are sampled."""
    was_training = policy.model.training
    policy.model.eval()
    try:
        decoder = _Decoder(policy, prompts_ids, sampling, first_row, max_rows, capture)
        while decoder.live or decoder.waiting:
            decoder.admit()
            decoder.step()
    finally:
        policy.model.train(was_training)
    if not np.isfinite(decoder.logprobs).all():
        raise EngineError("the policy's logits are not finite: its weights are damaged, or training has diverged")
    rows = [decoder.completion(row, weights_version) for row in range(len(prompts_ids) * sampling.n)]
    return [rows[start : start + sampling.n] for start in range(0, len(rows), sampling.n)]


class TokenTexts:
    """What each token reads as, so that only tokens that could complete a stop string cost a decode of their row."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._may_end: dict[tuple[str, ...], np.ndarray] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def may_end(self, tokens: np.ndarray, stop: tuple[str, ...]) -> np.ndarray:
        """Whether some stop string can end within each of `tokens` (B,): decided once per token from its own text."""
        known = self._may_end.setdefault(stop, np.full(self.vocab_size, -1, dtype=np.int8))
        for token in np.unique(tokens[known[tokens] < 0]).tolist():
            text = self.decode([token])
            # A character may be spread over several tokens; those read as the replacement character on their own.
            known[token] = "\ufffd" in text or any(
                string in text or text.startswith(tuple(string[cut:] for cut in range(1, len(string))))
                for string in stop
            )
        return known[tokens] > 0

    def ends(self, ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the text of `ids` contains a stop string. Each token holds at least one byte of a character, so
        four tokens a character of the longest stop string reach back far enough."""
        window = 4 * max(len(string) for string in stop) + 4
        text = self.decode(ids[-window:])
        return any(string in text for string in stop)


@lru_cache(maxsize=4)
def texts_of(tokenizer: Any, vocab_size: int) -> TokenTexts:
    """Kept from call to call: what a token reads as takes longer to find out than to look up."""
    return TokenTexts(tokenizer, vocab_size)


Steps = Callable[[Any, Any, Any, Tensor, Tensor], Tensor]
"""Next-token logits (B, V) of model, layers, cache, tokens and positions, as `decode` has them."""


def steps_of(
    layers: Sequence[LayerWeights] | None, parameter: Tensor, siblings: int, capture: Capture | None
) -> tuple[Cache | PagedCache, Steps, Any]:
    """A cache, what computes decode steps over it, and a copy of the model's layers as that reads them."""
    if layers is None:
        return Cache(), decode, None
    if capture:
        return Cache(most_siblings=siblings), ReplayedSteps(capture), layers_for_decoding(layers)
    if cpu_kernels.serve(parameter):
        return PagedCache(), CompiledSteps(), layers_in_panels(layers)
    return Cache(), decode, layers_for_decoding(layers)


class _Decoder:
    """One call of `complete`: the rows in flight, what they have produced, and who waits for a slot."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        first_row: int,
        max_rows: int,
        capture: Capture | None,
    ) -> None:
        self.model, self.prompts, self.sampling, self.first_row = policy.model, prompts, sampling, first_row
        self.texts = texts_of(policy.tokenizer, policy.model.config.vocab_size)
        rows = len(prompts) * sampling.n
        self.slots = min(max_rows, max(rows, 1))
        longest = max((len(prompt) for prompt in prompts), default=1)
        self.capacity = min(longest + sampling.max_tokens, policy.context_length)
        self.ids = np.zeros((rows, sampling.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((rows, sampling.max_tokens), dtype=np.float32)
        self.generated = np.zeros(rows, dtype=np.int64)
        self.finish_reasons: list[FinishReason] = ["length"] * rows
        # Longest prompts first: the widest decode steps then come early, when every slot is taken anyway.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        self.waiting = [index * sampling.n + sibling for index in reversed(order) for sibling in range(sampling.n)]
        self.rows = np.zeros(0, dtype=np.int64)
        self.positions = np.zeros(0, dtype=np.int64)
        self.model_layers = layers_of(policy.model)
        parameter = next(policy.model.parameters())
        self.device = parameter.device
        self.cache, self.decode, self.layers = steps_of(self.model_layers, parameter, sampling.n, capture)
        self.ends = np.isin(np.arange(policy.model.config.vocab_size), sorted(policy.eos_ids))  # (V,)

    @property
    def live(self) -> int:
        return len(self.rows)

    def admit(self) -> None:
        """Fill free slots with waiting rows, once at least an eighth of the slots (or all that wait) fits."""
        free = self.slots - self.live
        if not self.waiting or free < min(max(self.slots // 8, 1), len(self.waiting)):
            return
        rows = [self.waiting.pop() for _ in range(min(free, len(self.waiting)))]
        first = self.live
        self.rows = np.concatenate([self.rows, np.array(rows)])
        lengths = [len(self.prompts[row // self.sampling.n]) for row in rows]
        self.positions = np.concatenate([self.positions, np.array(lengths)])
        self._sample(self._prefill(rows), first)

    def _prefill(self, rows: list[int]) -> Tensor:
        """Run each group's prompt once, for all of its `rows`. Returns next-token logits (rows, V)."""
        groups, group_of_row = np.unique(np.array(rows) // self.sampling.n, return_inverse=True)
        prompts = [self.prompts[group] for group in groups]
        if self.model_layers is None:
            last, stored = self._prefill_by_model(prompts)
        else:
            last, stored = prefill(self.model, self.model_layers, prompts)
        self.cache.admit(stored, [len(prompt) for prompt in prompts], group_of_row)
        return self.model.get_output_embeddings()(last)[torch.from_numpy(group_of_row).to(self.device)]

    def _prefill_by_model(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """What `prefill` returns, by the model's own forward pass."""
        lengths = [len(prompt) for prompt in prompts]
        # Padding stands on the right, where causal attention cannot see it and the mask hides it from later tokens.
        input_ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for index, prompt in enumerate(prompts):
            input_ids[index, : lengths[index]] = torch.tensor(prompt)
        hidden = self.model.base_model(input_ids=input_ids.to(self.device), use_cache=True)
        ends = torch.tensor(lengths, device=self.device) - 1
        last = hidden.last_hidden_state[torch.arange(len(prompts), device=self.device), ends]
        return last, [(layer.keys, layer.values) for layer in hidden.past_key_values.layers]

    def step(self) -> None:
        """One more token for every live row."""
        if not self.live:
            return
        # Places that nobody waits for are given up whenever the cache is allocated anew.
        if self.waiting:
            self.cache.begin_step(self.slots, self.sampling.max_tokens)
        else:  # a row's newest token is written now, and its last one never
            self.cache.begin_step(self.live, self.sampling.max_tokens - int(self.generated[self.rows].min()))
        newest = np.zeros((2, self.cache.rows), dtype=np.int64)  # with fixed shapes, rows beyond the live ones too
        newest[0, : self.live] = self.ids[self.rows, self.generated[self.rows] - 1]
        newest[1, : self.live] = self.positions
        tokens, positions = torch.from_numpy(newest).to(self.device)
        logits = self.decode(self.model, self.layers, self.cache, tokens, positions)
        self.positions += 1
        self._sample(logits[: self.live], first=0)

    def _sample(self, logits: Tensor, first: int) -> None:
        """Draw one token for the live rows from `first` on, then give the slots of finished rows away."""
        rows, sampling = self.rows[first:], self.sampling
        counts = self.generated[rows]
        if (early := counts < sampling.min_tokens).any():
            too_early, eos = torch.from_numpy(np.flatnonzero(early)), torch.from_numpy(np.flatnonzero(self.ends))
            logits[too_early.to(self.device)[:, None], eos.to(self.device)] = float("-inf")
        tokens, logprobs = sample_tokens(logits, sampling, rows + self.first_row, counts)
        # Both in one transfer: on a GPU, a step waits for its results a single time.
        drawn = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        self.ids[rows, counts], self.logprobs[rows, counts] = drawn
        self.generated[rows] += 1
        finished = np.zeros(self.live, dtype=bool)
        finished[first:] = self._finished(rows)
        # A row ends at the edge of the context as it does at max_tokens; its newest token is not in the cache yet.
        finished |= self.positions + 1 >= self.capacity
        if finished.any():
            self._release(finished)

    def _finished(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` (B,) end with their newest token; `finish_reasons` says why."""
        counts, sampling, texts = self.generated[rows], self.sampling, self.texts
        tokens, may_end = self.ids[rows, self.generated[rows] - 1], counts > sampling.min_tokens
        reasons: dict[int, FinishReason] = {}
        for offset in np.flatnonzero(may_end & self.ends[tokens]).tolist():
            reasons[offset] = "eos"
        if sampling.stop:
            for offset in np.flatnonzero(may_end & texts.may_end(tokens, sampling.stop)).tolist():
                if texts.ends(self.ids[rows[offset], : counts[offset]].tolist(), sampling.stop):
                    reasons[offset] = "stop"
        finished = counts >= sampling.max_tokens
        for offset, reason in reasons.items():
            finished[offset], self.finish_reasons[rows[offset]] = True, reason
        return finished

    def _release(self, finished: np.ndarray) -> None:
        """Move the last live rows into the slots of the finished ones, so that live rows stay side by side."""
        self.cache.release(finished)
        self.rows, self.positions = (close_gaps(each, finished) for each in (self.rows, self.positions))

    def completion(self, row: int, weights_version: int) -> Completion:
        """What `row` has produced, once it has finished."""
        length, reason = int(self.generated[row]), self.finish_reasons[row]
        ids = tuple(self.ids[row, :length].tolist())
        text = self.texts.decode(ids)
        if reason == "stop":
            # A stop string may end inside its last token: the text ends with the string, the ids with that token.
            text = text[: self.sampling.end_of_stop(text)]
        prompt = tuple(self.prompts[row // self.sampling.n])
        return Completion(prompt, ids, text, tuple(self.logprobs[row, :length].tolist()), reason, weights_version)


def sample_tokens(logits: Tensor, sampling: Sampling, rows: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
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
    uniform = torch.from_numpy(addressed_uniform(sampling.seed, rows, positions)).to(logits.device)
    bounds = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, bounds, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits (B, V) with all but the smallest set of most likely tokens whose probability reaches top_p at -inf.

    Nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751; the most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))


def addressed_uniform(seed: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), (B,) float64: a hash of (seed, row, position), whatever the batch looks like.

    The mixing function is SplitMix64's finaliser (Steele, Lea and Flood 2014).
    """
    state = np.full(len(rows), derive_seed(seed, 0, "sampling"), dtype=np.uint64)
    for coordinate in (rows, positions):
        state += (coordinate.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    return (state & np.uint64((1 << 52) - 1)) / float(1 << 52)
