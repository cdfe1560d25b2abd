"""The benchmarks' policy as a folder that every side loads: random weights, near-uniform over its ids.

python policy.py FOLDER SETTINGS, with the settings of a Qwen2 as JSON.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from shapes import EOS_IDS, VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

NORM = 0.1
"""The last norm's weight: so small that the logits are close to each other, and the lengths close to geometric."""


def write_policy(folder: Path, settings: dict[str, Any]) -> None:
    """Write weights, configuration and tokenizer."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**settings, bos_token_id=None, eos_token_id=list(EOS_IDS), pad_token_id=EOS_IDS[0])
    )
    with torch.no_grad():
        model.model.norm.weight.fill_(NORM)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """One id for each character of ASCII, in the byte-level form that Qwen2's tokenizer reads."""
    spare = count(256)  # a byte that cannot be printed stands as a character from here on, as GPT-2 has it
    symbols = [chr(byte) if ord("!") <= byte <= ord("~") else chr(next(spare)) for byte in range(VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), symbols[EOS_IDS[0]])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


if __name__ == "__main__":
    write_policy(Path(sys.argv[1]), json.loads(sys.argv[2]))
