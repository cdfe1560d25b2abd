"""The loop against a scripted endpoint: a real HTTP server, the real client, the real sandbox and verifier."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_endpoint import CUT_OFF, DISCONNECTS, DRIPS, STALLS, ScriptedEndpoint, answers, fails, raw

from odd_answers import FAULTS, RawServer, play, respond
from veritune.core import http
from veritune.core.config import from_mapping
from veritune.core.errors import ConfigError, EngineError
from veritune.discovery import DiscoverConfig, discover, replay_conversation, write_outputs
from veritune.discovery.config import ModelSettings
from veritune.discovery.events import read_events
from veritune.discovery.sandbox import REQUIRED_LAYERS, probe_sandbox

if not set(REQUIRED_LAYERS) <= set(probe_sandbox().layers):
    pytest.skip("the loop needs Landlock and seccomp", allow_module_level=True)

KEY = "sk-scripted-0123456789"
AXES = "points = [[2 * s if k == i else 0 for k in range(5)] for i in range(5) for s in (1, -1)]\n"
ROOTS = (
    "from itertools import combinations, product\n"
    "def run_code():\n"
    "    return [[a if k == i else b if k == j else 0 for k in range(5)]\n"
    "            for i, j in combinations(range(5), 2) for a, b in product((1, -1), repeat=2)]\n"
)
PAIR = "points = [[1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]]\n"
TOO_CLOSE = "points = [[3, 0, 0, 0, 0], [2, 1, 0, 0, 0]]\n"
BROKEN = "def run_code(:\n    return 1\n"


def fenced(program: str, prose: str = "My idea.") -> str:
    return f"{prose}\n\n```python\n{program}```\n"


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)


def config(endpoint: ScriptedEndpoint | None, folder: Path, **changes) -> DiscoverConfig:
    settings = {
        "dimension": 5,
        "run": folder,
        "engine.model": "scripted",
        **({"engine.url": endpoint.base_url} if endpoint else {}),
        "rounds": 1,
        "engine.concurrency": 1,
        "engine.retries": 2,
        "engine.seconds": 20.0,
        "program_seconds": 20.0,
    }
    return from_mapping(DiscoverConfig, {**settings, **changes}, "test")


def of_type(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_events(folder) if event["type"] == kind]


def best_program(folder: Path) -> str:
    """The program as the model wrote it, without the function that was added below it."""
    return (folder / "best_program.py").read_text().partition("\n\ndef run_code(run_code=")[0]


def conversation(folder: Path) -> dict:
    return json.loads((folder / "conversation_log.json").read_text())


def test_through_everything_to_the_scripted_best(tmp_path: Path) -> None:
    script = [
        answers("I cannot help with mathematics."),
        fails(500), fails(503), answers(fenced(PAIR)),
        answers(fenced(BROKEN)),
        DISCONNECTS, CUT_OFF, answers(fenced(AXES)),
        fails(429, {"retry-after": "0.02"}), answers(fenced(TOO_CLOSE)),
        fails(400), 
        fails(500), fails(500), fails(500),
        answers(fenced(ROOTS, "Take the roots of D5.")),
        answers(fenced(PAIR)),
        raw(b"<html>gateway</html>", "text/html"),
        raw(b"{\"choices\": []}", "application/json"),
        raw(b"not json at all", "application/json"),
        answers("", choices=[{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None}}]),
        answers(fenced(AXES), usage=None),
    ]  # fmt: skip
    with ScriptedEndpoint(script) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=12))
        assert len(endpoint.requests) == len(script)
    verdicts = {event["id"]: (event["valid"], event["score"]) for event in of_type(folder, "verdict")}
    scores = [0, 2, 0, 10, 0, None, None, 40, 2, None, 0, 10]
    # a 400 and three 500s in a row cost their round, and so do three bodies in a row that are no completion
    assert len(of_type(folder, "failure")) == 3
    assert [verdicts.get(f"r{n}-i0-s0", (None, None))[1] for n in range(12)] == scores
    assert len(of_type(folder, "retry")) == 2 + 2 + 1 + 2 + 2
    assert best_program(folder) == ROOTS
    points = json.loads((folder / "best_points.json").read_text())
    assert len(points) == 40
    assert sorted(sum(x * x for x in point) for point in points) == [2] * 40
    assert replay_conversation(folder / "conversation_log.json") == (ROOTS, 40)
    report = (folder / "report.md").read_text()
    for said in (
        "**Final score: 40**",
        "Take the roots of D5.",
        "SyntaxError",
        "score_by_round.png",
        "answered 400",
    ):
        assert said in report
    assert (folder / "score_by_round.png").read_bytes().startswith(b"\x89PNG")


def test_stalls_and_drips_are_retried_and_cost_at_most_their_round(tmp_path: Path) -> None:
    script = [STALLS, answers(fenced(AXES)), DRIPS, DRIPS, answers(fenced(ROOTS))]
    with ScriptedEndpoint(script) as endpoint:
        started = time.monotonic()
        folder = discover(config(endpoint, tmp_path / "run", rounds=3, **{"engine.retries": 1, "engine.seconds": 0.5}))
        assert time.monotonic() - started < 20
    assert [event["score"] for event in of_type(folder, "verdict")] == [10, 40]
    assert [
        "no complete answer within 0.5 s" in event["error"]
        for event in of_type(folder, "retry") + of_type(folder, "failure")
    ] == [True] * 3


def test_refine_tells_the_exact_words_and_shows_the_best_program(tmp_path: Path) -> None:
    with ScriptedEndpoint([answers(fenced(AXES)), answers(fenced(TOO_CLOSE)), answers("no")]) as endpoint:
        discover(config(endpoint, tmp_path / "run", rounds=3))
        prompts = [request["messages"][1]["content"] for request in endpoint.requests]
    assert "points =" not in prompts[0]
    assert "604" not in prompts[0]
    assert "Best known: 40" in prompts[0]
    assert AXES in prompts[1]
    assert "score 10" in prompts[1]
    # (3,0,0,0,0) and (2,1,0,0,0): distance 1 + 1 = 2, norms 9 and 5
    assert "Minimum squared distance 2 < maximum squared norm 9 (points 0 and 1)" in prompts[2]
    assert AXES in prompts[2]
    assert TOO_CLOSE in prompts[2]


def test_prompt_alone_tells_nothing_of_the_past(tmp_path: Path) -> None:
    with ScriptedEndpoint([answers(fenced(AXES)), answers(fenced(PAIR))]) as endpoint:
        discover(config(endpoint, tmp_path / "shot", rounds=None, strategy=("prompt",)))
        assert len(endpoint.requests) == 1
        discover(config(endpoint, tmp_path / "run", rounds=2, strategy=("prompt",)))
        assert len(endpoint.requests) == 3
        assert endpoint.requests[2]["messages"] == endpoint.requests[0]["messages"]
        assert endpoint.requests[0]["messages"] == endpoint.requests[1]["messages"]


def test_best_of_n_asks_n_times_and_keeps_the_best(tmp_path: Path) -> None:
    script = [answers(fenced(program)) for program in (PAIR, ROOTS, AXES)]
    with ScriptedEndpoint(script) as endpoint:
        folder = discover(
            config(endpoint, tmp_path / "run", strategy=("best-of-n",), samples=3, **{"engine.concurrency": 3})
        )
        assert len(endpoint.requests) == 3
        assert all(request["messages"] == endpoint.requests[0]["messages"] for request in endpoint.requests)
    assert best_program(folder) == ROOTS


def test_islands_keep_to_themselves_until_they_migrate(tmp_path: Path) -> None:
    # round 0: island 0 gets AXES, island 1 PAIR; both then answer in prose, so parents come from round 0 alone
    script = [answers(fenced(AXES)), answers(fenced(PAIR)), answers("prose")]
    with ScriptedEndpoint(script) as endpoint:
        settings = {"strategy": ("islands", "refine"), "islands": 2, "rounds": 6, "migration_interval": 2}
        discover(config(endpoint, tmp_path / "run", **settings))
        prompts = [request["messages"][1]["content"] for request in endpoint.requests]
    assert len(prompts) == 12
    assert AXES in prompts[2]
    assert PAIR not in prompts[2]
    assert PAIR in prompts[3]
    assert AXES not in prompts[3]
    assert any(AXES in prompt for prompt in prompts[5::2])  # island 1 after the first migration
    assert all((AXES in prompt) != (PAIR in prompt) for prompt in prompts[2:])


BUDGETS = {
    "token_budget": (250, 3),  # 120 tokens an answer: 120, 240, 360
    "cost_budget": (0.0003, 3),  # 100 * 1 + 20 * 2 = 140 millionths an answer: 0.00014, 0.00028, 0.00042
    "rounds": (2, 2),
    "stop_at_score": (10, 1),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets(name: str, tmp_path: Path) -> None:
    value, requests = BUDGETS[name]
    with ScriptedEndpoint([answers(fenced(AXES))]) as endpoint:
        settings = {"rounds": 5, "input_price": 1.0, "output_price": 2.0, name: value}
        folder = discover(config(endpoint, tmp_path / "run", **settings))
        assert len(endpoint.requests) == requests
    assert len(of_type(folder, "stop")) == 1
    total = sum(event["cost"] for event in of_type(folder, "answer"))
    assert total == pytest.approx(requests * 0.00014, rel=1e-9)


def test_the_time_budget_ends_the_run(tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(0.3)\n" + AXES
    with ScriptedEndpoint([answers(fenced(slow))]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=100, time_budget_seconds=1.0))
        assert 1 <= len(endpoint.requests) <= 4
    assert "time budget" in of_type(folder, "stop")[0]["reason"]


def test_the_time_budget_does_not_wait_for_a_stalled_server(tmp_path: Path) -> None:
    with ScriptedEndpoint([STALLS]) as endpoint:
        started = time.monotonic()
        folder = discover(config(endpoint, tmp_path / "run", time_budget_seconds=1.0))
        assert time.monotonic() - started < 8
    assert of_type(folder, "failure") == []
    with ScriptedEndpoint([answers(fenced(AXES))]) as endpoint:
        discover(config(endpoint, folder, resume=True))  # asked again, since nobody answered
    assert [event["score"] for event in of_type(folder, "verdict")] == [10]


ODD_BODIES = [
    {"choices": {"a": 1}},
    {"choices": "text"},
    {"choices": [None]},
    {"choices": [{"message": {"content": [{"type": "text", "text": "hi"}]}}]},
    {"choices": [{"message": "hello"}]},
    {"choices": [{"message": {"content": "hi"}}], "usage": "none"},
    {"choices": [{"message": {"content": "\ud800```python\npoints = 1\n"}}], "usage": {"prompt_tokens": "1"}},
    [],
    None,
    7,
]


def test_odd_bodies_cost_their_round_and_never_the_run(tmp_path: Path) -> None:
    script = [raw(json.dumps(body).encode(), "application/json") for body in ODD_BODIES]
    with ScriptedEndpoint([*script, answers(fenced(ROOTS))]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=len(script) + 1, **{"engine.retries": 0}))
        assert len(endpoint.requests) == len(script) + 1
    assert of_type(folder, "verdict")[-1]["score"] == 40
    assert len(of_type(folder, "failure")) == 9
    assert [event["answer"] for event in of_type(folder, "answer")][:-1] == ["hi"]
    assert (folder / "report.md").exists()


def test_no_answer_whatsoever_ends_a_run(tmp_path: Path) -> None:
    def answer(send, path, payload) -> None:
        if len(server.requests) <= len(FAULTS):
            play(list(FAULTS.values())[len(server.requests) - 1], send, {"choices": [{}]}, lambda text: text)
        else:
            respond(send, json.dumps({"choices": [{"message": {"content": fenced(ROOTS)}}]}))

    with RawServer(answer) as server:
        settings = {"engine.url": server.url, "rounds": len(FAULTS) + 1, "engine.retries": 0}
        folder = discover(config(None, tmp_path / "run", **settings))
    assert len(of_type(folder, "failure")) == len(FAULTS)
    assert [event["score"] for event in of_type(folder, "verdict")] == [40]


def test_the_key_is_used_and_never_written(tmp_path: Path) -> None:
    script = [fails(400, message=f"your key {KEY} is odd"), answers(fenced(f"# {KEY}\n{AXES}"))]
    with ScriptedEndpoint(script) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=2))
        assert set(endpoint.keys) == {f"Bearer {KEY}"}
    for path in folder.iterdir():
        assert KEY.encode() not in path.read_bytes(), path


def test_a_password_in_the_address_is_used_and_never_written(tmp_path: Path) -> None:
    script = [fails(400, message="anna:hunter2 may not"), answers(fenced(f"# hunter2\n{AXES}"))]
    with ScriptedEndpoint(script) as endpoint:
        url = endpoint.base_url.replace("://", "://anna:hunter2@")
        folder = discover(config(endpoint, tmp_path / "run", rounds=2, **{"engine.url": url}))
        assert set(endpoint.keys) == {"Basic YW5uYTpodW50ZXIy"}
    for path in folder.iterdir():
        assert b"hunter2" not in path.read_bytes(), path
    assert read_events(folder)[0]["config"]["engine.url"] == endpoint.base_url.replace("://", "://***@")


def test_requests_run_side_by_side(tmp_path: Path) -> None:
    with ScriptedEndpoint([STALLS, STALLS, STALLS, answers(fenced(AXES))]) as endpoint:
        settings = {
            "strategy": ("best-of-n",),
            "samples": 4,
            "engine.concurrency": 4,
            "engine.seconds": 1.0,
            "engine.retries": 0,
        }
        started = time.monotonic()
        folder = discover(config(endpoint, tmp_path / "run", **settings))
        assert time.monotonic() - started < 2.9  # one after the other the three stalls alone take 3 s
    assert [event["score"] for event in of_type(folder, "verdict")] == [10]


def test_cut_at_any_event_and_resumed_it_asks_only_what_is_unanswered(tmp_path: Path) -> None:
    """A killed process leaves a prefix of the log and perhaps half a line. Every prefix must lead to the same end."""
    programs = [PAIR, BROKEN, ROOTS]
    script = [answers(fenced(program)) for program in programs]
    with ScriptedEndpoint(script) as endpoint:
        whole = discover(config(endpoint, tmp_path / "whole", rounds=3))
    lines = (whole / "events.jsonl").read_bytes().splitlines(keepends=True)
    expected = [exchange["messages"] for exchange in conversation(whole)["exchanges"]]
    for kept in range(len(lines)):
        folder = tmp_path / f"cut-{kept}"
        folder.mkdir()
        torn = lines[kept][: len(lines[kept]) // 2 * (kept % 2)]
        (folder / "events.jsonl").write_bytes(b"".join(lines[:kept]) + torn)
        answered = sum(json.loads(line)["type"] == "answer" for line in lines[:kept])
        with ScriptedEndpoint([*script[answered:], fails(400)]) as endpoint:
            discover(config(endpoint, folder, rounds=3, resume=True))
            assert len(endpoint.requests) == 3 - answered
        assert [exchange["messages"] for exchange in conversation(folder)["exchanges"]] == expected
        assert best_program(folder) == ROOTS
        assert replay_conversation(folder / "conversation_log.json") == (ROOTS, 40)
        assert len(of_type(folder, "answer")) == len(of_type(folder, "verdict")) == 3


def test_kill_nine_and_resume(tmp_path: Path) -> None:
    """The real thing: the process is killed while programs run and requests are under way, twice over."""
    slow = "import time\ntime.sleep(0.2)\n"
    script = [answers(fenced(slow + program)) for program in (PAIR, AXES) * 4 + (ROOTS,)] + [answers(fenced(PAIR))]
    folder = tmp_path / "run"
    with ScriptedEndpoint(script) as endpoint:
        for kill, seen in enumerate((3, 6)):
            resume = "True" if kill else "False"
            code = (
                "from pathlib import Path\nfrom veritune.discovery import *\n"
                f"discover(DiscoverConfig(dimension=5, run=Path({str(folder)!r}), rounds=9, program_seconds=20.0, "
                f"resume={resume}, engine_settings=ModelSettings(model='scripted', url={endpoint.base_url!r})))"
            )
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
            process = subprocess.Popen([sys.executable, "-c", code], env=environment)
            deadline = time.monotonic() + 60
            while endpoint.served < seen and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05 * kill)
            process.send_signal(signal.SIGKILL)
            process.wait()
        before = {event["id"]: event["answer"] for event in of_type(folder, "answer")}
        assert before
        discover(config(endpoint, folder, rounds=9, resume=True))
        # at most the one answer on its way at each kill was never received
        assert len(endpoint.requests) <= 9 + 2
    after = {event["id"]: event["answer"] for event in of_type(folder, "answer")}
    assert len(after) == len(of_type(folder, "answer")) == 9
    assert before.items() <= after.items()


def test_control_c_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ScriptedEndpoint([answers(fenced(AXES)), STALLS]) as endpoint:
        code = (
            # A suite that runs in the background inherits a SIGINT that is ignored.
            "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from pathlib import Path\nfrom veritune.discovery import *\n"
            f"discover(DiscoverConfig(dimension=5, run=Path({str(folder)!r}), "
            f"engine_settings=ModelSettings(model='scripted', url={endpoint.base_url!r})))"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(endpoint.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert b"KeyboardInterrupt" in errors
    assert (folder / "best_program.py").read_text() == AXES
    assert of_type(folder, "stop")[0]["reason"] == "interrupted"


def test_outputs_are_derived_from_the_log_alone(tmp_path: Path) -> None:
    with ScriptedEndpoint([answers(fenced(AXES)), answers("no")]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=2))
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        if path.name != "events.jsonl":
            path.unlink()
    write_outputs(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written


def test_a_run_without_any_answer_is_a_failure_that_says_why(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        ScriptedEndpoint([fails(401, message="wrong key")]) as endpoint,
        pytest.raises(EngineError, match=r"no request of .* was answered.*wrong key"),
    ):
        discover(config(endpoint, tmp_path / "run", rounds=2), lines.append)
    assert len(lines) == 2
    assert all("no answer" in line and "wrong key" in line for line in lines)
    assert (tmp_path / "run" / "report.md").exists()


def test_progress_is_told_line_by_line(tmp_path: Path) -> None:
    lines: list[str] = []
    with ScriptedEndpoint([answers(fenced(AXES)), answers(fenced(TOO_CLOSE))]) as endpoint:
        discover(config(endpoint, tmp_path / "run", rounds=2), lines.append)
    assert lines[0] == "r0-i0-s0: score 10"
    assert lines[1].startswith("r1-i0-s0: refused: Minimum squared distance 2 < maximum squared norm 9")


def test_a_problem_to_minimize(tmp_path: Path) -> None:
    rulers = [
        "points = [0, 1, 4, 9]\n",
        "points = [0, 1, 5, 12]\n",
        "points = [0, 1, 2, 3]\n",
        "points = [6, 4, 1, 0]\n",
    ]
    with ScriptedEndpoint([answers(fenced(ruler)) for ruler in rulers]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", problem="golomb_ruler", dimension=4, rounds=9))
        assert len(endpoint.requests) == 4
        assert rulers[0] in endpoint.requests[2]["messages"][1]["content"]  # 9 is still the best: 12 is longer
    assert of_type(folder, "stop")[0]["reason"] == "score 6 reached"
    assert json.loads((folder / "best_points.json").read_text()) == [6, 4, 1, 0]
    assert replay_conversation(folder / "conversation_log.json") == (rulers[3], 6)


def test_a_model_may_write_what_the_course_asks_for(tmp_path: Path) -> None:
    """Floats in a tuple are stored as plain integers; the best program scores where the first item is looked at."""
    program = f"import numpy as np\n{AXES}\ndef run_code():\n    return np.array(points, dtype=float), 5\n"
    bare = f"{ROOTS}\nfound = run_code()\n"
    with ScriptedEndpoint([answers(fenced(program)), answers(fenced(bare))]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", rounds=2))
        assert "`return (points,)`" in endpoint.requests[0]["messages"][1]["content"]
    assert [event["score"] for event in of_type(folder, "verdict")] == [10, 40]
    first = of_type(folder, "verdict")[0]["candidate"]
    assert first == [[2 * s if k == i else 0 for k in range(5)] for i in range(5) for s in (1, -1)]
    assert all(type(x) is int for row in first for x in row)
    scope: dict = {}
    exec((folder / "best_program.py").read_text(), scope)
    handed_over = scope["run_code"]()
    assert isinstance(handed_over, tuple)
    assert handed_over[0] == json.loads((folder / "best_points.json").read_text())


def test_the_run_folder_is_nobody_elses(tmp_path: Path) -> None:
    with ScriptedEndpoint([answers(fenced(AXES))]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run"))
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)  # as earlier versions left it
        discover(config(endpoint, folder, resume=True, rounds=2))
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_verification_past_its_limit_costs_its_sample_and_not_the_run(tmp_path: Path) -> None:
    endless = "import numpy as np\npoints = np.random.default_rng(1).integers(-2**62, 2**62, (30_000, 24))\n"
    with ScriptedEndpoint(
        [answers(fenced(endless)), answers(fenced("points = [[2] + [0] * 23, [-2] + [0] * 23]\n"))]
    ) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run", dimension=24, rounds=2, verification_seconds=0.3))
    assert [event["score"] for event in of_type(folder, "verdict")] == [0, 2]
    assert of_type(folder, "verdict")[0]["message"] == "the verification was stopped after its limit of 0.3 s"


def test_refusals(tmp_path: Path, monkeypatch) -> None:
    with ScriptedEndpoint([answers(fenced(AXES))]) as endpoint:
        folder = discover(config(endpoint, tmp_path / "run"))
        with pytest.raises(ConfigError, match="already holds a run"):
            discover(config(endpoint, folder))
        with pytest.raises(ConfigError, match="seed is 7, but the run to resume has 0"):
            discover(config(endpoint, folder, resume=True, seed=7))
        with pytest.raises(ConfigError, match="no run to continue"):
            discover(config(endpoint, tmp_path / "absent", resume=True))
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        discover(DiscoverConfig(engine_settings=ModelSettings(model="scripted"), run=tmp_path / "keyless"))
    assert not (tmp_path / "keyless").exists()
