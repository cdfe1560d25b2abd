"""Draw the path of the data, docs/figures/path.svg: python docs/figures/path.py"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT, GAP, TOP, BELOW = 146, 56, 78, 16, 150
STAGES = (
    # record, what it holds, the call that leads to it, the room of the call
    ("Example", "question, ground truth", "", ""),
    ("prompt ids", "P prompts", "prompt", "tasks"),
    ("Completion", "P × G sampled ids", "generate", "engines"),
    ("Score", "reward and its rule", "rewards", "grading"),
    ("Rollout", "with its advantage", "compare", "losses"),
    ("Microbatch", "packed, no padding", "pack", "trainer"),
    ("log-probabilities", "(R,) response tokens", "model", "model"),
    ("loss", "one number", "loss", "losses"),
    ("gradient", "clipped", "backward", "torch"),
    ("policy", "new weights", "step", "trainer"),
)
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .small { font-size: 11.5px; fill: #59636e }
  .call { font: 12.5px ui-monospace, monospace; fill: #0969da }
  rect { fill: #f6f8fa; stroke: #d1d9e0 }
  path { stroke: #59636e; fill: none; stroke-width: 1.5; marker-end: url(#head) }
  #head path { fill: #59636e; stroke: none; marker-end: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } .call { fill: #4493f8 }
    rect { fill: #151b23; stroke: #3d444d } path { stroke: #9198a1 } #head path { fill: #9198a1 }
  }"""


def place(number: int) -> tuple[int, int]:
    """The left upper corner of a stage: five from left to right, and five back below them."""
    column = number if number < 5 else 9 - number
    return 20 + column * (WIDTH + GAP), TOP if number < 5 else TOP + BELOW


def stage(number: int) -> str:
    (x, y), (record, holds, _, _) = place(number), STAGES[number]
    middle = x + WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
        f'<text x="{middle}" y="{y + 24}">{record}</text>'
        f'<text class="small" x="{middle}" y="{y + 43}">{holds}</text>'
    )


def arrow(number: int) -> str:
    """The call that leads to a stage from the one before it."""
    (x, y), (next_x, next_y) = place(number - 1), place(number)
    _, _, call, room = STAGES[number]
    if y != next_y:  # from the upper row to the lower one
        middle, half = x + WIDTH // 2, (y + HEIGHT + next_y) // 2
        line = f'<path d="M{middle} {y + HEIGHT} V{next_y - 8}"/>'
        return line + labels(middle + 34, half - 2, call, room)
    start, end = (x + WIDTH, next_x - 8) if next_x > x else (x, next_x + WIDTH + 8)
    return f'<path d="M{start} {y + HEIGHT // 2} H{end}"/>' + labels(
        (start + end) // 2, y + HEIGHT // 2 - 9, call, room
    )


def labels(x: int, y: int, call: str, room: str) -> str:
    return f'<text class="call" x="{x}" y="{y}">{call}</text><text class="small" x="{x}" y="{y + 26}">{room}</text>'


def back_to_the_engine() -> str:
    """From the policy, last of the lower row, to the arrow that samples, above."""
    x, y = place(9)
    target, _ = place(2)
    start, end, half = x + WIDTH // 2, target - GAP // 2 - 4, TOP + HEIGHT + 46
    line = f'<path d="M{start} {y} V{half} H{end} V{TOP + HEIGHT + 6}"/>'
    return line + f'<text class="call" x="{(start + end) // 2}" y="{half - 8}">load_weights, then a weight check</text>'


def picture() -> str:
    width, height = 20 + 5 * WIDTH + 4 * GAP + 20, TOP + BELOW + HEIGHT + 16
    parts = [*map(stage, range(len(STAGES))), *map(arrow, range(1, len(STAGES))), back_to_the_engine()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        "<title>The path of the data through a GRPO step</title>\n"
        f"<style>{STYLE}\n</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 Z"/></marker></defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
