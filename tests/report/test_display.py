from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import run as run_process
from typing import Any

import pytest
from rich.console import Console

from veritune.core.config import CommonConfig
from veritune.core.run_folder import RunFolder
from veritune.report import terminal as display

EVIL = "[bold]b[/bold] [/] [link=x] \x1b[31mred\x1b[0m \x1b]0;title\x07"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class PlannedConfig(CommonConfig):
    steps: int = 100


def response(id: str, text: str, reward: float) -> dict[str, Any]:
    return {
        "id": id,
        "question": f"Use [red]{id}[/red].",
        "ground_truth": "x",
        "response": text,
        "finish_reason": "stop",
        "score": {"reward": reward, "format_reward": 1.0, "answer_reward": float(reward == 1)},
        "response_ids": [1, 2],
    }


def held_out(value: float, low: float, high: float) -> dict[str, float]:
    return {"validation_accuracy": value, "validation_accuracy_low": low, "validation_accuracy_high": high}


def trained(step: int, **more: Any) -> dict[str, Any]:
    row = {"reward": 0.64, "format_reward": 0.99, "accuracy": 0.6, "entropy": 0.312, "length": 62.5, "truncated": 0.031}
    speed = {"grad_norm": 0.24, "rollout_tokens_per_second": 1598.4, "seconds_train": 5.0}
    return {"step": step, **row, **speed, "seconds_elapsed": 10.0 + 5.0 * step, **more}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", 'task = "countdown"\nseed = 0\nsteps = 100\n', {"recipe": "grpo"})
    yield folder
    folder.unlock()


# --- Plain lines -------------------------------------------------------------------------------------------------


def test_a_step_is_one_aligned_line() -> None:
    rows = [{"step": 0, "seconds_elapsed": 10.0}, trained(1)]
    (line,) = display.plain_lines(rows, 100)
    # One step took 5 seconds, and 99 are to come: 495 seconds.
    assert line == (
        "step   1/100  reward 0.640  format 0.990  answer 0.600  entropy 0.312  length   62.5  cut   3.1%"
        "  grad    0.24  tok/s   1598  left 8:15"
    )
    later = display.plain_lines([*rows, trained(99, reward=1.0, length=7.0, entropy=None, grad_norm=12.5)], 100)[0]
    assert "entropy     -  length" in later
    assert [match.start() for match in re.finditer("reward|length|tok/s|left", later)] == [
        match.start() for match in re.finditer("reward|length|tok/s|left", line)
    ]


def test_a_validation_has_a_line_of_its_own() -> None:
    row = {"step": 0, **held_out(0.186, 0.155, 0.222), "validation_length": 44.5, "validation_length_correct": None}
    assert display.plain_lines([row], 80) == [
        "step  0/80  validation  accuracy 0.186 [0.155, 0.222]  length   44.5",
    ]
    both = display.plain_lines([trained(10) | held_out(0.5, 0.4, 0.6)], 80)
    assert [line.split("  ")[:2] for line in both] == [["step 10/80", "reward 0.640"], ["step 10/80", "validation"]]


def test_another_recipe_is_told_by_the_numbers_it_has() -> None:
    row = {"step": 3, "loss": 1.25, "pairs": 32, "margin": float("nan"), "seconds_train": 2.0}
    assert display.plain_lines([row], None) == ["step 3  loss 1.25  pairs 32"]
    assert display.plain_lines([{"step": 0}], None) == []


def test_without_a_terminal_every_row_is_printed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with display.live_display(run, PlannedConfig()) as listen:
        listen({"step": 0, **held_out(0.2, 0.1, 0.3), "seconds_elapsed": 4.0})
        listen(trained(1))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step   0/100  validation") and lines[1].startswith("step   1/100  ")


# --- Time --------------------------------------------------------------------------------------------------------


def test_planned_steps_come_from_the_rows() -> None:
    assert display.planned_steps([{"step": 0, "steps": 7}], PlannedConfig()) == 7
    assert display.planned_steps([], PlannedConfig(steps=30)) == 30
    assert display.planned_steps([], CommonConfig()) is None


def test_seconds_left_go_by_the_last_steps() -> None:
    slow_start = [{"step": step, "seconds_elapsed": 1000.0 + 2.0 * step} for step in range(31)]
    slow_start[0]["seconds_elapsed"] = 0.0
    assert display.seconds_left(slow_start, 80) == pytest.approx(100.0)
    assert display.seconds_left(slow_start[:1], 80) is None
    assert display.seconds_left(slow_start, None) is None
    assert display.seconds_left([{"step": 1, "seconds_elapsed": 1.0}, {"step": 1, "seconds_elapsed": 2.0}], 80) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (59.7, "1:00")]
)
def test_clock(seconds: float | None, text: str) -> None:
    assert display.clock(seconds) == text


# --- The live panel ----------------------------------------------------------------------------------------------


def drawn(view: display.View, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(display.panel(view, width))
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined]


def view_of(rows: list[dict[str, Any]], run: RunFolder | None = None, waited: float = 0.0) -> display.View:
    sample = display.last_sample(run, rows[-1]["step"]) if run else None
    return display.View("GRPO · [b]countdown", tuple(rows), 100, sample, waited)


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_the_panel_fills_its_width_and_keeps_its_height(run: RunFolder, width: int) -> None:
    run.write_rows("rollouts", 2, [response("1", "line\n" * 30 + "the end", 1.0)])
    run.write_rows("rollouts", 1, [response("1", "short", 0.1)])
    start = {"step": 0, **held_out(0.186, 0.155, 0.222), "seconds_elapsed": 10.0}
    first = drawn(view_of([start, trained(1, loss=0.5)], run), width)
    second = drawn(view_of([start, trained(1), trained(2, loss=0.123456, other=1e-9)], run), width)
    assert {len(line) for line in [*first, *second]} == {width}
    assert len(first) == len(second) <= 24
    assert any("the end" in line for line in second)
    assert "GRPO · [b]countdown" in second[0]


