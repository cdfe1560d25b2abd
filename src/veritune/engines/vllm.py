"""vLLM in this process, and the two helpers that people write by hand around it.

The only importer of vllm. On a CPU, vLLM packs weights into its own layout when it loads them, so new ones go through
its reload, which packs again; the canary in `veritune.engines.weight_check` is what proves that they arrived.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from veritune.core.errors import EngineError
from veritune.core.types import Completion, Sampling, require_lengths
from veritune.engines.server_process import WeightsFolder
from veritune.engines.vllm_fields import as_completion, sampling_fields
from veritune.engines.vllm_settings import VLLMSettings
from veritune.engines.weight_check import is_canary
from veritune.model.policy import Policy, save_policy

CPU_BLOCK_TOKENS = 32
"""vLLM's own default on a CPU is a block so long that a short prompt is never cached."""


CPU_PASS_TOKENS = 4096
"""Prompt tokens of one pass on a CPU, where a seeded request whose prompt is cut over two passes fails in vLLM."""


class VLLMEngine:
    """Serves a copy of `policy`'s weights; a GPU is shared with the trainer by sleeping while it trains.

    Generating puts the engine to sleep (level 1: weights wait in CPU memory; level 2: they are dropped) and loading
    wakes it; at level 1 so does generating. A CPU has nothing to free, and vLLM does not sleep there.
    """

    def __init__(self, policy: Policy, settings: VLLMSettings) -> None:
        self.policy: Policy | None = policy
        self.longest = min(settings.max_model_len or policy.context_length, policy.context_length)
        self.sleep_level = settings.sleep_level
        self.asleep = False
        self.weights_version = 0
        own = next(policy.model.parameters())
        with WeightsFolder() as folder:
            save_policy(policy, folder.path)
            self.llm: LLM | None = start_vllm(
                str(folder.path),
                dtype=str(own.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype,
                device=str(own.device),
                gpu_memory_utilization=settings.gpu_memory_utilization,
                max_model_len=self.longest,
                tensor_parallel_size=settings.tensor_parallel_size,
                enforce_eager=settings.eager,
                enable_sleep_mode=self.sleep_level > 0 and not current_platform.is_cpu(),
            )

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions. The same seed gives the same completions."""
        if self.policy is None or self.llm is None:
            raise EngineError("this engine is closed")
        require_lengths(prompts_ids, self.longest)
        if not prompts_ids:
            return []
        self._wake_to_generate()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts_ids],
            [
                SamplingParams(**sampling_fields(sampling, self.policy.eos_ids, index))
                for index in range(len(prompts_ids))
            ],
            use_tqdm=False,
        )
        groups = [
            [
                self._completion(prompt, sampling, choice)
                for choice in sorted(output.outputs, key=lambda choice: choice.index)
            ]
            for prompt, output in zip(prompts_ids, outputs, strict=True)
        ]
        if self.sleep_level and not is_canary(prompts_ids, self.policy.model.config.vocab_size):
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
        return groups

    def _wake_to_generate(self) -> None:
        assert self.llm is not None
        if self.asleep and self.sleep_level == 2:
            raise EngineError(
                "the engine sleeps and has dropped its weights: load some before generating again, or use sleep_level 1"
            )
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def _completion(self, prompt: Sequence[int], sampling: Sampling, choice: Any) -> Completion:
        assert self.policy is not None
        logprobs = [step[token].logprob for token, step in zip(choice.token_ids, choice.logprobs, strict=True)]
        return as_completion(
            self.policy.tokenizer,
            self.policy.model.config.vocab_size,
            sampling,
            prompt,
            choice.token_ids,
            logprobs,
            choice.finish_reason,
            choice.stop_reason,
            self.weights_version,
        )

    def load_weights(self, model: torch.nn.Module, version: int) -> None:
        """Copy `model`'s weights into vLLM, to be served as `version`; wakes a sleeping engine."""
        if self.policy is None or self.llm is None:
            raise EngineError("this engine is closed")
        served = self.policy.model.config.vocab_size
        if model.config.vocab_size != served:  # type: ignore[union-attr]
            raise EngineError(
                f"cannot load a model with {model.config.vocab_size} ids into an engine of {served}"  # type: ignore[union-attr]
            )
        if self.asleep:  # weights first: the cache's memory is asked for when the load needs none any more
            self.llm.wake_up(tags=["weights"])
        load_policy_into_vllm_instance(model, self.llm)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.weights_version = version

    def close(self) -> None:
        """Stop vLLM and free its weights and cache."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.policy = self.llm = None
            gc.collect()
            cleanup_dist_env_and_memory()


def start_vllm(model: str, *, dtype: str, device: str, **options: Any) -> LLM:
    """vLLM on `model` in this process, with what every use here needs; `device` is "cpu" or "cuda[:index]"."""
    options["enforce_eager"] = options["enforce_eager"] or current_platform.is_cpu()
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        options["block_size"] = CPU_BLOCK_TOKENS
        if options["max_model_len"] is not None:
            options["enable_chunked_prefill"] = False
            options["max_num_batched_tokens"] = max(CPU_PASS_TOKENS, options["max_model_len"])
    elif ":" in device and options["tensor_parallel_size"] == 1:
        options["device_ids"] = [int(device.partition(":")[2])]
    # With an engine core in a process of its own, tensors could not be handed over by reference.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with _torch_threads_kept():
        try:
            return LLM(
                model=model,
                dtype=dtype,  # type: ignore[arg-type]
                seed=0,
                enable_prefix_caching=True,
                # Training needs the distribution that was sampled from, after temperature and top-p.
                logprobs_mode="processed_logprobs",
                use_tqdm_on_load=False,
                **options,
            )
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"vLLM cannot serve this policy: {error}") from error


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """vLLM's CPU worker replaces `torch.set_num_threads` by nothing, for the whole process; put it back."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original


# --- Weights -----------------------------------------------------------------------------------------------------


def load_policy_into_vllm_instance(policy: Any, llm: LLM) -> None:
    """Have `llm` serve the weights of `policy`, a transformers model, and forget what it had cached."""
    if llm.llm_engine.vllm_config.parallel_config.world_size == 1:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(policy.named_parameters())})
    else:  # tensors do not travel to other processes, a folder's name does
        with WeightsFolder() as folder:
            policy.save_pretrained(folder.path)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder.path)})
    if current_platform.is_cpu() and policy.config.tie_word_embeddings:
        llm.apply_model(_pack_head_again)
    if not llm.reset_prefix_cache():
        raise EngineError("vLLM kept its prefix cache, which holds what the old weights computed")


