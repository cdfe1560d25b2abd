"""Proof that the weights arrived: after every load, a fixed prompt is continued and both sides' numbers are compared.

An output that changed proves nothing: a half-loaded model, or a cache that outlived a load, changes it too. So the
engine's own log-probabilities are held against the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veritune.core.errors import EngineError
from veritune.core.types import Completion, Engine, Sampling
from veritune.model.head import response_log_probs
from veritune.model.packing import pack_rows

SAMPLING = Sampling(temperature=2.0, max_tokens=8, n=8, seed=0)
"""A high temperature, so that tokens of small probability are among them: those move most when weights do."""

PROMPT_TOKENS = 40
"""More than one block of a prefix cache, so that a cache which outlives a load is seen."""

TOLERANCES = {("cpu", "float32"): 5e-5, ("cuda", "float32"): 2e-3, ("cpu", "bfloat16"): 0.1, ("cuda", "bfloat16"): 0.1}
"""Mean distance in nats a token that arithmetic alone may cause: a GPU's attention kernels shorten float32, and
bfloat16 hides a small learning step."""


def canary_prompt(vocab_size: int) -> tuple[int, ...]:
    """The fixed prompt: ids without meaning, so that no policy is ever sure of what follows."""
    return tuple((37 * place + 5) % min(vocab_size, 256) for place in range(PROMPT_TOKENS))


def is_canary(prompts_ids: Sequence[Sequence[int]], vocab_size: int) -> bool:
    """Whether this is the call that follows a load, after which the completions proper are still to come."""
    return len(prompts_ids) == 1 and tuple(prompts_ids[0]) == canary_prompt(vocab_size)


def load_proven_weights(engine: Engine, model: Any, version: int, dtype: str = "auto") -> None:
    """Have `engine` serve `model` as `version`, and prove that it does.

    `dtype` is the engine's number type, "auto" for the model's own. Raises EngineError "stale or wrong weights".
    """
    engine.load_weights(model, version)
    (completions,) = engine.generate([canary_prompt(model.config.vocab_size)], SAMPLING)
    require_served(model, completions, version, dtype)


def require_served(model: Any, completions: Sequence[Completion], version: int, dtype: str = "auto") -> None:
    """Refuse completions of the canary's prompt whose version or log-probabilities are not those of `model`."""
    found = sorted({completion.weights_version for completion in completions})
    if found != [version]:
        raise EngineError(f"stale or wrong weights: version {version} was loaded, but the engine serves {found}")
    parameter = next(model.parameters())
    types = {str(parameter.dtype).removeprefix("torch."), *([] if dtype == "auto" else [dtype])}
    tolerance = max(TOLERANCES[parameter.device.type, each] for each in types)
    engines = torch.tensor([value for completion in completions for value in completion.logprobs])
    trainers = torch.cat(trainer_log_probs(model, completions))
    distances = (engines - trainers).abs()
    if not distances.mean() <= tolerance:  # a NaN is refused too
        worst = int(distances.argmax())
        raise EngineError(
            f"stale or wrong weights: after loading version {version}, a token of the fixed sequence has "
            f"log-probability {engines[worst]:.6f} in the engine and {trainers[worst]:.6f} in the trainer; the mean "
            f"distance is {distances.mean():.2g} nats a token, and {tolerance:g} is allowed"
        )


@torch.inference_mode()
def trainer_log_probs(model: Any, completions: Sequence[Completion]) -> tuple[Tensor, ...]:
    """log p of every response id at the canary's temperature, as the trainer scores it: N tensors (length,)."""
    responses = [completion.ids for completion in completions]
    packed = pack_rows(
        [completion.prompt_ids for completion in completions], responses, next(model.parameters()).device
    )
    was_training = model.training
    model.eval()
    log_probs = response_log_probs(model, packed, SAMPLING.temperature)
    model.train(was_training)
    return log_probs.cpu().split([len(response) for response in responses])