def test_the_panel_shows_every_number(run: RunFolder) -> None:
    rows = [
        {"step": 0, **held_out(0.186, 0.155, 0.222), "seconds_elapsed": 10.0},
        trained(1, accuracy=0.2),
        trained(2, length_correct=50.0, train_tokens_per_second=465.4) | held_out(0.613, 0.57, 0.655),
        trained(3, length_correct=50.0, train_tokens_per_second=465.4),
    ]
    text = "\n".join(drawn(view_of(rows, waited=2.0), 60))
    for wanted in (
        "step 3 of 100",
        "0:27, 8:03 left",  # 25 seconds and 2 more; 97 steps of 5 seconds less 2
        "61.3% [57.0, 65.5] at step 2, 18.6% before",
        "60.0%  ▁██",
        "0.640   format 0.990   answer 0.600",
        "0.312 nats per token",
        "62 tokens   right 50",
        "3.1%",
        "0.24",
        "sampling 1598   training 465",
    ):
        assert wanted in text, wanted


def test_the_panel_before_the_first_row_and_of_another_recipe() -> None:
    assert any("validating before the first step" in line for line in drawn(view_of([]), 60))
    text = "\n".join(drawn(view_of([{"step": 4, "loss": 1.25, "pairs": 32, "seconds_elapsed": 1.0}]), 60))
    assert "loss 1.25   pairs 32" in text


def test_sparkline() -> None:
    assert display.sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert display.sparkline([0.3, 0.3]) == "▁▁"
    assert display.sparkline([float(i // 2) for i in range(48)]) == display.sparkline([float(i) for i in range(24)])


def test_model_text_neither_marks_up_nor_steers_the_terminal(run: RunFolder) -> None:
    run.write_rows("rollouts", 1, [response("1", "no", 0.1), response("2", EVIL, 1.0)])
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system="standard")
    with display.panel_display(run, PlannedConfig(), console) as listen:
        listen(trained(1))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    text = ESCAPES.sub("", written)
    assert "[bold]b[/bold] [/] [link=x] \ufffd[31mred\ufffd[0m" in text
    assert "Use [red]2[/red]." in text
    assert "\x1b]0;" not in written and "\x07" not in written


def test_the_panel_survives_missing_and_torn_rollouts(run: RunFolder) -> None:
    assert display.last_sample(run, 1) is None
    run.write_rows("validation", 1, [response("1", "held-out", 1.0)])
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step-000001.jsonl").write_text('{"id": "')
    sample = display.last_sample(run, 1)
    assert sample is not None and sample.text == "held-out"


# --- The outcome -------------------------------------------------------------------------------------------------


def finish(run: RunFolder, text: str = "after text") -> None:
    run.append_metrics({"step": 0, **held_out(0.186, 0.155, 0.222)})
    run.append_metrics({"step": 100, **held_out(0.613, 0.57, 0.655)})
    run.write_rows("validation", 0, [response("1", "before text", 0.1)])
    run.write_rows("validation", 100, [response("1", text, 1.0)])
    (run.path / "report.html").write_text("")
    (run.path / "figures").mkdir()
    (run.path / "checkpoints" / "step-000100").mkdir(parents=True)


def test_outcome(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    finish(run)
    display.print_outcome(run.path)
    out = capsys.readouterr().out
    assert re.search(r"Problems solved +18\.6% \[15\.5, 22\.2\] +61\.3% \[57\.0, 65\.5\]", out)
    assert re.search(r"before wrong +before text", out) and re.search(r"after right +after text", out)
    lines = out.splitlines()
    assert f"report      {run.path}/report.html" in lines
    assert f"figures     {run.path}/figures" in lines
    assert f"checkpoint  {run.path}/checkpoints/step-000100" in lines
    assert f"veritune grpo --policy {run.path}/checkpoints/step-000100   # train on from here" in lines
    assert not any("resume" in line for line in lines)


def test_outcome_of_an_unfinished_run_and_of_strange_text(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    finish(run, EVIL + "x" * 1000)
    run.forget_after(0)
    display.print_outcome(run.path)
    out = capsys.readouterr().out
    assert f"veritune resume {run.path}   # finish this run" in out
    run.append_metrics({"step": 100, **held_out(0.613, 0.57, 0.655)})
    run.write_rows("validation", 100, [response("1", EVIL, 1.0)])
    display.print_outcome(run.path)
    out = capsys.readouterr().out
    assert "[bold]b[/bold] [/] [link=x] \ufffd[31mred\ufffd[0m" in out
    assert "\x1b" not in out


def test_outcome_of_a_run_without_a_row(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    display.print_outcome(run.path)
    assert "veritune resume" in capsys.readouterr().out


def test_a_long_response_shows_its_end() -> None:
    assert display.ending("a" * 500 + "</answer>") == "… " + "a" * 391 + "</answer>"


def test_the_display_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, veritune.report.terminal; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    result = run_process(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert result.stdout.strip() == "[]"
