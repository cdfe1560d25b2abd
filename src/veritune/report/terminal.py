"""What a person sees in the terminal: a live panel or plain lines while a run goes on, and its outcome at the end."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from veritune.core.config import CommonConfig
from veritune.core.run_folder import RunFolder
from veritune.core.statistics import Estimate
from veritune.report import collect
from veritune.report.collect import Response, Run, Setting, collect_run, estimate, number, read_batch, visible
from veritune.report.examples import Pair, choose_pairs, pair_up
from veritune.report.tables import result_table

Row = Mapping[str, Any]
Listener = Callable[[Row], None]

SIDE_BY_SIDE_COLUMNS = 110
"""From this terminal width on, the sampled answer stands beside the numbers instead of under them."""
NARROW_SAMPLE_LINES = 6
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 24
PACE_STEPS = 20
"""The time left is reckoned from the pace of this many last steps."""
FEW_METRICS = 4
"""A row with fewer of the metrics that are known here is told by all numbers that it has."""
MOST_OTHERS = 4
LONGEST_EXAMPLE = 400
"""Characters of a response that the outcome shows; of a longer one its end, where the answer stands."""

PLAIN_METRICS = {
    "reward": ("reward", "5.3f"),
    "format_reward": ("format", "5.3f"),
    "accuracy": ("answer", "5.3f"),
    "entropy": ("entropy", "5.3f"),
    "length": ("length", "6.1f"),
    "truncated": ("cut", "6.1%"),
    "grad_norm": ("grad", "7.3g"),
    "rollout_tokens_per_second": ("tok/s", "6.0f"),
}
"""The metrics of a plain line: each with its name there and its format."""
PANEL_METRICS = {
    "reward": {"reward": "{:.3f}", "format_reward": "format {:.3f}", "accuracy": "answer {:.3f}"},
    "entropy": {"entropy": "{:.3f} nats per token"},
    "length": {"length": "{:.0f} tokens", "length_correct": "right {:.0f}", "length_incorrect": "wrong {:.0f}"},
    "cut off": {"truncated": "{:.1%}"},
    "gradient": {"grad_norm": "{:.3g}"},
    "tokens/s": {"rollout_tokens_per_second": "sampling {:.0f}", "train_tokens_per_second": "training {:.0f}"},
}
"""The lines of the panel: each with the metrics that it has and how it writes them."""


@contextlib.contextmanager
def live_display(run: RunFolder, config: CommonConfig) -> Iterator[Listener]:
    """Yield a listener for metric rows that shows them: a live panel in a terminal, else plain lines."""
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        yield plain_listener(run, config)
        return
    with panel_display(run, config, console) as listen:
        yield listen


# --- Plain lines -------------------------------------------------------------------------------------------------


def plain_listener(run: RunFolder, config: CommonConfig) -> Listener:
    """A listener that prints one line for each step and one for each validation."""
    rows: list[Row] = [*run.metrics()]

    def listen(row: Row) -> None:
        rows.append(row)
        for line in plain_lines(rows, planned_steps(rows, config)):
            print(line, flush=True)

    return listen


def plain_lines(rows: Sequence[Row], total: int | None) -> list[str]:
    """The lines of the last row: its step, if it has training metrics, and its validation, if it has one."""
    row = rows[-1]
    step = f"step {row['step']:{len(str(total or 0))}d}" + (f"/{total}" if total else "")
    validation = {name.removeprefix("validation_"): row[name] for name in row if name.startswith("validation_")}
    training = {name: row[name] for name in row if not name.startswith("validation_")}
    lines = []
    if told := plain_metrics(training, with_gaps=True):
        paces = [f"left {clock(seconds_left(rows, total))}"] if total else []
        lines.append("  ".join([step, *told, *paces]))
    if validation:
        accuracy = estimate(validation, "accuracy")
        interval = f" [{accuracy.low:.3f}, {accuracy.high:.3f}]" if accuracy and accuracy.low is not None else ""
        solved = [f"accuracy {accuracy.value:.3f}{interval}"] if accuracy else []
        rest = {name: value for name, value in validation.items() if not name.startswith("accuracy")}
        lines.append("  ".join([step, "validation", *solved, *plain_metrics(rest, with_gaps=False)]))
    return lines


def plain_metrics(row: Row, *, with_gaps: bool) -> list[str]:
    """ "name value" of the metrics that are known here; `with_gaps`, one that is None leaves a dash of its width."""
    told = []
    for metric in [metric for metric in PLAIN_METRICS if metric in row]:
        (label, form), value = PLAIN_METRICS[metric], number(row, metric)
        if value is not None:
            told.append(f"{label} {value:{form}}")
        elif with_gaps:
            told.append(f"{label} {'-'.rjust(len(f'{0:{form}}'))}")
    if len(told) < FEW_METRICS:
        others = [f"{name} {value:.4g}" for name, value in other_numbers(row) if name not in PLAIN_METRICS]
        told += others[:MOST_OTHERS]
    return told


def other_numbers(row: Row) -> list[tuple[str, float]]:
    """The numbers of a row apart from its steps, its times, its intervals and its validation."""
    skipped = ("seconds_", "validation_")
    return [
        (name, value)
        for name in row
        if name not in ("step", "steps") and not name.startswith(skipped) and not name.endswith(("_low", "_high"))
        if (value := number(row, name)) is not None
    ]


# --- Time --------------------------------------------------------------------------------------------------------


def planned_steps(rows: Sequence[Row], config: CommonConfig) -> int | None:
    """How many steps a run is to take: its rows say it, else perhaps its config."""
    return collect.planned_steps(rows, getattr(config, "steps", None))


def seconds_left(rows: Sequence[Row], total: int | None) -> float | None:
    """Seconds to the end at the pace of the last steps; None before the first step."""
    timed = [(row["step"], seconds) for row in rows if (seconds := number(row, "seconds_elapsed")) is not None]
    if total is None or len(timed) < 2:
        return None
    (first, began), (last, ended) = timed[-PACE_STEPS - 1 :][0], timed[-1]
    return None if last <= first else (ended - began) / (last - first) * max(total - last, 0)


def clock(seconds: float | None) -> str:
    """A time as 0:07, 12:34 or 1:02:03."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --- The live panel ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """What the panel shows."""

    title: str
    rows: tuple[Row, ...]
    total: int | None
    sample: Response | None
    """The last answer that was sampled."""
    waited: float
    """Seconds since the last row."""


@contextlib.contextmanager
def panel_display(run: RunFolder, config: CommonConfig, console: Console) -> Iterator[Listener]:
    """A panel that is redrawn with every row, and once a second for its clock."""
    rows: list[Row] = [*run.metrics()]
    state: dict[str, Any] = {"sample": last_sample(run, rows[-1]["step"]) if rows else None, "told": time.monotonic()}
    recipe = type(config).__name__.removesuffix("Config")

    def draw() -> RenderableType:
        waited = time.monotonic() - state["told"]
        title = f"{recipe} · {config.task} · {config.policy}"
        return panel(View(title, tuple(rows), planned_steps(rows, config), state["sample"], waited), console.width)

    with Live(get_renderable=draw, console=console, refresh_per_second=1) as live:

        def listen(row: Row) -> None:
            rows.append(row)
            state["sample"] = last_sample(run, row["step"]) or state["sample"]
            state["told"] = time.monotonic()
            live.refresh()

        yield listen


def last_sample(run: RunFolder, step: int) -> Response | None:
    """The last response of a step's rollouts, or of its validation where it has none."""
    for kind in ("rollouts", "validation"):
        batch = read_batch(run, kind, step, faults=[])
        if batch and batch.responses:
            return batch.responses[-1]
    return None


