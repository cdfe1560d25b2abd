"""What goes to vLLM and what comes back, the same in the process and over HTTP: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from veritune.core.errors import EngineError
from veritune.core.http import require_log_prob, require_type
from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, FinishReason, Sampling


def sampling_fields(sampling: Sampling, eos_ids: Collection[int], prompt_index: int) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams for the prompt at `prompt_index` of a call.

    vLLM gives sibling i the seed plus i, so each prompt has a seed of its own: without, all prompts would share their
    random numbers. The policy's own EOS ids end a completion, whatever vLLM has read from the model's files.
    """
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,
        "seed": derive_seed(sampling.seed, prompt_index, "siblings") >> 1,
        "logprobs": 0,
        "skip_special_tokens": False,
    }


def as_completion(
    tokenizer: Any,
    vocab_size: int,
    sampling: Sampling,
    prompt: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    stop_reason: int | str | None,
    version: int,
) -> Completion:
    """One choice of vLLM's as a Completion. Raises EngineError where it cannot have been sampled."""
    if finish_reason not in ("stop", "length") or len(ids) != len(logprobs) or not 1 <= len(ids) <= sampling.max_tokens:
        raise EngineError(
            f"vLLM ended a completion with {finish_reason!r}, {len(ids)} ids and {len(logprobs)} log-probabilities; "
            f"max_tokens is {sampling.max_tokens}"
        )
    for token in ids:
        if not 0 <= require_type(token, int) < vocab_size:
            raise EngineError(f"vLLM sampled id {token}, but the vocabulary has {vocab_size}")
    require_type(stop_reason, int, str, type(None))
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    reason: FinishReason = "length" if finish_reason == "length" else "eos"
    if isinstance(stop_reason, str):
        # A stop string may end inside its last token: the text ends with the string, the ids with that token.
        reason = "stop"
        text = text[: sampling.end_of_stop(text)]
    return Completion(tuple(prompt), tuple(ids), text, tuple(map(require_log_prob, logprobs)), reason, version)
