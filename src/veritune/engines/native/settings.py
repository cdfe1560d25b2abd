"""The native engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from veritune.core.config import Rare, require
from veritune.core.types import Engine, EngineSettings

if TYPE_CHECKING:
    from veritune.model.parallel import Workers
    from veritune.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class NativeSettings(EngineSettings):
    """Sampling in plain torch, with the trainer's own weights."""

    exact_log_probs: ClassVar[bool] = True

    max_rows: int = 512
    """Most completions that are decoded side by side."""
    cuda_graphs: Rare[bool] = False
    """Replay decode steps as captured CUDA graphs. Not run on a GPU yet, hence off."""

    def __post_init__(self) -> None:
        require(self, "max_rows", self.max_rows >= 1, "at least 1")

    def create(self, policy: Policy, workers: Workers) -> Engine:
        """The engine, in all the workers."""
        from veritune.engines.native.engine import NativeEngine
        from veritune.engines.native.graphs import capture_cuda_graph

        device = next(policy.model.parameters()).device.type
        require(self, "cuda_graphs", not self.cuda_graphs or device == "cuda", f"off: the policy is on {device}")
        capture = capture_cuda_graph if self.cuda_graphs else None
        return NativeEngine(policy, max_rows=self.max_rows, workers=workers, capture=capture)
