"""The settings that recipes share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from veritune.core.config import Rare, Section, TrainingConfig, require
from veritune.losses import POLICY_GRADIENT_LOSSES, LossType


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(TrainingConfig):
    """What a recipe that follows the policy gradient is told of its loss."""

    loss_type: Annotated[LossType, Section("Loss")] = "reinforce_with_baseline"
    """The policy-gradient loss; all but no_baseline and reinforce_with_baseline need an old policy, so off-policy."""
    cliprange: float = 0.2
    """Distance from 1 at which grpo_clip, gspo and cispo clip the probability ratio."""
    cliprange_high: float | None = None
    """The same distance above 1, where it differs (clip-higher)."""
    length_normalization: Literal["sequence", "constant", "token"] = "sequence"
    """Mean over each response's tokens, sum over them divided by normalize_constant, or mean over the batch's."""
    normalize_constant: Rare[float | None] = None
    """The divisor of length_normalization constant; default: max_tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the initial policy (k3 estimator) in the loss; 0 loads no reference."""
    filter_truncated: Rare[bool] = False
    """Responses cut off at max_tokens have no loss (overlong filtering); they stay in the denominators."""
    importance_correction: Rare[bool | None] = None
    """Weight each token's loss by the trainer's probability over the engine's; default: unless the engine is exact."""
    importance_cap: Rare[float] = 2.0
    """The largest such weight (truncated importance sampling)."""
    skip_zero_advantages: Rare[bool] = True
    """Leave responses without advantage out of the passes: they have no gradient, and stay in the denominators."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "cliprange", self.cliprange > 0, "positive")
        require(
            self,
            "cliprange_high",
            self.cliprange_high is None or self.cliprange_high >= self.cliprange,
            "at least cliprange",
        )
        require(
            self,
            "normalize_constant",
            self.normalize_constant is None or self.normalize_constant > 0,
            "positive",
        )
        require(self, "kl_coefficient", 0 <= self.kl_coefficient < math.inf, "0 or more, and finite")
        require(self, "importance_cap", self.importance_cap > 0, "positive")

    @property
    def sequence_level(self) -> bool:
        """Whether a token's loss depends on the other tokens of its response."""
        return "response_mask" in POLICY_GRADIENT_LOSSES[self.loss_type][1]

    @property
    def corrects_importance(self) -> bool:
        """Whether the engine's arithmetic is corrected for."""
        if self.importance_correction is not None:
            return self.importance_correction
        return not self.engine_settings.exact_log_probs