def _pack_head_again(model: Any) -> None:
    """On a CPU the output head's packed copy of tied embeddings is left out of the reload."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def open_nccl_transfer(url: str, model: torch.nn.Module, port: int, server_gpus: int) -> Callable[[], None]:
    """Join a vLLM server's GPUs over NCCL; the returned function sends them `model`'s present weights.

    `port` is a free one on this machine, for the two sides to meet. Uses vLLM's own weight transfer, for which the
    server needs `--weight-transfer-config '{"backend": "nccl"}'`. Not yet run on GPUs.
    """
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    from vllm.utils.network_utils import get_ip

    local = url.split("//", 1)[-1].startswith(("127.", "localhost", "[::1]"))
    meeting = NCCLTrainerInitInfo(
        rank=0,
        master_address="127.0.0.1" if local else get_ip(),
        master_port=port,
        world_size=1 + server_gpus,
    )
    engine = NCCLTrainerWeightTransferEngine.trainer_init(
        meeting, client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    return engine.send_weights


# --- The published helpers ---------------------------------------------------------------------------------------


def init_vllm(model_id: str, device: str, seed: int, gpu_memory_utilization: float = 0.85) -> LLM:
    """vLLM on `model_id` (a folder or hub id) on `device`, in this process, beside a trainer on another device.

    bfloat16 on a GPU, float32 on a CPU. `seed` seeds torch, as vLLM does when it starts.
    """
    llm = start_vllm(
        model_id,
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=None,
        tensor_parallel_size=1,
        enforce_eager=False,
    )
    torch.manual_seed(seed)
    return llm


def evaluate_vllm(
    vllm_model: LLM,
    reward_fn: Callable[[str, Any], Any],
    prompts: Sequence[str],
    eval_sampling_params: SamplingParams,
    ground_truths: Sequence[Any] | None = None,
    output: Path | str = "evaluation.jsonl",
) -> dict[str, float]:
    """Generate for `prompts`, pay each response with `reward_fn(response, ground_truth)`, and keep every one.

    `reward_fn` returns a Score or a mapping of numbers. Without `ground_truths` it is given the prompt in their place.
    Writes one JSON row a response to `output` and returns the mean of every number in the rewards.
    """
    truths = prompts if ground_truths is None else ground_truths
    rows = []
    for prompt, truth, request in zip(
        prompts, truths, vllm_model.generate(list(prompts), eval_sampling_params, use_tqdm=False), strict=True
    ):
        for choice in request.outputs:
            paid = reward_fn(choice.text, truth)
            reward: Mapping[str, Any] = asdict(paid) if is_dataclass(paid) and not isinstance(paid, type) else paid
            rows.append(
                {
                    "prompt": prompt,
                    "ground_truth": truth,
                    "response": choice.text,
                    "finish_reason": choice.finish_reason,
                    "reward": dict(reward),
                }
            )
    with open(output, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["reward"].items():
            if isinstance(value, (int, float)):
                numbers.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in numbers.items()}
