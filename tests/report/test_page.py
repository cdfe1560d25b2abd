from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from veritune.core.errors import CheckpointError, ConfigError
from veritune.report import write_report
from veritune.report.collect import Batch, collect_run, visible
from veritune.report.examples import choose_pairs, choose_siblings, outcome_counts, pair_up

Make = Callable[..., Path]
Response = Callable[..., dict[str, Any]]
EVIL = "<script>alert('x')</script> {{ 7 * 7 }} [bold]b[/bold] \x1b[31m & \u202e"


class Elements(HTMLParser):
    """Every element and all text of a page; a tag that is closed out of order is an error."""

    VOID = ("meta", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def a_run(make_run: Make, response: Response, name: str = "run", text: str = "1+2", **settings: Any) -> Path:
    rows = [
        {"step": 0, "validation_accuracy": 0.5, "validation_accuracy_low": 0.1, "validation_accuracy_high": 0.9},
        {"step": 1, "reward": 0.5, "seconds_elapsed": 5.0},
        {"step": 2, "reward": 0.6, "seconds_elapsed": 9.0, "validation_accuracy": 1.0,
         "validation_accuracy_low": 0.3, "validation_accuracy_high": 1.0},
    ]  # fmt: skip
    before = [response("1", text, 0.1), response("2", "first", 1.0)]
    after = [response("1", "better", 1.0), response("2", "second", 1.0)]
    rollouts = {
        step: [response("9", f"best {step}", 1.0, advantage=0.7), response("9", text, 0.1, advantage=-0.7)]
        for step in (1, 2)
    }
    return make_run(name, rows, validation={0: before, 2: after}, rollouts=rollouts, **settings)


def test_the_page_needs_nothing_else_and_shows_the_numbers(make_run: Make, response: Response) -> None:
    path = a_run(make_run, response)
    page = write_report([path], path)
    assert page == path / "report.html"
    elements = Elements(page.read_text(encoding="utf-8"))
    addresses = [value for _, attrs in elements.tags for key, value in attrs.items() if key in ("src", "href")]
    figures = sorted((path / "figures").glob("*.png"))
    assert len(addresses) == len(figures) == 3  # accuracy and reward against steps, reward against time
    assert all(address is not None and address.startswith("data:image/png;base64,") for address in addresses)
    assert not re.search(r"url\(|@import|https?://", page.read_text(encoding="utf-8"))
    for wanted in (
        "grpo on countdown",
        "50.0%",
        "100.0%",
        "[30.0, 100.0]",
        "better",
        "best 1",
        "max_tokens",
    ):
        assert wanted in elements.text
    assert not (path / ".report.html.partial").exists()


def test_model_text_is_escaped(make_run: Make, response: Response) -> None:
    path = a_run(make_run, response, text=EVIL, policy="<img src=x>")
    page = write_report([path], path).read_text(encoding="utf-8")
    elements = Elements(page)
    assert not [tag for tag, _ in elements.tags if tag == "script"]
    assert all(attrs.get("src") != "x" for _, attrs in elements.tags)
    # One held-out response and the worst rollout of each of two steps.
    shown = "<script>alert('x')</script> {{ 7 * 7 }} [bold]b[/bold] \ufffd[31m & \ufffd"
    assert elements.text.count(shown) == 3
    assert "\x1b" not in page


def test_nothing_that_steers_reaches_the_page_or_ends_it(make_run: Make, response: Response) -> None:
    evil = "\x1b[2J\x07\ud83d\u202e$\\frac$"
    batch = [response(f"id {evil}", evil, 1.0, question=evil, ground_truth=evil)]
    environment = {"recipe": "grpo", "arguments": [evil], evil: evil, "versions": {evil: evil}}
    rows = [{"step": step, "validation_accuracy": 0.5, "reward": 0.5} for step in (0, 1)]
    paths = [
        make_run(
            f"{name}\x1b\udcff", rows, validation={0: batch}, rollouts={1: batch}, environment=environment, data=name
        )
        for name in ("a\\u001b$\\\\frac$", "b")
    ]
    for chosen in (paths, paths[:1]):
        page = write_report(chosen, paths[0].parent / "out").read_bytes().decode("utf-8")
        assert not set(page) & {"\x1b", "\x07", "\u202e"}
        assert "problem id \ufffd[2J\ufffd\ufffd\ufffd$\\frac$" in page and "\ufffd\ufffd" in page


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0}], [{"step": 0, "validation_accuracy": float("nan")}], [{"step": 3, "loss": None}]]
)
def test_a_run_that_has_hardly_begun_is_reported(make_run: Make, rows: list[dict[str, Any]]) -> None:
    path = make_run("a", rows)
    elements = Elements(write_report([path], path / "out").read_text(encoding="utf-8"))
    assert "No validation has been recorded yet." in elements.text
    assert list((path / "out" / "figures").iterdir()) == []


