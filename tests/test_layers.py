"""The house's import rule, read from the source: a room imports only rooms of a lower layer.

A room is a module or package directly under `veritune`. A new one needs its line in `LAYERS`, and nothing else here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAYERS = {
    0: ["errors", "cpu_kernels"],
    1: ["types", "randomness", "packing", "head", "families"],
    2: [
        *("primitives", "grading", "runs", "configs", "prompts", "tables", "countdown_traces", "assets", "policies"),
        *("http_json", "processes", "vllm_wire", "budget", "decode", "packed_layers"),
    ],
    3: ["canary", "tasks", "workers", "trackers", "decode_graphs", "compiled_steps"],
    4: ["engines", "microbatches", "countdown", "evaluate"],
    5: ["training", "policy_gradient", "discovery", "report"],
    6: ["recipes"],
    7: ["launch", "display", "measurements", "leaderboard"],
    8: ["experiments", "commands", "grade", "plan"],
    9: ["cli"],
    10: ["__main__"],
}
TORCH_FREE = {
    *("errors", "types", "randomness", "configs", "prompts", "tables", "countdown_traces", "runs", "grade"),
    *("http_json", "processes", "budget"),
    *("grading", "tasks", "evaluate", "discovery", "report", "display", "cli"),
}
INDEPENDENT = {"tasks", "engines", "recipes"}
"""Packages whose modules never import one another; only the package's own `__init__` imports them."""
PROTOCOLS_ONLY = {"recipes", "discovery"}
"""Rooms that see the `Task` and `Engine` protocols, never a concrete one."""
CONCRETE_BY_NATURE = {"recipes/pretrain.py"}
"""The embedded policy is made from Countdown's own problems."""
ONLY_IN = {
    "vllm": ("engines/vllm.py",),
    "transformers": ("policies.py",),
    "matplotlib": ("report/", "discovery/report"),
}

SOURCE = Path(__file__).parents[1] / "src" / "veritune"
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}


@dataclass(frozen=True)
class Import:
    """One imported module, where it is imported, and whether only a type checker imports it."""

    importer: str
    line: int
    module: str
    for_types_only: bool

    @property
    def importing_room(self) -> str:
        return room_of_path(self.importer)

    @property
    def place(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def room_of_path(path: str) -> str:
    """The room "tasks" for "tasks/countdown.py", "errors" for "errors.py", "" for the package's own "__init__.py"."""
    return path.split("/", maxsplit=1)[0].removesuffix(".py") if path != "__init__.py" else ""


def room_of_module(module: str) -> str | None:
    """The room "tasks" for "veritune.tasks.countdown", "" for "veritune", None for what is not this package's."""
    package, *rest = module.split(".")
    if package != "veritune":
        return None
    return rest[0] if rest else ""


def imports_in(source: str, importer: str) -> Iterator[Import]:
    """Every import statement, in functions too, with `from a import b` as a.b and relative imports resolved."""
    package = ["veritune", *importer.split("/")[:-1]]

    def visit(node: ast.AST, for_types_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(importer, node.lineno, name.name, for_types_only)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for name in node.names:
                yield Import(importer, node.lineno, f"{base}.{name.name}", for_types_only)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, for_types_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, for_types_only)

    yield from visit(ast.parse(source), False)


def all_imports() -> list[Import]:
    modules = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "assets"]
    assert len(modules) > 5, f"no source under {SOURCE}"
    return [
        found
        for path in modules
        for found in imports_in(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix())
    ]


def lower_layer_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        room = room_of_module(found.module)
        if room not in LAYER_OF:  # another package's, or a name such as veritune.__version__
            continue
        importing = found.importing_room
        if importing != room and LAYER_OF[room] >= LAYER_OF.get(importing, 0):
            faults.append(f"{found.place}: layer {LAYER_OF.get(importing, 0)} imports layer {LAYER_OF[room]}")
    return faults


def sibling_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        room, own_module = found.importing_room, found.importer.split("/")[-1].removesuffix(".py")
        if room not in INDEPENDENT or own_module == "__init__" or room_of_module(found.module) != room:
            continue
        if found.module.split(".")[2:3] != [own_module]:
            faults.append(f"{found.place}: modules of {room} never import one another")
    return faults


