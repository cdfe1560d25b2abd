"""Run folders for reports, written by the run folder's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from veritune.core.run_folder import RunFolder

CONFIG = {"policy": "embedded", "task": "countdown", "seed": 0, "max_tokens": 64, "steps": 2, "clip_grad_norm": 1.0}
ENVIRONMENT = {"recipe": "grpo", "python": "3.12.1", "gpus": [], "versions": {"torch": "2.13.0"}, "git_revision": None}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run folder of the given rows and responses; keyword settings go over CONFIG."""

    def make(
        name: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        validation: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        rollouts: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        environment: Mapping[str, Any] = ENVIRONMENT,
        **settings: Any,
    ) -> Path:
        values = {**CONFIG, **settings}
        toml = "".join(f'{key} = "{v}"\n' if isinstance(v, str) else f"{key} = {v}\n" for key, v in values.items())
        run = RunFolder.create(tmp_path / name, toml, environment)
        for row in rows:
            run.append_metrics(row)
        for kind, batches in (("validation", validation or {}), ("rollouts", rollouts or {})):
            for step, responses in batches.items():
                run.write_rows(kind, step, responses)
        run.unlock()
        return run.path

    return make


@pytest.fixture
def response() -> Callable[..., dict[str, Any]]:
    """A response's row as validations and rollouts keep it."""

    def make(id: str, text: str, reward: float, *, tokens: int = 4, cut: bool = False, **more: Any) -> dict[str, Any]:
        return {
            "id": id,
            "question": f"question {id}",
            "ground_truth": {"numbers": [1, 2], "target": 3},
            "response": text,
            "finish_reason": "length" if cut else "stop",
            "score": {"reward": reward, "format_reward": float(reward > 0), "answer_reward": float(reward == 1)},
            "response_ids": [0] * tokens,
            **more,
        }

    return make