def test_a_killed_run_is_reported(make_run: Make, response: Response) -> None:
    path = a_run(make_run, response, steps=9)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 0.')
    (path / "validation" / "step-000002.jsonl").write_text('{"id"')
    text = Elements(write_report([path], path).read_text(encoding="utf-8")).text
    assert "The run stands at step 2 of 9" in text
    assert "validation/step-000002.jsonl could not be read" in text
    assert "Held-out problems at step 0" in text


def test_several_settings_and_seeds(make_run: Make, response: Response) -> None:
    paths = [
        a_run(make_run, response, f"{rate}-{seed}", seed=seed, learning_rate=rate)
        for rate in (0.1, 0.2)
        for seed in (0, 1)
    ]
    out = paths[0].parent / "both"
    text = Elements(write_report(paths, out).read_text(encoding="utf-8")).text
    assert "4 runs, 2 settings" in text
    assert "What differs between the settings" in text
    assert "at the end: learning_rate 0.1 (100%); its interval overlaps with that of learning_rate 0.2." in text
    assert {path.name for path in (out / "figures").iterdir()} == {
        "outcomes.png", "accuracy_steps.png", "reward_total_steps.png", "reward_total_time.png",
    }  # fmt: skip


def test_no_runs_and_no_place_are_refused(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run folder"):
        write_report([], tmp_path)
    path = make_run("a", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the report into"):
        write_report([path], tmp_path / "file")


def test_pairs_are_the_same_problems(make_run: Make, response: Response) -> None:
    before = [response("a", "1", 0.1), response("b", "2", 1.0), response("c", "3", 0.1), response("gone", "4", 1.0)]
    after = [response("c", "30", 0.1), response("b", "20", 0.0), response("a", "10", 1.0), response("new", "40", 1.0)]
    pairs = pair_up(collect_run(make_run("a", [], validation={0: before, 5: after})))
    assert [(pair.before.text, pair.after.text) for pair in pairs] == [("1", "10"), ("2", "20"), ("3", "30")]
    assert outcome_counts(pairs) == {(False, True): 1, (True, False): 1, (False, False): 1, (True, True): 0}
    # In turn: learned (a), not learned (c), kept (none), unlearned (b).
    assert [pair.before.id for pair in choose_pairs(pairs, 5)] == ["a", "c", "b"]
    assert [pair.before.id for pair in choose_pairs(pairs, 2)] == ["a", "c"]


def test_siblings_are_the_best_and_worst_of_an_unequal_group(make_run: Make, response: Response) -> None:
    even = [response("a", "e1", 0.1), response("a", "e2", 0.1)]
    uneven = [response("b", "u1", 0.1), response("b", "u2", 1.0), response("b", "u3", 0.0)]
    run = collect_run(make_run("a", [], rollouts={1: [*even, *uneven], 2: even}))
    assert [[each.text for each in choose_siblings(batch)] for batch in run.rollouts] == [["u2", "u3"], ["e1", "e2"]]
    assert choose_siblings(Batch(1, ())) == ()


def test_visible_keeps_text_and_replaces_what_steers() -> None:
    assert visible("a\tb\r\nc é ∑ 数") == "a\tb\nc é ∑ 数"
    assert visible("\x1b[2J\x00\r\x9b\u202eok\ud83d") == "\ufffd[2J\ufffd\ufffd\ufffd\ufffdok\ufffd"


def modules_after(imported: str) -> set[str]:
    code = f"import sys, {imported}; print(*sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return set(result.stdout.split())


def test_importing_the_package_is_cheap_and_a_report_needs_no_torch() -> None:
    assert not modules_after("veritune.report") & {"matplotlib", "jinja2", "numpy", "torch"}
    assert not modules_after("veritune.report.page") & {"torch", "transformers"}
