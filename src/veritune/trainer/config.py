"""The settings that recipes share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

from veritune.core.config import Rare, Section, TrainingConfig, require
from veritune.core.tables import table
from veritune.losses import Loss, LossAndMetrics, LossInputs, find_loss


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(TrainingConfig):
    """Settings of a recipe that follows the policy gradient."""

    loss_type: Annotated[str, Section("Loss")] = "reinforce_with_baseline"
    """The loss: no_baseline and reinforce_with_baseline, or of updates that reuse rollouts grpo_clip, grpo_no_clip,
    gspo and cispo, or package.module:name."""
    loss_settings: Any = table("loss_type", "veritune.losses:settings_class")
    """The coefficients of the loss that was chosen."""
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
        require(
            self,
            "normalize_constant",
            self.normalize_constant is None or self.normalize_constant > 0,
            "positive",
        )
        require(self, "kl_coefficient", 0 <= self.kl_coefficient < math.inf, "0 or more, and finite")
        require(self, "importance_cap", self.importance_cap > 0, "positive")

    @property
    def loss(self) -> Loss:
        return find_loss(self.loss_type)

    @property
    def loss_function(self) -> Callable[[LossInputs], LossAndMetrics]:
        """The loss with its coefficients."""
        return partial(self.loss.function, **asdict(self.loss_settings))

    @property
    def corrects_importance(self) -> bool:
        """Whether the engine's arithmetic is corrected for."""
        if self.importance_correction is not None:
            return self.importance_correction
        return not self.engine_settings.exact_log_probs
