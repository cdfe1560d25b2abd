"""Policy and optimiser on disk, and back bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from veritune.core.errors import CheckpointError
from veritune.core.run_folder import OPTIMIZER, Checkpoint, RunFolder
from veritune.model.policy import Policy, save_policy, trained_parameters


def save_checkpoint(run: RunFolder, step: int, policy: Policy, optimizer: torch.optim.Optimizer, *, keep: int) -> Path:
    """Policy and optimiser after `step` updates; nothing else is state, and nothing is pickled."""

    def write(folder: Path) -> None:
        try:
            save_policy(policy, folder)
            save_file(_optimizer_tensors(policy.model, optimizer), folder / OPTIMIZER)
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {folder}: {error}") from error

    return run.save_checkpoint(step, write, keep)


def restore_optimizer(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimiser state, bit for bit; its policy is loaded from the same folder beforehand."""
    tensors = load_file(checkpoint.folder / OPTIMIZER)
    for name, parameter in trained_parameters(policy.model).items():
        state = {kind: tensors.get(f"{name}/{kind}") for kind in ("step", "exp_avg", "exp_avg_sq")}
        if state["step"] is not None:  # a parameter that has had no gradient yet has no state
            optimizer.state[parameter] = {k: t.to(parameter.device) for k, t in state.items() if t is not None}


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{kind}": value.detach().cpu().contiguous()
        for name, parameter in trained_parameters(model).items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
