"""The settings of `veritune plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from veritune.core.config import require
from veritune.recipes.grpo import GRPOConfig

DeviceName = Literal["auto", "cpu", "h200", "h100", "a100-80", "a100-40", "l40s", "rtx-4090"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Settings of `veritune plan`; those of `veritune grpo` have its names and defaults."""

    model: str = GRPOConfig.policy
    """The policy: embedded, a model folder, or a hub id; of it config.json alone is read."""
    gpus: int = 1
    """GPUs: one trains, and samples in turns; further ones sample, as servers or as one split engine."""
    device: DeviceName = "auto"
    """What the GPUs are; auto is this machine's GPU or else its CPU, whose rates are measured now, as are cpu's."""
    gpu_memory: float | None = None
    """GiB of memory of each; default: the device's."""
    dtype: Literal["auto", "float32", "bfloat16"] = GRPOConfig.dtype
    """The weights' number type; auto is float32 on a CPU and bfloat16 on a GPU."""
    engine: Literal["native", "vllm", "vllm-server"] | None = None
    """What samples; default: native with one GPU, vllm-server with more."""
    gpu_memory_utilization: float = GRPOConfig.gpu_memory_utilization
    """Share of a GPU's memory that vLLM takes for weights and cache."""
    max_rows: int = GRPOConfig.max_rows
    """Most completions that the native engine decodes side by side."""
    rollout_batch_size: int = GRPOConfig.rollout_batch_size
    """Responses sampled each step: prompts times group_size."""
    group_size: int = GRPOConfig.group_size
    """Responses sampled for each prompt."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    max_tokens: int = GRPOConfig.max_tokens
    """Most tokens of a response."""
    mean_tokens: float | None = None
    """Mean tokens of a response, each token as likely the last as any other; default: all have max_tokens."""
    microbatch_tokens: int = GRPOConfig.microbatch_tokens
    """Tokens that one forward and backward pass holds, shared prompts counted once."""
    activation_checkpointing: bool = GRPOConfig.activation_checkpointing
    """Keep each layer's input alone, and compute the layer again in the backward pass."""
    kl_coefficient: float = GRPOConfig.kl_coefficient
    """Above 0 the initial policy is held too, and scores every response."""

    def __post_init__(self) -> None:
        for name in ("gpus", "max_rows", "rollout_batch_size", "prompt_tokens", "max_tokens"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "group_size", self.group_size >= 2, "at least 2: siblings are compared")
        require(self, "microbatch_tokens", self.microbatch_tokens >= 1, "at least 1")
        require(self, "gpu_memory", self.gpu_memory is None or 0 < self.gpu_memory < float("inf"), "positive, in GiB")
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        whole_groups = self.rollout_batch_size % self.group_size == 0
        require(self, "rollout_batch_size", whole_groups, f"a multiple of group_size ({self.group_size})")
        in_range = self.mean_tokens is None or 1 <= self.mean_tokens <= self.max_tokens
        require(self, "mean_tokens", in_range, f"between 1 and max_tokens ({self.max_tokens})")
        require(self, "kl_coefficient", 0 <= self.kl_coefficient < float("inf"), "0 or positive, and finite")
        if self.gpus > 1:
            require(self, "engine", self.engine != "native", "vllm or vllm-server where gpus is above 1")
            require(self, "gpus", self.device != "cpu", "1 where device is cpu")
        if self.gpus == 1:
            require(self, "engine", self.engine != "vllm-server", "native or vllm where gpus is 1: servers need others")

    @property
    def sampler(self) -> str:
        """The engine, where it is unset too."""
        return self.engine or ("native" if self.gpus == 1 else "vllm-server")

    @property
    def mean_response(self) -> float:
        return self.max_tokens if self.mean_tokens is None else self.mean_tokens

    @property
    def engines(self) -> tuple[int, int]:
        """Engines that share the prompts, and the GPUs that each is split over."""
        return (self.gpus - 1, 1) if self.sampler == "vllm-server" else (1, self.gpus)