def panel(view: View, width: int) -> RenderableType:
    """The panel for a terminal of `width` columns."""
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="dim", no_wrap=True)
    numbers.add_column()
    for label, value in number_lines(view.rows):
        numbers.add_row(label, value)
    inner = width - 4
    body: RenderableType = Group(numbers, Rule(style="dim"), sample_block(view.sample, inner, NARROW_SAMPLE_LINES))
    if width >= SIDE_BY_SIDE_COLUMNS:
        half = inner // 2
        body = Table.grid(padding=(0, 2), expand=True)
        body.add_column(width=half - 2)
        body.add_column(width=inner - half)
        lines = max(numbers.row_count - 2, NARROW_SAMPLE_LINES)
        body.add_row(numbers, sample_block(view.sample, inner - half, lines))
    whole = Group(progress_line(view, inner), Text(), body)
    return Panel(whole, title=Text(view.title, style="bold"), title_align="left", border_style="dim", width=width)


def progress_line(view: View, width: int) -> RenderableType:
    """Step of total, a bar, time so far and time left."""
    last: Row = view.rows[-1] if view.rows else {"step": 0}
    step, elapsed = last["step"], number(last, "seconds_elapsed") or 0.0
    left = seconds_left(view.rows, view.total)
    if not view.rows:
        told = "validating before the first step"
    elif view.total and step >= view.total:
        told = f"done in {clock(elapsed)}"
    else:
        told = f"{clock(elapsed + view.waited)}, {clock(None if left is None else max(left - view.waited, 0.0))} left"
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    count = Text(f"step {step}" + (f" of {view.total}" if view.total else ""), style="bold")
    bar = ProgressBar(total=view.total or 1, completed=step if view.total else 0, complete_style="cyan")
    line.add_row(count, bar, Text(told, style="dim"))
    return line


def number_lines(rows: Sequence[Row]) -> list[tuple[str, Text]]:
    """Label and text of each line of the panel, from the last row that has training metrics."""
    row = next((row for row in reversed(rows) if number(row, "seconds_train") or other_numbers(row)), {})
    lines = []
    if measured := [(row["step"], each) for row in rows if (each := estimate(row, "validation_accuracy"))]:
        lines.append(("held-out", held_out_text(measured)))
    if course := [value for row in rows if (value := number(row, "accuracy")) is not None]:
        now = Text(f"{course[-1]:.1%}", style="bold").append("  " + sparkline(course), style="not bold cyan")
        lines.append(("training", now))
    for label, metrics in PANEL_METRICS.items():
        found = [(form, number(row, metric)) for metric, form in metrics.items()]
        if parts := [form.format(value) for form, value in found if value is not None]:
            lines.append((label, Text("   ".join(parts))))
    known = {metric for metrics in PANEL_METRICS.values() for metric in metrics}
    if others := [f"{name} {value:.3g}" for name, value in other_numbers(row) if name not in known]:
        # Beside the known numbers the others get one line, so that the panel's height does not jump with their width.
        also = Text("   ".join(others), style="dim", no_wrap=len(lines) >= FEW_METRICS, overflow="ellipsis")
        lines.append(("also", also))
    return lines


