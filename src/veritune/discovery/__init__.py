"""Discovery: a language model (or a search) proposes constructions, an exact verifier judges them, its words go back.

`discover(DiscoverConfig(...))` runs a search and returns its folder; `verify_file` judges one candidate.
"""

from veritune.discovery.config import DiscoverConfig, ModelSettings
from veritune.discovery.evaluate import exit_code, verify_file
from veritune.discovery.loop import discover
from veritune.discovery.outputs import replay_conversation, write_outputs
from veritune.discovery.problem import BestKnown, Problem, Verdict
from veritune.discovery.problems import build_problem, problem_names
from veritune.discovery.sandbox import Limits, ProgramResult, SandboxLevel, probe_sandbox, run_program

__all__ = [
    "BestKnown",
    "DiscoverConfig",
    "Limits",
    "ModelSettings",
    "Problem",
    "ProgramResult",
    "SandboxLevel",
    "Verdict",
    "build_problem",
    "discover",
    "exit_code",
    "probe_sandbox",
    "problem_names",
    "replay_conversation",
    "run_program",
    "verify_file",
    "write_outputs",
]
