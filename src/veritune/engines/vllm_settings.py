"""The settings of vLLM, in the process and as servers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from veritune.core.config import Rare, require
from veritune.core.errors import ConfigError
from veritune.core.http import RequestSettings, is_address
from veritune.core.types import Engine, EngineSettings

if TYPE_CHECKING:
    from veritune.model.parallel import Workers
    from veritune.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(EngineSettings):
    """Options of vLLM itself, wherever it runs."""

    dtype: Rare[Literal["auto", "float32", "bfloat16"]] = "auto"
    """vLLM's number type; auto is the policy's."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory that vLLM takes for weights and cache."""
    max_model_len: int | None = None
    """Longest prompt and response together that vLLM makes room for; default: the policy's context."""
    eager: Rare[bool] = False
    """Run vLLM without CUDA graphs and compilation: a faster start, slower tokens. Always so on a CPU."""

    def __post_init__(self) -> None:
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len >= 64, "at least 64")

    @property
    def number_type(self) -> str:
        return self.dtype


@dataclass(frozen=True, kw_only=True)
class VLLMSettings(VLLMOptions):
    """vLLM in this process."""

    tensor_parallel_size: int = 1
    """GPUs that the policy is split over."""
    sleep_level: Literal[0, 1, 2] = 0
    """Free vLLM's GPU memory while training: 1 keeps its weights in CPU memory, 2 drops them; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "tensor_parallel_size", self.tensor_parallel_size >= 1, "at least 1")

    def create(self, policy: Policy, workers: Workers) -> Engine:
        require_vllm("engine", "vllm")
        from veritune.engines.vllm import VLLMEngine

        return VLLMEngine(policy, self)


@dataclass(frozen=True, kw_only=True)
class VLLMServerSettings(VLLMOptions, RequestSettings):
    """vLLM as servers, which share the prompts."""

    shares_device: ClassVar[bool] = False

    url: tuple[str, ...] = ()
    """Servers with their development endpoints, on trusted networks only."""
    start: tuple[str, ...] = ()
    """Start a server on loopback on each of these devices, cpu or cuda:index."""
    weights: Literal["folder", "nccl"] = "folder"
    """How weights reach the servers: through a folder that both sides see, or from GPU to GPU."""
    weights_folder: Rare[Path | None] = None
    """The folder through which weights reach the servers; default: a temporary one on this machine."""

    def __post_init__(self) -> None:
        VLLMOptions.__post_init__(self)
        RequestSettings.__post_init__(self)
        require(self, "url", all(map(is_address, self.url)), "addresses such as http://localhost:8000")
        known = all(device == "cpu" or device.startswith("cuda:") for device in self.start)
        require(self, "start", known, "a list of cpu or cuda:index")
        if not (self.url or self.start):
            raise ConfigError("url and start are empty; give the addresses of servers, or start some")

    def create(self, policy: Policy, workers: Workers) -> Engine:
        from veritune.engines.vllm_server import VLLMServerEngine

        if self.start:
            require_vllm("engine.start", self.start)
        if self.weights == "folder":
            return VLLMServerEngine(policy, self)
        require_vllm("engine.weights", self.weights)
        from veritune.engines.vllm import open_nccl_transfer

        return VLLMServerEngine(policy, self, open_transfer=open_nccl_transfer)


def require_vllm(setting: str, value: object) -> None:
    """Refuse a setting that needs vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{setting} is {value!r}, but vLLM is not installed: pip install 'veritune[vllm]'")
