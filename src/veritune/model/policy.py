"""From a name to (model, tokenizer), and back to a folder that `from_pretrained` loads.

The only importer of transformers: a policy is any causal language model of its zoo, and the embedded policy is one
of them, in the hub's folder form under `assets/`.
"""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from veritune.core.errors import ConfigError, DataError
from veritune.model.packing import Packing, packed_attention

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

BosChoice = Literal["auto", "always", "never"]
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "embedded_policy"


ATTENTION = "veritune"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' own attention, but for packed sequences.

    `query` (B, H, T, D), `key` and `value` (B, K, T, D) with H a multiple of K. Packed, B is 1 and the mask is not
    looked at. Returns (B, T, H, D).
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(query, key, value, packing, scale)[None], None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attends_to_all(config: Any) -> bool:
    """Whether each token sees all that came before it in every layer, as packing and the native engine have it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    window = getattr(config, "sliding_window", None)
    return window is None or window >= getattr(config, "max_position_embeddings", math.inf)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that an update changes, by name; one that is tied stands once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def checkpoint_activations(model: Any) -> None:
    """Have each layer of `model` keep its input alone while training, and compute the rest again going backwards."""
    with warnings.catch_warnings():  # the new name is younger than the oldest release that may be installed
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


@dataclass(frozen=True)
class Policy:
    """A causal language model, its tokenizer, and the two facts about them that generation needs."""

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    """Every id that ends a sequence: the tokenizer's and those of the model's generation settings."""
    context_length: int
    chat: bool = False
    """Whether a prompt is sent as a user's message in the tokenizer's chat template."""
    bos: tuple[int, ...] = ()
    """The id that every prompt starts with; () for none."""

    @property
    def end_of_response(self) -> int:
        """The id that ends a response which is trained on as text."""
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else min(self.eos_ids)

    def encode(self, text: str) -> list[int]:
        """Text to ids, (L,), without special tokens: `encode_prompts` puts BOS before prompts."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def choose_device(name: str) -> torch.device:
    """ "auto" takes the GPU where there is one; anything else is torch's own name for a device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu or cuda[:index]") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here; use auto or cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in allowed:
        raise ConfigError(f"dtype is {name!r}; it must be auto, float32 or bfloat16")
    return allowed[name]


def load_policy(
    name: str,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    chat: bool = False,
    bos: BosChoice = "auto",
) -> Policy:
    """Load "embedded", a folder, or a hub id; with `chat`, prompts are sent in its chat template.

    Raises ConfigError if there is no such model, it cannot stop, or it lacks a chat template or BOS that is wanted.
    """
    location = _locate(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"policy {name!r} cannot be loaded: {reason}") from error
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"chat is True, but the tokenizer of policy {name!r} has no chat template; leave chat off")
    if bos == "always" and tokenizer.bos_token_id is None:
        raise ConfigError(f"bos is 'always', but the tokenizer of policy {name!r} has no BOS token; use auto or never")
    model.to(device or torch.device("cpu")).eval()
    return replace(as_policy(model, tokenizer, name), chat=chat, bos=bos_ids(tokenizer, bos, chat))


def bos_ids(tokenizer: Any, choice: BosChoice = "auto", chat: bool = False) -> tuple[int, ...]:
    """The id that prompts start with, or (): BOS always, never, or (auto) where the tokenizer puts it before a text.

    A chat template states its own beginning, so auto leaves that alone.
    """
    bos = tokenizer.bos_token_id
    added = choice == "auto" and not chat and bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return (bos,) if choice == "always" or added else ()


def load_skeleton(name: str) -> Any:
    """The model of "embedded", a folder or a hub id on torch's meta device: every shape, read from config.json alone.

    Raises ConfigError, naming the setting `policy`, where there is no such model or its architecture is unknown.
    """
    from huggingface_hub.errors import StrictDataclassError

    location = _locate(name)
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (
        *(OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError),
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"policy is {name!r}, whose config.json makes no model: {reason}") from error
    model.tie_weights()
    return model


def _locate(name: str) -> str:
    """The folder or the hub id that `name` means; ConfigError where there is no such model."""
    location = str(EMBEDDED_FOLDER) if name == "embedded" else name
    looks_like_path = location.startswith((".", "/", "~")) or location.count("/") > 1
    folder = Path(location).expanduser()
    if looks_like_path and not folder.exists():
        raise ConfigError(f"policy is {name!r}, but there is no such folder; give embedded, a folder or a hub id")
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"policy is {name!r}, but that is no model folder: it has no config.json")
        return str(folder)
    _require_reachable(location)
    return location


def _require_reachable(hub_id: str) -> None:
    """Refuse a hub id that is neither in the cache nor to be had, before the hub's client tries for minutes."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except HFValidationError as error:
        raise ConfigError(f"policy is {hub_id!r}; it must be embedded, a folder that exists, or a hub id") from error
    if cached:
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ConfigError(
            f"policy is {hub_id!r}, which is no folder and not in the hub's cache, "
            f"and the hub cannot be reached ({error})"
        ) from error


def as_policy(model: Any, tokenizer: Any, name: str = "policy") -> Policy:
    """Wrap a loaded model and tokenizer; refuses one that could never end a sequence."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    eos_ids = _eos_ids(model, tokenizer)
    if not eos_ids:
        raise ConfigError(f"policy {name!r} has no EOS token in its tokenizer or generation config; set one there")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise ConfigError(
            f"policy {name!r} has a tokenizer of {len(tokenizer)} ids, but only "
            f"{model.get_input_embeddings().weight.shape[0]} embeddings"
        )
    return Policy(model, tokenizer, eos_ids, int(getattr(model.config, "max_position_embeddings", 1 << 30)))


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    from_model = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(int(token) for token in [tokenizer.eos_token_id, *from_model] if token is not None)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer in the hub's form; `load_policy(folder)` and `from_pretrained` read it back."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def as_message(policy: Policy, prompt: str) -> str:
    """The prompt as a user's message in the policy's chat template, up to where the model's answer begins."""
    message = [{"role": "user", "content": prompt}]
    return policy.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def encode_prompts(policy: Policy, prompts: Iterable[str]) -> list[list[int]]:
    """Prompt texts to ids, each with the policy's BOS once; DataError for one that leaves no room for a response."""
    encoded = [policy.encode(as_message(policy, prompt) if policy.chat else prompt) for prompt in prompts]
    encoded = [ids if tuple(ids[:1]) == policy.bos else [*policy.bos, *ids] for ids in encoded]
    for index, ids in enumerate(encoded):
        if len(ids) >= policy.context_length:
            raise DataError(
                f"prompt {index} has {len(ids)} tokens, but the policy's context holds {policy.context_length}; "
                "leave room for at least one response token"
            )
        if not ids:
            raise DataError(f"prompt {index} is empty; a prompt needs at least one token")
    return encoded


def new_embedded_policy(corpus: Iterable[str], *, seed: int) -> Policy:
    """A Qwen2-architecture policy of about 0.9M parameters with random weights, and a tokenizer trained on `corpus`.

    Digits are tokens of their own and the four reasoning tags are single tokens, so that arithmetic is digit-wise and
    a tag cannot be half-written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    end, tags = "<|endoftext|>", ["<think>", "</think>", "<answer>", "</answer>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=512, special_tokens=[end, *tags], initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=end)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return as_policy(Qwen2ForCausalLM(config), tokenizer, "embedded")
