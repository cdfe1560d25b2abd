"""How a training step grows with siblings, rollouts, length and vocabulary. Standard library alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

from bench import Bench, run_alone, worker
from shapes import POLICY, Shape, drawn_rollouts

SIBLINGS = (4, 8, 16, 32)
ROLLOUTS = (128, 256, 512)
LENGTHS = (64, 128, 256, 512, 1024)
VOCABULARIES = (2_000, 8_000, 32_000, 152_000)

PROMPTS = Shape("", prompts=32, siblings=4, max_tokens=0, shortest_prompt=128, longest_prompt=128)
"""Steps that are mostly prompts; what is left without them is that of the same step with prompts of 8 tokens."""
ATTENDING = 64
"""Response tokens of a group that are read, however many siblings share them out: they attend to the prompt too, and
what that costs is to be the same. A response's last token is not read."""

PEAK_PROCESSES = 3
"""Fresh processes of which the median peak counts: where the allocator puts things differs by a MiB or two."""

PROMPT_ROUNDS = 20
"""A difference of short steps: its noise falls with their number."""

HEAD = Shape("", prompts=1, siblings=2, max_tokens=512, min_tokens=512, shortest_prompt=8, longest_prompt=8)
HEAD_POLICY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
HEAD_POLICY |= {"num_key_value_heads": 8}


def measure_growth(bench: Bench) -> None:
    rounds = min(bench.rounds, 2)
    prompt_cost(bench)
    peaks(bench)
    lengths(bench, rounds)
    vocabularies(bench, rounds)


def draw(bench: Bench, shape: Shape) -> Shape:
    bench.recorded(shape).write_text(json.dumps(drawn_rollouts(shape)))
    return shape


def prompt_cost(bench: Bench) -> None:
    """The step with G siblings, with long prompts and with short ones: their difference is what prompts cost."""
    shapes = []
    for siblings in SIBLINGS:
        tokens = 1 + ATTENDING // siblings
        shape = replace(PROMPTS, siblings=siblings, max_tokens=tokens, min_tokens=tokens)
        shapes.append(draw(bench, replace(shape, name=f"G={siblings} long")))
        short = replace(shape, name=f"G={siblings} short", shortest_prompt=8, longest_prompt=8)
        shapes.append(draw(bench, short))
    with worker(bench, "T", shapes[0], bench.veritune(), written_as="growth-prompts") as ours:
        for number in range(PROMPT_ROUNDS + 1):
            for shape in shapes:
                ours.run(shape, number)


def peaks(bench: Bench) -> None:
    """Peak memory, in fresh processes: more siblings in 128 rollouts, more rollouts of 8 siblings."""
    counts = [(ROLLOUTS[0], siblings) for siblings in SIBLINGS] + [(rollouts, 8) for rollouts in ROLLOUTS[1:]]
    for rollouts, siblings in counts:
        shape = Shape(f"N={rollouts} G={siblings}", rollouts // siblings, siblings, max_tokens=64, min_tokens=64)
        draw(bench, shape)
        for number in range(PEAK_PROCESSES):
            with worker(bench, "T", shape, bench.veritune(), written_as="growth-peak") as ours:
                for step in (1, 2):  # the warm-up would score all rollouts too, to check the loss
                    ours.run(shape, 2 * number + step)


def lengths(bench: Bench, rounds: int) -> None:
    """The same number of response tokens, cut into ever longer responses."""
    shapes = [
        draw(bench, Shape(f"T={length}", 1024 // length, 8, max_tokens=length, min_tokens=length)) for length in LENGTHS
    ]
    with worker(bench, "T", shapes[0], bench.veritune(), written_as="growth-length") as ours:
        for number in range(rounds + 1):
            for shape in shapes:
                ours.run(shape, number)


def vocabularies(bench: Bench, rounds: int) -> None:
    """The head, by the recipe and through whole logits, each in a fresh process for its peak memory."""
    for vocabulary in VOCABULARIES:
        shape = draw(bench, replace(HEAD, name=f"V={vocabulary}"))
        policy = bench.output / f"policy-{vocabulary}"
        if not policy.exists():
            run_alone(bench, "policy.py", str(policy), json.dumps(POLICY | HEAD_POLICY | {"vocab_size": vocabulary}))
        sides = [bench.veritune(), bench.veritune("plain logits", plain=True)]
        sides[0] = replace(sides[0], request={"plain": False})
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(bench, "head", shape, side, policy=policy)) for side in sides]
            for number in range(rounds + 1):
                for each in workers:
                    each.run(shape, number)