def third_party_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        package = found.module.split(".")[0]
        allowed = ONLY_IN.get(package)
        if allowed and not found.importer.startswith(allowed):
            faults.append(f"{found.place}: {package} is imported only in {', '.join(allowed)}")
    return faults


def torch_faults(imports: list[Import]) -> list[str]:
    with_torch = set(LAYER_OF) - TORCH_FREE
    return [
        f"{found.place}: {found.importing_room} is free of torch"
        for found in imports
        if found.importing_room in TORCH_FREE
        and not found.for_types_only
        and (found.module.split(".")[0] == "torch" or room_of_module(found.module) in with_torch)
    ]


def protocol_faults(imports: list[Import]) -> list[str]:
    return [
        f"{found.place}: {found.importing_room} sees the protocols in veritune.types alone"
        for found in imports
        if found.importing_room in PROTOCOLS_ONLY
        and found.importer not in CONCRETE_BY_NATURE
        and room_of_module(found.module) in ("tasks", "engines")
    ]


def test_every_room_has_a_layer():
    rooms = {room_of_path(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py")}
    missing = sorted(rooms - set(LAYER_OF) - {""})
    assert not missing, f"{', '.join(missing)}: give the room its layer in LAYERS, at the top of {__file__}"


RULES = [lower_layer_faults, sibling_faults, third_party_faults, torch_faults, protocol_faults]


@pytest.mark.parametrize("rule", RULES)
def test_the_source_keeps_the_rule(rule):
    faults = rule(all_imports())
    assert not faults, "\n".join(faults)


def test_torch_free_rooms_import_without_torch_or_transformers():
    program = (
        "import sys, veritune, veritune.grading, veritune.tasks, veritune.tasks.countdown, veritune.configs\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'vllm'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == "[]\n"


# The rules themselves, on sources that break them


@pytest.mark.parametrize(
    "rule, importer, source",
    [
        (lower_layer_faults, "errors.py", "from veritune.types import Score"),
        (lower_layer_faults, "grading/parser.py", "import veritune.runs"),
        (lower_layer_faults, "grading/parser.py", "from .. import training"),
        (lower_layer_faults, "primitives.py", "def f():\n    from veritune import recipes"),
        (lower_layer_faults, "types.py", "if TYPE_CHECKING:\n    from veritune.engines.native import NativeEngine"),
        (lower_layer_faults, "__init__.py", "from veritune.errors import VerituneError"),
        (sibling_faults, "tasks/gsm8k.py", "from veritune.tasks.countdown import extract_answer"),
        (sibling_faults, "recipes/sft.py", "from . import grpo"),
        (third_party_faults, "recipes/sft.py", "from transformers import AutoTokenizer"),
        (third_party_faults, "engines/native.py", "import vllm.sampling_params"),
        (third_party_faults, "training.py", "import matplotlib.pyplot as plt"),
        (torch_faults, "grading/parser.py", "def f():\n    import torch"),
        (torch_faults, "report/plots.py", "from torch import Tensor"),
        (torch_faults, "tasks/countdown.py", "from veritune.primitives import masked_mean"),
        (protocol_faults, "recipes/grpo.py", "from veritune.tasks import load_task"),
        (protocol_faults, "discovery/loop.py", "from veritune.engines.native import NativeEngine"),
    ],
)
def test_a_breach_is_found(rule, importer, source):
    assert len(rule(list(imports_in(source, importer)))) == 1


@pytest.mark.parametrize(
    "importer, source",
    [
        ("tasks/__init__.py", "from veritune.tasks.countdown import CountdownTask"),
        ("grading/parser.py", "from veritune.grading.tokens import tokenize"),
        ("types.py", "if TYPE_CHECKING:\n    import torch"),
        ("report/plots.py", "import matplotlib.pyplot as plt"),
        ("discovery/report.py", "import matplotlib"),
        ("engines/vllm.py", "import vllm"),
        ("policies.py", "from transformers import AutoTokenizer"),
        ("recipes/grpo.py", "from veritune.types import Engine, Task\nfrom veritune import __version__"),
        ("cli.py", "from veritune import configs"),
    ],
)
def test_what_is_allowed_is_let_through(importer, source):
    imports = list(imports_in(source, importer))
    assert imports
    for rule in RULES:
        assert rule(imports) == []
