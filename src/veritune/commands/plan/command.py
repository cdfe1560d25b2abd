"""`veritune plan`: the plan as a person reads it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from veritune.commands.plan.config import PlanConfig
from veritune.commands.plan.planning import Plan, command_line, in_units, make_plan, step_tokens
from veritune.commands.plan.seconds import prompt_passes

Row = tuple[str, str, str]
"""What, how much, and of what that is made."""


def print_plan(config: PlanConfig) -> int:
    """Print the plan of a step; the exit code is 1 where it does not fit."""
    plan, console = make_plan(config), Console(highlight=False)
    console.print(Text(config.model, style="bold"))
    console.print(Text(_model(plan)))
    console.print(Text(_devices(plan)))
    servers = config.sampler == "vllm-server"
    for title, rows in (
        ("memory while training", _training_rows(plan)),
        ("memory of each server" if servers else "memory while sampling", _sampling_rows(plan)),
        ("seconds of a step, at least", _time_rows(plan)),
    ):
        console.print()
        console.print(_table(title, rows))
    console.print()
    for fault in plan.faults:
        console.print(Text.assemble(("does not fit: ", "bold red"), fault))
    if plan.largest_microbatch:
        console.print(Text.assemble("largest microbatch_tokens that fits: ", (_largest(plan), "bold")))
    if not plan.faults:
        console.print(Text(shlex.join(command_line(plan)), style="dim"), soft_wrap=True)
    return 1 if plan.faults else 0


def _table(title: str, rows: Iterable[Row]) -> Table:
    """A table of which the last row is the sum."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text(title), min_width=27)
    table.add_column("", justify="right", min_width=9)
    table.add_column("", style="dim", overflow="fold")
    *parts, (total, amount, why) = rows
    for name, *rest in parts:
        table.add_row(Text(name), *map(Text, rest))
    table.add_row(Text(total, style="bold"), Text(amount, style="bold"), Text(why))
    return table


def _model(plan: Plan) -> str:
    shape = plan.shape
    return (
        f"{shape.parameters:,} parameters: {shape.layers} layers, hidden {shape.hidden:,}, "
        f"{shape.heads}/{shape.key_value_heads} heads, FFN {shape.feed_forward:,}, vocabulary {shape.vocabulary:,}"
    )


def _devices(plan: Plan) -> str:
    device, gpus = plan.device, plan.config.gpus
    rate, dtype = device.matrix_rate(plan.dtype), str(plan.dtype).removeprefix("torch.")
    return (
        f"{f'{gpus} × ' if gpus > 1 else ''}{device.name}, {device.gib:,.1f} GiB, {_rate(rate, 'FLOP/s')} in {dtype}, "
        f"copies at {_rate(device.copy, 'B/s')} ({device.source})"
    )


def _rate(rate: float, unit: str) -> str:
    scale, prefix = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / scale:,.3g} {prefix}{unit}"


def _training_rows(plan: Plan) -> list[Row]:
    memory, size = plan.training, plan.dtype.itemsize
    per_token = memory.activations / memory.tokens
    rows = [
        ("weights", memory.weights, f"{size} bytes a parameter"),
        ("AdamW's moments", memory.moments, f"twice {size} bytes a parameter"),
        ("reference", memory.reference, "the initial policy"),
        ("gradients", memory.gradients, f"{size} bytes a parameter"),
        ("activations", memory.activations, f"{memory.tokens:,} tokens × {in_units(per_token)}"),
        ("head: logits, gradients", memory.head, "a chunk of the tokens at a time"),
        ("or a layer's backward pass", memory.layer, "the larger one counts"),
        ("peak", memory.peak, f"of {in_units(plan.usable)} usable"),
    ]
    return [(name, in_units(amount), why) for name, amount, why in rows if amount]


def _sampling_rows(plan: Plan) -> list[Row]:
    memory, config = plan.rollouts, plan.config
    _, split = config.engines
    held = plan.training.resident if config.sampler != "vllm-server" else 0
    over = f" over {split} GPUs" if split > 1 else ""
    cached = f"{memory.places:,} responses, {plan.shape.cache_bytes(plan.dtype.itemsize):,} bytes a token"
    rows = [
        ("weights, moments" + (", reference" if plan.training.reference else ""), held, "of the trainer"),
        ("the engine's weights", memory.weights, over.strip() or "a copy"),
        ("cache", memory.cache, cached + over),
        ("logits, sampling", memory.working, "or the pass over the prompts"),
        ("peak", held + memory.peak, f"of {in_units(plan.usable)} usable"),
    ]
    return [(name, in_units(amount), why) for name, amount, why in rows if amount]


def _time_rows(plan: Plan) -> list[Row]:
    seconds, config = plan.seconds, plan.config
    engines, split = config.engines
    prompts, mean = config.rollout_batch_size // config.group_size, config.mean_response
    where = f", {engines * split} GPUs" if engines * split > 1 else ""
    length = f"{mean:,g} of {config.max_tokens:,} tokens" if mean < config.max_tokens else f"{mean:,g} tokens"
    passes = prompt_passes(config)
    trained = passes * config.prompt_tokens + round(config.rollout_batch_size * mean)
    repeated = "each prompt once" if passes == prompts else f"a prompt {passes / prompts:.2g} times"
    rows = [
        ("sampling: prompts", seconds.prefill, f"{prompts:,} × {config.prompt_tokens:,} tokens{where}"),
        ("sampling: responses", seconds.decode, f"{config.rollout_batch_size:,} × {length}{where}"),
        ("reference", seconds.reference, "one forward pass"),
        ("training", seconds.train, f"{trained:,} tokens, {repeated}"),
        ("AdamW", seconds.update, ""),
        ("whole step", seconds.total, ""),
    ]
    return [(name, f"{amount:,.2f} s", why) for name, amount, why in rows if amount]


def _largest(plan: Plan) -> str:
    whole = plan.largest_microbatch == step_tokens(plan.config)
    return f"{plan.largest_microbatch:,}" + (", all of a step" if whole else "")
