"""From settings to a plan: what fits, how long a step takes at least, and how it is run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from veritune.commands.plan.config import PlanConfig
from veritune.commands.plan.devices import DEVICES, GIB, Device, measure_device
from veritune.commands.plan.memory import RolloutMemory, TrainingMemory, rollout_memory, training_memory
from veritune.commands.plan.seconds import StepSeconds, step_seconds
from veritune.commands.plan.shapes import Shape, shape_of
from veritune.core.config import require
from veritune.model.policy import choose_device, choose_dtype
from veritune.recipes.grpo import GRPOConfig

USABLE = 0.95
"""Share of a device's memory that is planned with; the rest goes to the driver, libraries and the allocator's gaps."""

SHARED = (
    *("dtype", "gpu_memory_utilization", "max_rows", "rollout_batch_size", "group_size", "max_tokens"),
    *("microbatch_tokens", "activation_checkpointing", "kl_coefficient"),
)
"""Settings that `veritune grpo` has too."""


@dataclass(frozen=True)
class Plan:
    """A GRPO step on a device, counted. Memory in bytes."""

    config: PlanConfig
    shape: Shape
    device: Device
    dtype: torch.dtype
    training: TrainingMemory
    rollouts: RolloutMemory
    seconds: StepSeconds
    largest_microbatch: int | None
    """The most positions whose pass fits, at most all of a step's; None where not even the longest response fits."""
    faults: tuple[str, ...]
    """What does not fit."""

    @property
    def usable(self) -> int:
        """Bytes of a device that are planned with."""
        return int(USABLE * self.device.gib * GIB)


def make_plan(config: PlanConfig) -> Plan:
    """Count memory and time of a step under `config`, without loading a weight.

    Raises ConfigError naming the field of what cannot be planned.
    """
    shape = shape_of(config.model)
    longest = config.prompt_tokens + config.max_tokens
    room = f"at most {shape.context - config.prompt_tokens}: the model's context of {shape.context} less the prompt"
    require(config, "max_tokens", longest <= shape.context, room)
    device, dtype = find_device(config)
    if not device.is_gpu:
        require(config, "gpus", config.gpus == 1, "1 where the device is a CPU")
        require(config, "engine", config.sampler == "native", "native where the device is a CPU")
    _, split = config.engines
    require(config, "gpus", shape.heads % split == 0, f"a divisor of the model's {shape.heads} heads with engine vllm")
    held = max(config.microbatch_tokens, longest)  # a row longer than the budget stands alone
    plan = Plan(
        config=config,
        shape=shape,
        device=device,
        dtype=dtype,
        training=training_memory(shape, config, device, dtype, min(held, step_tokens(config))),
        rollouts=(rollouts := rollout_memory(shape, config, device, dtype)),
        seconds=step_seconds(shape, config, device, dtype, places=max(rollouts.places, 1)),
        largest_microbatch=None,
        faults=(),
    )
    plan = dataclasses.replace(plan, largest_microbatch=_largest_microbatch(plan, config))
    return dataclasses.replace(plan, faults=_faults(plan))


def find_device(config: PlanConfig) -> tuple[Device, torch.dtype]:
    """The device that the settings name, with their memory, and the weights' number type on it."""
    if config.device in DEVICES:
        device, dtype = DEVICES[config.device], choose_dtype(config.dtype, torch.device("cuda"))
    else:
        here = choose_device(config.device)
        dtype = choose_dtype(config.dtype, here)
        device = measure_device(here, dtype)
    return dataclasses.replace(device, gib=config.gpu_memory or device.gib), dtype


def step_tokens(config: PlanConfig) -> int:
    """Positions of a whole step at its longest, each group's prompt once."""
    prompts = config.rollout_batch_size // config.group_size
    return prompts * config.prompt_tokens + config.rollout_batch_size * config.max_tokens


def _largest_microbatch(plan: Plan, config: PlanConfig) -> int | None:
    """The most positions whose pass fits under `config`; None where not even the longest response fits."""

    def fits(tokens: int) -> bool:
        return training_memory(plan.shape, config, plan.device, plan.dtype, tokens).peak <= plan.usable

    low, high = config.prompt_tokens + config.max_tokens, step_tokens(config)
    if not fits(low):
        return None
    while low < high:  # the largest that fits lies between them, both included
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _faults(plan: Plan) -> tuple[str, ...]:
    config, faults = plan.config, []
    if plan.training.peak > plan.usable:
        faults.append(
            f"training needs {in_units(plan.training.peak)} of {in_units(plan.usable)}; {_way_to_train(plan)}"
        )
    resident = plan.training.resident
    if config.sampler != "vllm-server" and resident + plan.rollouts.peak > plan.usable:
        way = "lower max_rows" if config.sampler == "native" else "lower gpu_memory_utilization"
        if resident > plan.usable:
            way = "the trainer's weights and moments alone are too large"
        needed = in_units(resident + plan.rollouts.peak)
        faults.append(f"sampling needs {needed} of {in_units(plan.usable)}; {way}")
    if plan.rollouts.places < 1:
        faults.append("vLLM's share of a GPU does not hold the weights and the cache of one response")
    return tuple(faults)


def _way_to_train(plan: Plan) -> str:
    """What would make training fit, if anything would."""
    if plan.largest_microbatch is not None:
        return f"microbatch_tokens must be at most {plan.largest_microbatch:,}"
    checkpointed = _largest_microbatch(plan, dataclasses.replace(plan.config, activation_checkpointing=True))
    if checkpointed is not None:
        return f"with activation_checkpointing, microbatch_tokens of up to {checkpointed:,} fit"
    if plan.training.resident + plan.training.gradients > plan.usable:
        return "weights, moments and gradients alone are too large"
    return "not even a pass over the longest response fits: lower max_tokens"


def in_units(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", 1 << 20, 1)):
        if size >= scale:
            return f"{size / scale:,.{digits}f} {unit}"
    return f"{size / 1024:,.1f} KiB"


def command_line(plan: Plan) -> list[str]:
    """The `veritune grpo` that the plan is of: the settings that are not its defaults."""
    config = plan.config
    chosen: dict[str, object] = {"policy": config.model, "engine": config.sampler}
    chosen["device"] = "cuda:0" if plan.device.is_gpu else "cpu"
    if config.sampler == "vllm-server":
        chosen["engine_start"] = ",".join(f"cuda:{index}" for index in range(1, config.gpus))
    if config.sampler == "vllm":
        chosen |= {"tensor_parallel_size": config.gpus, "sleep_level": 2}
    if config.sampler != "native":
        chosen["max_model_len"] = max(config.prompt_tokens + config.max_tokens, 64)
    chosen |= {name: getattr(config, name) for name in SHARED} | {"train_batch_size": config.rollout_batch_size}
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    words = ["veritune", "grpo"]
    for name, value in chosen.items():
        if value != defaults[name]:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words
