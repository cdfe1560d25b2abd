"""AdamW, its learning rate, and the clipped step."""

from __future__ import annotations

import math
from typing import Literal

import torch

from veritune.core.config import TrainingConfig
from veritune.core.errors import TrainingError
from veritune.model.policy import Policy, checkpoint_activations, trained_parameters
from veritune.trainer.checkpoint import restore_optimizer
from veritune.trainer.microbatches import prove_packing
from veritune.trainer.session import Session

Schedule = Literal["constant", "linear", "cosine"]


def make_optimizer(
    model: torch.nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; norms and biases are not decayed."""
    trained = trained_parameters(model).values()
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def scheduled_learning_rate(peak: float, step: int, total_steps: int, warmup_steps: int, schedule: Schedule) -> float:
    """The learning rate of update `step` (1 to `total_steps`): linear warm-up to `peak`, then the schedule.

    "linear" and "cosine" fall towards zero, which they would reach one update after the last.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps - 1) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def clip_and_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, learning_rate: float, clip_grad_norm: float
) -> float:
    """Clip the gradient's norm, update, clear the gradient; returns the norm before clipping.

    A gradient that is not finite raises TrainingError before any weight changes.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm))
    if not math.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm}; the update was refused")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def prepare_optimizer(session: Session[TrainingConfig]) -> torch.optim.AdamW:
    """The config's AdamW, with the checkpoint's state if there is one, for a policy proved to train as it computes."""
    config = session.config
    prove_packing(session.policy, config.policy)
    session.workers.everywhere(session.policy, prepare_model, config.activation_checkpointing)
    optimizer = make_optimizer(
        session.policy.model,
        learning_rate=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    if session.checkpoint:
        restore_optimizer(session.checkpoint, session.policy, optimizer)
    return optimizer


def prepare_model(policy: Policy, activation_checkpointing: bool) -> None:
    """Take dropout out of the model, and have it keep each layer's input alone if asked."""
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):  # its draws could not be addressed, and would move the ratio from one
            module.p = 0.0
    if activation_checkpointing:
        checkpoint_activations(policy.model)
