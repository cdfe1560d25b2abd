"""`veritune plan`: memory and time of a GRPO step, counted from a model's shape before anything is loaded.

    from veritune.commands.plan import PlanConfig, make_plan
    plan = make_plan(PlanConfig(policy="Qwen/Qwen2.5-Math-1.5B", device="h200", max_tokens=1024))

Only the terms that decide are counted, to a fifth of the peaks that `benchmarks/plan.py` measures; time is the least.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.benchmark import Timer

from veritune.core.config import Section, require
from veritune.core.errors import ConfigError
from veritune.engines.native.settings import NativeSettings
from veritune.engines.vllm_settings import VLLMOptions, VLLMServerSettings, VLLMSettings
from veritune.model.architectures import FAMILY
from veritune.model.head import CHUNK_LOGITS
from veritune.model.policy import choose_device, choose_dtype, load_skeleton
from veritune.recipes.config import GRPOConfig

GIB = 1 << 30
USABLE = 0.95
"""Share of a device's memory that is planned with; the rest goes to the driver, libraries and the allocator's gaps."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(GRPOConfig):
    """Settings of `veritune plan`: those of the `veritune grpo` that is planned, and these."""

    device: Annotated[str, Section("Plan")] = "auto"
    """h200, h100, a100-80, a100-40, l40s, rtx-4090, or a device of this machine, whose rates are measured now."""
    gpu_memory: float | None = None
    """GiB of memory of each device; default: its own."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    mean_tokens: float | None = None
    """Mean tokens of a response; default: all have max_tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prompt_tokens", self.prompt_tokens >= 1, "at least 1")
        require(self, "gpu_memory", self.gpu_memory is None or 0 < self.gpu_memory < float("inf"), "positive, in GiB")
        known = isinstance(self.engine_settings, NativeSettings | VLLMOptions)
        require(self, "engine", known, "native, vllm or vllm-server: no other can be planned")
        in_range = self.mean_tokens is None or 1 <= self.mean_tokens <= self.max_tokens
        require(self, "mean_tokens", in_range, f"between 1 and max_tokens ({self.max_tokens})")

    @property
    def servers(self) -> int:
        """Engines that share the prompts."""
        engine = self.engine_settings
        return len(engine.start) + len(engine.url) if isinstance(engine, VLLMServerSettings) else 1

    @property
    def split(self) -> int:
        """GPUs that each engine is split over."""
        return self.engine_settings.tensor_parallel_size if isinstance(self.engine_settings, VLLMSettings) else 1


@dataclass(frozen=True)
class Device:
    """Memory that torch can see, and rates a second: operations of matrix products, and bytes that a copy moves."""

    name: str
    gib: float
    bfloat16: float
    float32: float  # without TF32
    copy: float
    source: str
    is_gpu: bool = True


