"""The command line as a person meets it: flags, files of settings, errors on one line, exit codes."""

import json
import os
import subprocess
import sys

import pytest

from veritune.cli import COMMANDS, main
from veritune.commands.launch import RECIPES
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.policy import save_policy

TINY = [
    *("--steps", "1", "--rollout-batch-size", "4", "--group-size", "2", "--train-batch-size", "4"),
    *("--max-tokens", "6", "--validation-examples", "2", "--threads", "1"),
]


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a call."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return (0 if code is None else code), *capsys.readouterr()


@pytest.fixture(scope="module")
def policy_folder(random_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(random_policy, folder)
    return folder


def help_of(*commands):
    """What the commands' help prints, in one process of its own, and at the end whether torch was imported."""
    code = (
        "import sys; from veritune.cli import main\n"
        f"for name in {commands!r}:\n    try: main([*name.split(), '--help'])\n    except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_help_lists_every_command_and_imports_no_torch():
    out = help_of("")
    assert all(f"  {name} " in out for name in COMMANDS)
    assert out.endswith("False\n")


def test_the_help_of_a_recipe_imports_no_torch():
    out = help_of(*RECIPES, "grpo --loss-type gspo")
    assert out.count("Usage:") == len(RECIPES) + 1 and out.endswith("False\n")


def test_rare_settings_are_in_the_whole_help_alone(capsys):
    _, short, _ = run(capsys, "grpo", "--help")
    _, whole, _ = run(capsys, "grpo", "--help-all")
    assert "--adam-beta1" not in short and "--adam-beta1" in whole
    hidden = whole.count("\n  --") - short.count("\n  --")
    assert f"\n{hidden} more settings: veritune grpo --help-all\n" in short and "more settings" not in whole
    assert 30 <= short.count("\n  --") - len(("config", "debug", "help-all")) <= 45
    titles = [line for line in short.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["GRPO:", "Loss:", "Optimiser:"] and titles[-1] == "Options:"
    assert short.index("GRPO:") < short.index("--group-size ") < short.index("Loss:") < short.index("--loss-type ")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_flag_of_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "--debug" in out
    assert "None" not in out


def test_help_begins_with_what_the_command_is_about(capsys):
    _, out, _ = run(capsys, "grpo", "--help")
    places = [out.index(f"--{flag} ") for flag in ("group-size", "schedule", "policy", "engine-max-rows", "config")]
    assert places == sorted(places)


def test_flags_go_over_the_file_and_the_file_over_the_defaults(capsys, tmp_path, policy_folder):
    settings = tmp_path / "settings.toml"
    settings.write_text(f'policy = "{policy_folder}"\nseed = 5\nlearning_rate = 1e-5\n')
    folder = tmp_path / "run"
    code, *_ = run(capsys, "grpo", "--config", settings, "--seed", "7", "--run", folder, *TINY)
    assert code == 0
    written = (folder / "config.toml").read_text()
    assert "seed = 7\n" in written and "learning_rate = 1e-05\n" in written and "group_size = 2\n" in written
    assert (folder / "report.html").is_file() and list((folder / "figures").glob("*.png"))
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["recipe"] == "grpo" and environment["versions"]["torch"]
    assert environment["compiled_kernels"] == (cpu_kernels.library() is not None)
    assert [row["step"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())] == [0, 1]
    # The finished run is not run again, and its checkpoint is a policy.
    code, out, _ = run(capsys, "resume", folder)
    assert code == 0 and "has already taken all of its 1 steps" in out
    checkpoint = folder / "checkpoints" / "step-000001"
    code, out, _ = run(
        capsys, "eval", "--policy", checkpoint, "--validation-examples", 2, "--max-tokens", 4, "--run", tmp_path / "e"
    )
    assert code == 0 and "format 0, answer 0" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["grpo", "--top-p", "0.9"], 2, "top_p is 0.9"),
        (
            ["grpo", "--rollout-batch-size", "100"],
            2,
            "rollout_batch_size is 100; it must be a multiple of group_size (8)",
        ),
        (["grpo", "--loss-type", "grpo_clip"], 2, "no old policy"),
        (["grpo", "--loss-type", "ppo"], 2, "loss_type is 'ppo'; allowed are no_baseline"),
        (["grpo", "--max-tokens", "0"], 2, "max_tokens is 0; it must be at least 1"),
        (["grpo", "--group-size", "many"], 2, "group_size is 'many'; it must be of type int"),
        (["grpo", "--no-such-flag"], 2, "no-such-flag"),
        (["grpo", "--config", "nowhere.toml"], 2, "nowhere.toml"),
        (["grpo", "--policy", "./nowhere"], 2, "policy is './nowhere', but there is no such folder"),
        (
            ["grpo", "--policy", "no-such/model"],
            2,
            "no folder and not in the hub's cache, and the hub cannot be reached",
        ),
        (["grpo", "--policy", "{tmp}"], 2, "no model folder: it has no config.json"),
        (["grpo", "--policy", "{policy}", "--device", "tpu9"], 2, "device is 'tpu9'"),
        (["grpo", "--policy", "{policy}", "--task", "chess"], 2, "task is 'chess'"),
        (["grpo", "--policy", "{policy}", "--prompt", "./nowhere.txt"], 2, "prompt is './nowhere.txt'"),
        (["grpo", "--policy", "{policy}", "--task-data", "{broken}"], 1, "broken.jsonl line 2"),
        (["grpo", "--policy", "{policy}", "--task-data", "{empty}"], 1, "empty.jsonl"),
        (["resume", "{tmp}"], 2, "no run folder"),
        (["no-such-command"], 2, "no-such-command"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_an_exit_code(capsys, tmp_path, policy_folder, arguments, code, said):
    (tmp_path / "broken.jsonl").write_text('{"nums": [1, 2, 3], "target": 6}\n{"nums": [1, 2\n')
    (tmp_path / "empty.jsonl").write_text("")
    names = {
        "tmp": tmp_path,
        "policy": policy_folder,
        "broken": tmp_path / "broken.jsonl",
        "empty": tmp_path / "empty.jsonl",
    }
    given = [argument.format(**names) for argument in arguments]
    exit_code, out, error = run(capsys, *given, *(["--run", tmp_path / "run"] if given[0] == "grpo" else []))
    assert exit_code == code
    assert said in error
    assert "Traceback" not in out + error
    if error.startswith("error: "):
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(capsys):
    code, _, error = run(capsys, "grpo", "--top-p", "0.9", "--debug")
    assert code == 2 and "Traceback" in error and error.splitlines()[-1].startswith("error: top_p is 0.9")


def test_a_prompt_longer_than_the_context_is_named(capsys, tmp_path, policy_folder):
    (tmp_path / "long.txt").write_text("word " * 3000 + "{question}")
    arguments = ["--policy", policy_folder, "--prompt", tmp_path / "long.txt", "--run", tmp_path / "run", *TINY]
    code, _, error = run(capsys, "grpo", *arguments)
    assert code == 1 and "prompt 0 has" in error and "context holds 1024" in error


def test_a_tokenizer_without_eos_is_refused(capsys, tmp_path, random_policy):
    save_policy(random_policy, tmp_path / "mute")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = tmp_path / "mute" / name
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({key: None if "eos" in key else value for key, value in settings.items()}))
    code, _, error = run(capsys, "grpo", "--policy", tmp_path / "mute", "--run", tmp_path / "run", *TINY)
    assert code == 2 and "has no EOS token" in error


@pytest.mark.parametrize(("wished", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_the_embedded_policy_has_one_thread_unless_told_otherwise(tmp_path, wished, threads):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | wished
    command = [sys.executable, "-m", "veritune", "eval", "--validation-examples", "1", "--max-tokens", "2"]
    subprocess.run([*command, "--run", tmp_path / "run"], check=True, capture_output=True, env=environment)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == threads
