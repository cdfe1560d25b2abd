"""Engines: one file each, behind the three methods of `veritune.core.types.Engine`."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from veritune.core.config import CommonConfig, require
from veritune.core.errors import ConfigError
from veritune.model.parallel import ALONE, Workers

if TYPE_CHECKING:
    from veritune.core.types import Engine
    from veritune.model.policy import Policy


def create_engine(config: CommonConfig, policy: Policy, workers: Workers = ALONE) -> Engine:
    """The engine that `config.engine` names, serving `policy`; the native one in all the `workers`."""
    if config.engine == "native":
        from veritune.engines.native.engine import NativeEngine
        from veritune.engines.native.graphs import capture_cuda_graph

        device = next(policy.model.parameters()).device.type
        require(config, "cuda_graphs", not config.cuda_graphs or device == "cuda", f"off: the policy is on {device}")
        capture = capture_cuda_graph if config.cuda_graphs else None
        return NativeEngine(policy, max_rows=config.max_rows, workers=workers, capture=capture)
    if config.engine == "vllm":
        require_vllm("engine", config.engine)
        from veritune.engines.vllm import VLLMEngine

        return VLLMEngine(
            policy,
            dtype=config.engine_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_model_len=config.max_model_len,
            tensor_parallel_size=config.tensor_parallel_size,
            eager=config.eager,
            sleep_level=config.sleep_level,
        )
    if config.engine == "api":
        from veritune.engines.api import APIEngine

        return APIEngine(
            policy.tokenizer,
            config.engine_url[0],
            config.engine_model or "",
            api_key=os.environ.get(config.api_key_env, ""),
            concurrency=config.engine_concurrency,
            retries=config.engine_retries,
            seconds=config.engine_seconds,
        )
    return _server_engine(config, policy)


def _server_engine(config: CommonConfig, policy: Policy) -> Engine:
    from veritune.engines.vllm_server import ServerSettings, VLLMServerEngine

    if config.engine_start:
        require_vllm("engine_start", config.engine_start)
    open_transfer = None
    if config.engine_weights == "nccl":
        require_vllm("engine_weights", config.engine_weights)
        from veritune.engines.vllm import open_nccl_transfer

        open_transfer = open_nccl_transfer
    return VLLMServerEngine(
        policy,
        ServerSettings(
            urls=config.engine_url,
            start=config.engine_start,
            weights_folder=config.engine_weights_folder,
            dtype=config.engine_dtype,
            seconds=config.engine_seconds,
            concurrency=config.engine_concurrency,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_model_len=config.max_model_len,
            eager=config.eager,
        ),
        open_transfer=open_transfer,
    )


def require_vllm(field: str, value: object) -> None:
    """Refuse a setting that needs vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{field} is {value!r}, but vLLM is not installed: pip install 'veritune[vllm]'")