def held_out_text(measured: Sequence[tuple[int, Estimate]]) -> Text:
    """The last held-out accuracy with its interval, and the first."""
    step, last = measured[-1]
    text = Text(f"{last.value:.1%}", style="bold green")
    if last.low is not None and last.high is not None:
        text.append(f" [{100 * last.low:.1f}, {100 * last.high:.1f}]", style="not bold")
    text.append(f" at step {step}", style="not bold dim")
    if len(measured) > 1:
        text.append(f", {measured[0][1].value:.1%} before", style="not bold dim")
    return text


def sparkline(values: Sequence[float]) -> str:
    """The course of values between their lowest and their highest, as at most SPARK_COLUMNS characters."""
    count = min(len(values), SPARK_COLUMNS)
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1)) if span else 0] for mean in means)


def sample_block(sample: Response | None, width: int, lines: int) -> RenderableType:
    """The last sampled answer in exactly `lines` + 2 lines: of a longer one its end, where the answer stands."""
    if sample is None:
        return Text("no answer sampled yet" + "\n" * (lines + 1), style="dim")
    verdict = ("right", "bold green") if sample.correct else ("wrong", "bold red")
    head = Text.assemble(("last answer: ", "dim"), verdict, (f", reward {sample.reward:g}", "dim"))
    question = Text(" ".join(visible(sample.question).split()), style="italic", no_wrap=True, overflow="ellipsis")
    question.truncate(width, overflow="ellipsis")
    wrapped = Text(visible(sample.text).strip()).wrap(Console(width=width), width)
    kept = list(wrapped)[-lines:]
    return Group(head, question, *kept, *[Text()] * (lines - len(kept)))


# --- The outcome -------------------------------------------------------------------------------------------------


def print_outcome(path: Path) -> None:
    """Print what a run came to: held-out numbers before and after, examples, where things lie, how to go on."""
    run = collect_run(path)
    console = Console(highlight=False)
    console.print()
    results = result_table(Setting("", {}, (run,)))
    if results.rows:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for index, name in enumerate(results.header[:3]):
            table.add_column(Text(name), no_wrap=index > 0)
        for index, cells in enumerate(results.rows):
            table.add_row(*map(Text, cells[:3]), style="bold" if index == 0 else None)
        console.print(table)
        console.print()
    for pair in choose_pairs(pair_up(run), 3):
        print_pair(console, pair)
    for line in whereabouts(run) + ways_on(run):
        # Paths and commands stay on one line each, however narrow the terminal, so that they can be copied.
        console.print(Text(visible(line)), soft_wrap=True)


def print_pair(console: Console, pair: Pair) -> None:
    """A held-out problem with its responses before and after."""
    console.print(Text(visible(pair.before.question).strip(), style="italic"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, response in (("before", pair.before), ("after", pair.after)):
        verdict = ("right", "green") if response.correct else ("wrong", "red")
        grid.add_row(Text.assemble((f"{name} ", "dim"), verdict), Text(ending(response.text)))
    console.print(grid)
    console.print()


def ending(text: str) -> str:
    """A response's end, where its answer stands."""
    text = visible(text).strip()
    return text if len(text) <= LONGEST_EXAMPLE else "… " + text[-LONGEST_EXAMPLE:]


def whereabouts(run: Run) -> list[str]:
    """Where the report, the figures and the last checkpoint lie, as far as they are there."""
    page, figures = run.path / "report.html", run.path / "figures"
    places = (("report", page), ("figures", figures), ("checkpoint", last_checkpoint(run)))
    return [f"{name:10}  {place}" for name, place in places if place is not None and place.exists()]


def last_checkpoint(run: Run) -> Path | None:
    """The newest checkpoint's folder."""
    steps = RunFolder.open(run.path).checkpoint_steps()
    return run.path / "checkpoints" / f"step-{steps[-1]:06d}" if steps else None


def ways_on(run: Run) -> list[str]:
    """Commands that continue from here."""
    path, checkpoint = shlex.quote(str(run.path)), last_checkpoint(run)
    ways = []
    if run.planned_steps is not None and run.last_step < run.planned_steps:
        ways.append((f"veritune resume {path}", "finish this run"))
    ways.append((f"veritune report {path} OTHER_RUN", "compare with another run"))
    if checkpoint and "recipe" in run.environment:
        ways.append((f"veritune {run.recipe} --policy {shlex.quote(str(checkpoint))}", "train on from here"))
    return ["", *(f"{command}   # {purpose}" for command, purpose in ways)]