DEVICES = {
    "h200": Device("H200", 139.7, 790e12, 67e12, 4.3e12, "measured"),
    "h100": Device("H100 SXM", 79.1, 989e12, 67e12, 3.35e12, "datasheet"),
    "a100-80": Device("A100 SXM 80 GB", 79.1, 312e12, 19.5e12, 2.039e12, "datasheet"),
    "a100-40": Device("A100 SXM 40 GB", 39.4, 312e12, 19.5e12, 1.555e12, "datasheet"),
    "l40s": Device("L40S", 44.3, 362e12, 91.6e12, 0.864e12, "datasheet"),
    "rtx-4090": Device("RTX 4090", 23.5, 165e12, 82.6e12, 1.008e12, "datasheet"),
}


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """This machine's GPU or CPU: its memory, and its rates for `dtype`, measured now on torch's present threads."""
    is_gpu, threads = device.type == "cuda", torch.get_num_threads()
    size, length = (8192, GIB) if is_gpu else (512, GIB // 32)
    # Random numbers: a GPU is faster on zeros and ones, which toggle fewer of its bits, than on those of a policy.
    matrix, source = torch.randn(size, size, device=device).to(dtype), torch.randn(length // 4, device=device)

    def seconds(statement: str) -> float:
        timer = Timer(statement, globals={"m": matrix, "s": source, "t": torch.empty_like(source)}, num_threads=threads)
        return min(timer.timeit(1).mean for _ in range(40))  # others share the machine; nothing makes it faster

    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, threads: {threads}"
    memory = torch.cuda.mem_get_info(device)[1] if is_gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    product = 2 * size**3 / seconds("m @ m")
    return Device(name, memory / GIB, product, product, 2 * length / seconds("t.copy_(s)"), "measured now", is_gpu)


@dataclass(frozen=True)
class Shape:
    """The numbers that memory and time are counted from; widths and matrices in elements."""

    model_type: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    layer_matrices: int  # of all layers
    vocabulary: int
    context: int

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes that a token's keys and values take in every layer."""
        return 2 * self.layers * self.key_value_heads * self.head_size * itemsize


def shape_of(name: str) -> Shape:
    """The shape of "embedded", a folder or a hub id, counted on its modules without any weight; or a ConfigError."""
    model = load_skeleton(name)
    config, head = model.config, model.get_output_embeddings()
    layers = getattr(model.base_model, "layers", ())
    heads, feed_forward = (getattr(config, key, None) for key in ("num_attention_heads", "intermediate_size"))
    if head is None or not layers or not heads or not feed_forward:
        wanted = "its config.json must give attention heads and a feed-forward width, as Llama's and Qwen's do"
        raise ConfigError(f"policy is {name!r} of type {config.model_type!r}; {wanted}")
    matrices = [module.weight for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    vocabulary, hidden = head.weight.shape
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    parameters, elements = (sum(each.numel() for each in group) for group in (model.parameters(), matrices))
    context = int(getattr(config, "max_position_embeddings", 1 << 30))
    widths = (hidden, heads, key_value_heads, head_size, feed_forward)
    return Shape(config.model_type, parameters, len(layers), *widths, elements, vocabulary, context)


Parts = dict[str, tuple[int, str]]  # of a stage's memory: bytes, and the count that they are made of


def total(parts: Parts, names: Collection[str] = ()) -> int:
    """Bytes of the named parts, or of all."""
    return sum(amount for name, (amount, _) in parts.items() if not names or name in names)


def training_memory(
    shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype, tokens: int | None = None
) -> Parts:
    """The trainer's memory in a pass over `tokens` packed positions."""
    # A row longer than the budget stands alone.
    least = max(config.microbatch_tokens, config.prompt_tokens + config.max_tokens)
    tokens = tokens or min(least, step_tokens(config))
    size, hidden = dtype.itemsize, tokens * shape.hidden * dtype.itemsize
    weights = shape.parameters * size
    # A layer keeps the inputs of two norms, attention's four tensors, and gate and up.
    kept = 2 * size * (shape.hidden + shape.feed_forward + (shape.heads + shape.key_value_heads) * shape.head_size)
    kept *= tokens * (1 if shape.model_type in FAMILY else 2)  # autograd's own layers keep about twice as much
    working = 2 * tokens * size * shape.feed_forward + 4 * hidden
    if device.is_gpu and dtype == torch.float32:  # no flash kernel: the scores, and three tensors of their size
        working += 16 * shape.heads * max(config.max_tokens**2, tokens * config.prompt_tokens)
    logits = min(tokens * shape.vocabulary, CHUNK_LOGITS["cuda" if device.is_gpu else "cpu"])
    # A shorter number type has the log-softmax, and the sum of the matrix's gradients, in float32 beside it.
    shorter = 0 if dtype == torch.float32 else size * logits + 4 * shape.vocabulary * shape.hidden
    head = 2 * hidden + 4 * logits + shorter
    again, each = config.activation_checkpointing, f"{size} bytes a parameter"
    return {
        "weights": (weights, each),
        "AdamW's moments": (2 * weights, f"twice {each}"),
        "reference": (weights if config.kl_coefficient else 0, "the initial policy"),
        "gradients": (weights, each),
        "activations": (shape.layers * (hidden if again else kept) + 2 * hidden, f"{tokens:,} tokens"),
        "head, or a layer's backward": (max(head, working + again * kept), "the larger one counts"),
    }


def sampling_memory(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype) -> tuple[Parts, int]:
    """The memory of each engine, and the responses that it decodes side by side."""
    size, servers, split, engine = dtype.itemsize, config.servers, config.split, config.engine_settings
    rows, per_token = -(-config.rollout_batch_size // servers), shape.cache_bytes(size)
    if isinstance(engine, NativeSettings):
        places = min(engine.max_rows, rows)
        prompts = -(-places // config.group_size) * config.prompt_tokens
        cache = (places * config.max_tokens + prompts) * per_token
        # Logits in float32, log-probabilities, and cumulative sums in float64; or the pass over the prompts.
        sampling = places * shape.vocabulary * (size + 24)
        prefill = prompts * size * (2 * shape.feed_forward + shape.hidden)
        weights = shape.layer_matrices * size
    else:
        assert isinstance(engine, VLLMOptions)
        weights = shape.parameters * size // split
        cache = max(int(engine.gpu_memory_utilization * device.gib * GIB) - weights, 0)
        # A head of keys and values is not split: with more GPUs than heads, several hold the same.
        each = (config.prompt_tokens + config.max_tokens) * per_token // min(split, shape.key_value_heads)
        places, sampling, prefill = min(rows, cache // each), 0, 0
    over = f" over {split} GPUs" if split > 1 else ""
    return {
        "the engine's weights": (weights, over.strip() or "a copy"),
        "cache": (cache, f"{places:,} responses, {per_token:,} bytes a token{over}"),
        "logits, sampling": (max(sampling, prefill), "or the pass over the prompts"),
    }, places


def step_tokens(config: PlanConfig) -> int:
    """Positions of a whole step at its longest, each group's prompt once."""
    prompts = config.rollout_batch_size // config.group_size
    return prompts * config.prompt_tokens + config.rollout_batch_size * config.max_tokens


def step_seconds(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype, places: int) -> dict[str, float]:
    """The least seconds of each stage: operations over the matrix rate or bytes over the copy rate, the longer one."""

    rate = device.bfloat16 if dtype == torch.bfloat16 else device.float32

    def seconds(operations: float, moved: float = 0.0) -> float:
        return max(operations / rate, moved / device.copy)

    servers, split, rows = config.servers, config.split, config.rollout_batch_size
    prompt, groups, size = config.prompt_tokens, rows // config.group_size, dtype.itemsize
    mean = config.mean_tokens or config.max_tokens
    layers, head = shape.layer_matrices, shape.vocabulary * shape.hidden
    matrices, width = layers + head, 4 * shape.layers * shape.heads * shape.head_size
    # A microbatch computes a prompt once for the responses that it holds.
    prompts = max(groups, rows // max(1, int((config.microbatch_tokens - prompt) // mean)))
    pairs = prompts * prompt**2 / 2 + rows * mean * (prompt + mean / 2)
    forward_layers = 2 * layers * (prompts * prompt + rows * mean) + width * pairs
    forward = forward_layers + 2 * head * rows * mean
    each, together = -(-rows // servers), max(min(-(-rows // servers), places), 1)
    read = (
        each
        * mean
        * (mean / 2 + prompt / (config.group_size if isinstance(config.engine_settings, NativeSettings) else 1))
    )
    decode = each / together * mean * seconds(2 * matrices * together, matrices * size)
    decode += seconds(width * each * mean * (prompt + mean / 2), shape.cache_bytes(size) * read)
    prefill = groups / servers * (2 * (layers * prompt + head) + width * prompt**2 / 2)
    return {
        "sampling: prompts": seconds(prefill, matrices * size) / split,
        "sampling: responses": decode / split,
        **({"reference": seconds(forward)} if config.kl_coefficient else {}),
        "training": seconds(3 * forward + (forward_layers if config.activation_checkpointing else 0.0)),
        # The gradient is read for its norm and scaled; AdamW reads four tensors and writes three.
        "AdamW": seconds(0, 10 * shape.parameters * size),
    }


@dataclass(frozen=True)
class Plan:
    """A GRPO step on a device, counted; `places` are the responses that each engine decodes side by side."""

    config: PlanConfig
    shape: Shape
    device: Device
    dtype: torch.dtype
    training: Parts
    sampling: Parts
    places: int
    seconds: dict[str, float]

    @property
    def usable(self) -> int:
        """Bytes of a device that are planned with."""
        return int(USABLE * self.device.gib * GIB)

    @property
    def resident(self) -> int:
        """The trainer's bytes that stay while an engine samples."""
        return total(self.training, ("weights", "AdamW's moments", "reference"))

    def largest(self, config: PlanConfig) -> int | None:
        """The most positions whose pass fits, at most a step's; None where not even the longest response fits."""
        low, high = config.prompt_tokens + config.max_tokens, step_tokens(config)
        memory = partial(training_memory, self.shape, config, self.device, self.dtype)
        fitting = bisect.bisect_right(range(low, high + 1), self.usable, key=lambda tokens: total(memory(tokens)))
        return low + fitting - 1 if fitting else None

    @property
    def faults(self) -> Iterator[str]:
        """One line for each stage that does not fit, with a way out."""
        config, needed = self.config, total(self.training)
        if needed > self.usable:
            if largest := self.largest(config):
                way = f"microbatch_tokens must be at most {largest:,}"
            elif again := self.largest(dataclasses.replace(config, activation_checkpointing=True)):
                way = f"with activation_checkpointing, microbatch_tokens of up to {again:,} fit"
            else:
                way = "not even a pass over the longest response fits beside weights, moments and gradients"
            yield f"training needs {in_units(needed)} of {in_units(self.usable)}; {way}"
        needed = self.resident + total(self.sampling)
        if config.engine_settings.shares_device and needed > self.usable:
            native = isinstance(config.engine_settings, NativeSettings)
            way = f"lower engine.{'max_rows' if native else 'gpu_memory_utilization'}"
            parts = f"{in_units(needed)}, {in_units(self.resident)} of it the trainer's,"
            yield f"sampling needs {parts} of {in_units(self.usable)}; {way}"
        if self.places < 1:
            yield "vLLM's share of a GPU does not hold the weights and the cache of one response"


def make_plan(config: PlanConfig) -> Plan:
    """Count memory and time of a step under `config`, without loading a weight.

    Raises ConfigError naming the field of a setting that cannot be planned.
    """
    shape = shape_of(config.policy)
    room = shape.context - config.prompt_tokens
    require(config, "max_tokens", config.max_tokens <= room, f"at most {room}: the context less the prompt")
    here = torch.device("cuda") if config.device in DEVICES else choose_device(config.device)
    dtype = choose_dtype(config.dtype, here)
    device = DEVICES[config.device] if config.device in DEVICES else measure_device(here, dtype)
    device = dataclasses.replace(device, gib=config.gpu_memory or device.gib)
    divides = shape.heads % config.split == 0
    require(config.engine_settings, "tensor_parallel_size", divides, f"a divisor of the model's {shape.heads} heads")
    sampling, places = sampling_memory(shape, config, device, dtype)
    seconds = step_seconds(shape, config, device, dtype, places)
    return Plan(config, shape, device, dtype, training_memory(shape, config, device, dtype), sampling, places, seconds)


def in_units(size: float) -> str:
    """Bytes in the unit that suits them."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"


def print_plan(config: PlanConfig) -> int:
    """Print the plan of a step; the exit code is 1 where it does not fit."""
    plan, console = make_plan(config), Console(highlight=False)
    shape, device, tables = plan.shape, plan.device, []
    console.print(
        f"[bold]{escape(config.policy)}[/bold]\n"
        f"{shape.parameters:,} parameters: {shape.layers} layers, hidden {shape.hidden:,}, {shape.heads}/"
        f"{shape.key_value_heads} heads, FFN {shape.feed_forward:,}, vocabulary {shape.vocabulary:,}\n"
        f"{device.name}, {device.gib:,.1f} GiB, {device.bfloat16 / 1e12:,.3g} TFLOP/s in bfloat16 and "
        f"{device.float32 / 1e12:,.3g} in float32, copies at {device.copy / 1e12:,.3g} TB/s ({device.source})"
    )
    shared = {"the trainer's": (plan.resident, "weights, moments")} if config.engine_settings.shares_device else {}
    for stage, parts in (("training", plan.training), ("sampling", shared | plan.sampling)):
        rows = [(name, in_units(amount), why) for name, (amount, why) in parts.items() if amount]
        rows.append(("peak", in_units(total(parts)), f"of {in_units(plan.usable)} usable"))
        tables.append((f"memory while {stage}", rows))
    seconds = plan.seconds | {"whole step": sum(plan.seconds.values())}
    tables.append(("seconds of a step, at least", [(name, f"{each:,.3g} s", "") for name, each in seconds.items()]))
    for title, rows in tables:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(title, min_width=27)
        table.add_column("", justify="right", min_width=9)
        table.add_column("", style="dim", overflow="fold")
        for row in rows:
            table.add_row(*row, style="bold" if row is rows[-1] else None)
        console.print("", table)
    for fault in plan.faults:
        console.print(f"\n[bold red]does not fit:[/bold red] {fault}")
    if largest := plan.largest(config):
        console.print(f"\nlargest microbatch_tokens that fits: [bold]{largest:,}[/bold]")
    return 1 if any(plan.faults) else 0
