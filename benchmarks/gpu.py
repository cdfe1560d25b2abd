"""One GPU against its counted limit: exactness in bfloat16, rollouts, training, the head, and a whole step.

    python benchmarks/gpu.py [--parts exactness head rollout training step] [--output FILE]
    python benchmarks/gpu.py --device cpu --shape small      # the same on a CPU, to see that it runs

A model of Qwen2.5-Math-1.5B's shape with random weights: 256 rollouts of 1,024 tokens, 8 for each of 32 prompts of 200.
Every figure stands beside the time of the counted work at the rates that are measured first (as `veritune plan` counts
it), and beside what is promised of an H200. A line is printed as soon as it is measured; what does not fit in the
device's memory says so and the next one is tried. Liger's fused head is measured too where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config

from veritune.commands.plan import Device, PlanConfig, measure_device, shape_of, step_seconds
from veritune.core.errors import VerituneError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Pairs, Rollout, Sampling, Score
from veritune.engines.native.engine import NativeEngine
from veritune.engines.native.graphs import capture_cuda_graph
from veritune.engines.native.settings import NativeSettings
from veritune.model.head import label_log_probs
from veritune.model.policy import Policy, as_policy, choose_dtype, load_policy
from veritune.primitives import get_response_log_probs, pad_prompt_and_response
from veritune.recipes.config import GRPOConfig
from veritune.recipes.grpo import grpo_step
from veritune.trainer.optimizer import clip_and_step, make_optimizer, prepare_model
from veritune.trainer.policy_gradient import batch_backward, score_rollouts
from veritune.trainer.session import Session

SHAPES = {
    "qwen2.5-math-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
PROMISED = {
    "rollout": "≥ 60,000 tokens/s, ≤ 2 times the limit",
    "training": "≥ 35,000 tokens/s",
    "head": "≥ 500 TFLOP/s, peak flat in V",
    "step": "≤ 12 s",
}
"""Of an H200."""
MIB = 1 << 20


@dataclass(frozen=True)
class Bench:
    """What is measured, on what."""

    device: torch.device
    dtype: torch.dtype
    shape: dict[str, int]
    groups: int
    siblings: int
    prompt_tokens: int
    response_tokens: int
    rounds: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def model_config(self) -> Qwen2Config:
        longest = self.prompt_tokens + self.response_tokens
        return Qwen2Config(**self.shape, max_position_embeddings=max(4096, longest), tie_word_embeddings=True)

    @cached_property
    def rates(self) -> Device:
        return measure_device(self.device, self.dtype)

    def policy(self) -> Policy:
        """Random weights; the embedded policy's tokenizer, of whose ids the prompts are."""
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(self.model_config, dtype=self.dtype)
        return as_policy(model, load_policy("embedded").tokenizer)

    def config(self, **settings: Any) -> GRPOConfig:
        rollouts = self.groups * self.siblings
        return GRPOConfig(
            rollout_batch_size=rollouts,
            train_batch_size=rollouts,
            group_size=self.siblings,
            max_tokens=self.response_tokens,
            min_tokens=self.response_tokens,
            engine_settings=NativeSettings(max_rows=rollouts, cuda_graphs=self.device.type == "cuda"),
            normalize_by_std=False,
            length_normalization="constant",
            learning_rate=1e-6,
            **settings,
        )

    def limit(self, microbatch_tokens: int = GRPOConfig.microbatch_tokens) -> dict[str, float]:
        """The least time of the counted work of these rollouts at the measured rates."""
        rows = self.groups * self.siblings
        with tempfile.TemporaryDirectory() as folder:
            self.model_config.save_pretrained(folder)
            shape = shape_of(folder)
        config = PlanConfig(
            rollout_batch_size=rows,
            train_batch_size=rows,
            group_size=self.siblings,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.response_tokens,
            microbatch_tokens=microbatch_tokens,
        )
        return step_seconds(shape, config, self.rates, self.dtype, places=rows)

    def report(self, part: str, what: str, **figures: float | str) -> None:
        """Print and keep one line; a CPU has no peaks to report."""
        figures = {name: value for name, value in figures.items() if isinstance(value, str) or not math.isnan(value)}
        self.rows.append({"part": part, "what": what, **figures})
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        print(f"{part:10s} {what:44s} {shown}", flush=True)

    def timed(
        self, function: Callable[[], Any], *, warm_up: Callable[[], Any] | None = None, rounds: int | None = None
    ) -> tuple[float, float]:
        """Median seconds after a warm-up, and the peak of the device's memory in MiB above what was there before."""
        (warm_up or function)()
        self._wait()
        before, seconds = self._memory(), []
        for _ in range(rounds or self.rounds):
            began = time.perf_counter()
            function()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds), (self._peak() - before) / MIB

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self) -> float:
        if self.device.type != "cuda":
            return float("nan")
        torch.cuda.reset_peak_memory_stats(self.device)
        return float(torch.cuda.memory_allocated(self.device))

    def _peak(self) -> float:
        return float(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else float("nan")


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def attempt(bench: Bench, part: str, what: str, measure: Callable[[], dict[str, float]]) -> None:
    """Report what `measure` finds, that the device's memory does not hold it, or how it failed: the next goes on."""
    try:
        figures: dict[str, Any] = measure()
    except torch.OutOfMemoryError:
        figures = {"result": "does not fit in memory"}
    except (RuntimeError, VerituneError) as error:
        figures = {"failed": " ".join(str(error).split())[:300]}
    bench.report(part, what, **figures)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def drawn_rollouts(bench: Bench, lengths: Sequence[int]) -> list[Rollout]:
    """Rollouts of random ids that nobody sampled, `siblings` to a prompt, worth 1 and -1 in turns."""
    draw, rollouts = random.Random(0), []
    for row, length in enumerate(lengths):
        if row % bench.siblings == 0:
            prompt = tuple(draw.randrange(bench.shape["vocab_size"]) for _ in range(bench.prompt_tokens))
        response = tuple(draw.randrange(bench.shape["vocab_size"]) for _ in range(length))
        completion = Completion(prompt, response, "", (0.0,) * length, "length", 0)
        rollouts.append(Rollout(Example(str(row), "", ""), completion, Score(0.0, 0.0, 0.0), 1.0 - 2 * (row % 2)))
    return rollouts


# --- Exactness -----------------------------------------------------------------------------------------------------

Pass = Callable[[GRPOConfig, Policy, list[Rollout]], tuple[Tensor, Tensor]]
"""Log-probabilities of the response tokens, and the gradient, flat."""


def measure_exactness(bench: Bench) -> None:
    """Log-probabilities and gradient in float32 and in the bench's type, ours and the plain path's, each against the
    plain path in float32: what is lost must be what the number type loses."""
    few = replace(bench, groups=3, siblings=4)
    rollouts = drawn_rollouts(few, [1, 64, 17, 33, 5, 64, 2, 48, 64, 64, 1, 9])
    config, policy = few.config(), bench.policy()
    exact = replace(policy, model=copy.deepcopy(policy.model).float())
    log_probs, gradient = plain_pass(config, exact, rollouts)
    passes = {"ours, float32": (packed_pass, exact), "plain, as trained": (plain_pass, policy)}
    for what, (run, side) in (passes | {"ours, as trained": (packed_pass, policy)}).items():

        def measure(run: Pass = run, side: Policy = side) -> dict[str, float]:
            found, slopes = run(config, side, rollouts)
            return {
                "log-probabilities' mean distance": (found - log_probs).abs().mean().item(),
                "most": (found - log_probs).abs().max().item(),
                "gradient's, relative": ((slopes - gradient).norm() / gradient.norm()).item(),
            }

        attempt(bench, "exactness", what, measure)


def flat_gradient(policy: Policy) -> Tensor:
    flat = torch.cat([parameter.grad.flatten().float().cpu() for parameter in policy.model.parameters()])
    policy.model.zero_grad(set_to_none=True)
    return flat


def packed_pass(config: GRPOConfig, policy: Policy, rollouts: list[Rollout]) -> tuple[Tensor, Tensor]:
    log_probs = torch.cat(score_rollouts(config, policy, rollouts)).cpu()
    batch_backward(config, policy, rollouts, range(len(rollouts)))
    return log_probs, flat_gradient(policy)


def plain_pass(config: GRPOConfig, policy: Policy, rollouts: list[Rollout]) -> tuple[Tensor, Tensor]:
    """Padded rows, the model's own forward pass, whole logits, autograd."""
    batch = pad_prompt_and_response(
        [rollout.completion.prompt_ids for rollout in rollouts], [rollout.completion.ids for rollout in rollouts], 0
    )
    device = next(policy.model.parameters()).device
    input_ids, labels, mask = (batch[name].to(device) for name in ("input_ids", "labels", "response_mask"))
    log_probs = get_response_log_probs(policy.model, input_ids, labels)["log_probs"]
    advantages = torch.tensor([[rollout.advantage] for rollout in rollouts], device=device)
    (-(advantages * log_probs * mask).sum() / (len(rollouts) * config.max_tokens)).backward()
    return log_probs.detach()[mask].float().cpu(), flat_gradient(policy)


# --- The head ------------------------------------------------------------------------------------------------------


def measure_head(bench: Bench, tokens: int) -> None:
    """Log-probabilities and all gradients of `tokens` response tokens, over ever larger vocabularies."""
    hidden_size = bench.shape["hidden_size"]
    largest = bench.shape["vocab_size"]
    for vocabulary in dict.fromkeys(min(size, largest) for size in (2_000, 8_000, 32_000, largest)):
        torch.manual_seed(0)
        options = {"device": bench.device, "dtype": bench.dtype}
        hidden = torch.randn(tokens, hidden_size, **options)
        head = torch.nn.Linear(hidden_size, vocabulary, bias=False, **options)
        labels = torch.randint(vocabulary, (tokens,), device=bench.device)
        for name, run, kept in heads(hidden, head, labels):

            def measure(run: Callable[[], Any] = run, head: Any = head, kept: int = kept) -> dict[str, float]:
                def once() -> None:
                    run()
                    head.weight.grad = None

                seconds, peak = bench.timed(once, rounds=max(bench.rounds, 5))
                operations = 6 * tokens * head.weight.numel()
                gradients = head.weight.numel() * kept / MIB
                return {
                    "seconds": seconds,
                    "TFLOP/s": operations / seconds / 1e12,
                    "MiB of the weight's gradient": gradients,
                    "peak MiB beyond it": peak - gradients,
                }

            attempt(bench, "head", f"V={vocabulary}, {tokens} tokens, {name}", measure)


def heads(hidden: Tensor, head: Any, labels: Tensor) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """The same gradient of the mean negative log-likelihood, by name, and the bytes that a weight's gradient takes."""
    size = head.weight.element_size()
    leaf = hidden.detach().requires_grad_()

    def ours() -> None:
        (-label_log_probs(leaf, head.weight, None, labels, 1.0).mean()).backward()
        leaf.grad = None

    def plain() -> None:
        cross_entropy((leaf @ head.weight.T).float(), labels).backward()
        leaf.grad = None

    yield "ours", ours, size if size >= 4 else size + 4  # shorter types are summed in float32
    yield "plain logits", plain, size
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return
    fused = LigerFusedLinearCrossEntropyLoss()

    def liger() -> None:
        fused(head.weight, leaf, labels).backward()
        leaf.grad = None

    yield "Liger", liger, size


# --- Rollouts, training, a whole step ------------------------------------------------------------------------------


def measure_rollouts(bench: Bench) -> None:
    policy, limit = bench.policy(), bench.limit()
    draw = random.Random(0)
    ids = range(len(policy.tokenizer))
    prompts = [draw.choices(ids, k=bench.prompt_tokens) for _ in range(bench.groups)]
    tokens = bench.groups * bench.siblings * bench.response_tokens
    counted = limit["sampling: prompts"] + limit["sampling: responses"]

    def native(capture: Any, length: int) -> None:
        engine = NativeEngine(policy, max_rows=bench.groups * bench.siblings, capture=capture)
        engine.generate(prompts, Sampling(max_tokens=length, min_tokens=length, n=bench.siblings))

    def transformers_generate(_: Any, length: int) -> None:
        """What TRL calls; prompts are of one length, so that nothing is padded."""
        rows = torch.tensor([prompt for prompt in prompts for _ in range(bench.siblings)], device=bench.device)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        policy.model.generate(rows, max_new_tokens=length, min_new_tokens=length, **options)

    sides: dict[str, tuple[Callable[[Any, int], None], Any]] = {"native": (native, None)}
    if bench.device.type == "cuda":
        sides["native, captured graphs"] = (native, capture_cuda_graph)
    sides["transformers' generate"] = (transformers_generate, None)
    for name, (run, capture) in sides.items():

        def measure(run: Callable[[Any, int], None] = run, capture: Any = capture) -> dict[str, float]:
            few = partial(run, capture, min(16, bench.response_tokens))
            seconds, peak = bench.timed(partial(run, capture, bench.response_tokens), warm_up=few)
            return {
                "seconds": seconds,
                "tokens/s": tokens / seconds,
                "times the limit": seconds / counted,
                "peak MiB": peak,
            }

        attempt(bench, "rollout", name, measure)


def measure_training(bench: Bench, budgets: Sequence[int]) -> None:
    rollouts = drawn_rollouts(bench, [bench.response_tokens] * (bench.groups * bench.siblings))
    tokens = sum(len(rollout.completion.ids) for rollout in rollouts)
    for budget in budgets:
        for checkpointing in (False, True):

            def measure(budget: int = budget, checkpointing: bool = checkpointing) -> dict[str, float]:
                policy, config = bench.policy(), bench.config(microbatch_tokens=budget)
                limit = bench.limit(budget)
                prepare_model(policy, checkpointing)
                policy.model.train()
                optimizer = optimizer_of(policy)

                def update() -> None:
                    batch_backward(config, policy, rollouts, range(len(rollouts)))
                    clip_and_step(policy.model, optimizer, learning_rate=1e-6, clip_grad_norm=1.0)

                seconds, peak = bench.timed(update)
                counted = limit["training"] + limit["AdamW"]
                return {
                    "seconds": seconds,
                    "tokens/s": tokens / seconds,
                    "times the limit": seconds / counted,
                    "peak MiB": peak,
                }

            what = f"{budget} tokens a microbatch" + (", checkpointing" if checkpointing else "")
            attempt(bench, "training", what, measure)


def optimizer_of(policy: Policy) -> torch.optim.Optimizer:
    return make_optimizer(policy.model, learning_rate=1e-6, betas=(0.9, 0.95), weight_decay=0.0)


@dataclass
class DigitsTask:
    """Prompts of random digits, paid 0 or 1 by the sum of a response's characters: nearly every group has both."""

    prompts: int
    tokens: int
    name: str = "digits"
    stop: tuple[str, ...] = ()

    def examples(self, split: str) -> Sequence[Example]:
        draw = random.Random(0)
        return [
            Example(str(row), "".join(draw.choices("0123456789", k=self.tokens)), "") for row in range(self.prompts)
        ]

    def prompt(self, example: Example) -> str:
        return example.question

    def rewards(self, pairs: Pairs) -> list[Score]:
        values = [float(sum(map(ord, response)) % 2) for response, _ in pairs]
        return [Score(value, value, value) for value in values]


def measure_step(bench: Bench, budget: int) -> None:
    """A whole step of the recipe: the canary, rollouts, grading, what is written to disk, and the update."""

    def measure() -> dict[str, float]:
        config = bench.config(microbatch_tokens=budget)
        policy, task = bench.policy(), DigitsTask(bench.groups, bench.prompt_tokens)
        limit = bench.limit(budget)
        capture = capture_cuda_graph if bench.device.type == "cuda" else None
        engine = NativeEngine(policy, max_rows=config.engine_settings.max_rows, capture=capture)
        optimizer, examples, stages = optimizer_of(policy), task.examples("train"), {}
        with tempfile.TemporaryDirectory() as folder:
            session = Session(config, policy, task, engine, RunFolder.create(Path(folder) / "run", "", {}))
            steps = iter(range(1, bench.rounds + 2))

            def step() -> None:
                row = grpo_step(session, next(steps), optimizer, examples, None)
                stages.update({name: value for name, value in row.items() if name.startswith("seconds_")})

            seconds, peak = bench.timed(step)
        return {"seconds": seconds, "times the limit": seconds / sum(limit.values()), "peak MiB": peak, **stages}

    attempt(bench, "step", f"{budget} tokens a microbatch", measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["exactness", "head", "rollout", "training", "step"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-math-1.5b")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--microbatch-tokens", type=int, nargs="+", default=[16_384, 32_768, 65_536])
    parser.add_argument("--head-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON file for every figure")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    bench = Bench(
        device,
        choose_dtype(arguments.dtype, device),
        SHAPES[arguments.shape],
        arguments.groups,
        arguments.siblings,
        arguments.prompt_tokens,
        arguments.response_tokens,
        arguments.rounds,
    )
    rates = bench.rates
    print(f"{rates.name}: {rates.bfloat16 / 1e12:.3g} TFLOP/s, {rates.copy / 1e12:.3g} TB/s copied")
    for part in arguments.parts:
        match part:
            case "exactness":
                measure_exactness(bench)
            case "head":
                measure_head(bench, arguments.head_tokens)
            case "rollout":
                measure_rollouts(bench)
            case "training":
                measure_training(bench, arguments.microbatch_tokens)
            case "step":
                measure_step(bench, arguments.microbatch_tokens[0])
        if part in PROMISED:
            print(f"{part:10s} promised of an H200: {PROMISED[part]}")
        if arguments.output:
            rates_row = {"matrix": rates.bfloat16, "copy": rates.copy}
            arguments.output.write_text(json.dumps({"device": rates.name, **rates_row, "rows": bench.rows}, indent=1))
    if any("failed" in row for row in bench.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
