"""The shipped search, as functions and through the whole loop."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from veritune.discovery import DiscoverConfig, build_problem, discover, exit_code, verify_file
from veritune.discovery import search_program as shipped
from veritune.discovery.events import read_events
from veritune.discovery.sandbox import REQUIRED_LAYERS, probe_sandbox


@pytest.mark.parametrize(("length", "words"), [(7, 7), (8, 14), (9, 18), (10, 30), (11, 35)])
def test_the_codes_have_as_many_words_as_is_possible(length: int, words: int) -> None:
    """A(n, 4, 4) for n = 7 to 11 (Brouwer's tables)."""
    code = shipped.constant_weight_code(length, random.Random(1), time.monotonic() + 20)
    assert len(code) == words
    assert all(len(set(a) & set(b)) <= 2 for a, b in combinations(code, 2))
    assert all(len(set(word)) == 4 and set(word) <= set(range(length)) for word in code)


@pytest.mark.parametrize(("dimension", "score"), [(3, 12), (4, 24), (5, 40), (7, 126), (8, 240), (9, 306)])
def test_other_dimensions(dimension: int, score: int) -> None:
    points = shipped.search(dimension, seed=1, seconds=20.0, start=[])
    assert build_problem("kissing", dimension).verify(points).score == score


@pytest.mark.parametrize(("dimension", "score"), [(8, 240), (11, 582)])
def test_a_damaged_set_is_repaired(dimension: int, score: int) -> None:
    full = shipped.search(dimension, seed=1, seconds=20.0, start=[])
    damaged = [list(point) for point in full[: score - 40]]
    repaired = shipped.search(dimension, seed=2, seconds=2.0, start=damaged)
    assert build_problem("kissing", dimension).verify(repaired).score == score


def test_a_set_that_cannot_be_bettered_comes_back_whole() -> None:
    full = shipped.search(8, seed=1, seconds=20.0, start=[])
    assert shipped.search(8, seed=2, seconds=0.3, start=[list(point) for point in full]) == full


def test_582_through_loop_sandbox_verifier_and_report(tmp_path) -> None:
    if not set(REQUIRED_LAYERS) <= set(probe_sandbox().layers):
        pytest.skip("the loop needs Landlock and seccomp")
    folder = discover(DiscoverConfig(proposer="search", run=tmp_path / "run", rounds=2))
    for name in ("best_points.json", "best_program.py"):
        metrics = verify_file("kissing", folder / name, 11)
        assert (metrics["validity"], metrics["num_points"], metrics["combined_score"]) == (True, 582, 582)
        assert exit_code(metrics) == 0
    assert [event["score"] for event in read_events(folder) if event["type"] == "verdict"] == [582, 582]
    program = (folder / "best_program.py").read_text()
    assert program.endswith("    return (points,)\n")
    assert program.count("def run_code") == 1
    report = (folder / "report.md").read_text()
    assert "**Construction**" in report
    assert "**Search**" in report
