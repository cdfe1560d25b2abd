"""Settings that cannot work are refused by name, value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from veritune.core.config import field_documentation, field_types
from veritune.core.errors import ConfigError, DataError
from veritune.discovery import DiscoverConfig
from veritune.discovery.config import ModelSettings
from veritune.discovery.events import EventLog, read_events

MODEL = {"engine_settings": ModelSettings(model="m")}
IMPOSSIBLE = {
    "proposer: setting 'engine.model' is missing": {},
    "rounds is 0; it must be at least 1": {**MODEL, "rounds": 0},
    "islands is 5; it must lie between 1 and 4": {**MODEL, "islands": 5},
    "samples is 0": {**MODEL, "samples": 0},
    "temperature is -1; it must not be negative": {**MODEL, "temperature": -1},
    "token_budget is 0; it must be positive": {**MODEL, "token_budget": 0},
    "strategy is": {**MODEL, "strategy": ("refine", "guess")},
    "program_seconds is nan; it must be positive and finite": {**MODEL, "program_seconds": float("nan")},
    "verification_seconds is inf; it must be positive and finite": {
        **MODEL,
        "verification_seconds": float("inf"),
    },
    "verification_memory_mb is 0; it must be at least 1": {**MODEL, "verification_memory_mb": 0},
    "temperature is nan; it must not be negative": {**MODEL, "temperature": float("nan")},
    "strategy is ()": {**MODEL, "strategy": ()},
    "the shipped search knows kissing only": {"proposer": "search", "problem": "cap_set"},
    "resume is set, but run is not": {**MODEL, "resume": True},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_settings(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DiscoverConfig(**IMPOSSIBLE[message])
    assert message in str(refused.value)


def test_every_field_is_documented() -> None:
    assert field_documentation(DiscoverConfig).keys() == field_types(DiscoverConfig).keys()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with EventLog(tmp_path, resume=False) as log:
        log.append("start", value=1)
        with pytest.raises(ConfigError, match="being written by another process"):
            EventLog(tmp_path, resume=True)
    with EventLog(tmp_path, resume=True) as log:
        assert [event["value"] for event in log.events] == [1]


def test_elapsed_goes_on_across_a_resume(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"type": "start", "time": 1.0, "elapsed": 1000.5}\n{"type": "torn')
    with EventLog(tmp_path, resume=True) as log:
        assert 1000.5 <= log.elapsed() < 1010
        log.append("resume")
    assert [event["type"] for event in read_events(tmp_path)] == ["start", "resume"]


def test_a_log_that_was_tampered_with_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"type": "start"}\nnonsense\n')
    with pytest.raises(DataError, match=r"events\.jsonl, line 2"):
        read_events(tmp_path)
