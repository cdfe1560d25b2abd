"""The house's import rule, read from the source: a room imports only rooms of a lower layer.

A room is a module or package directly under `veritune`. A new one needs its line in `LAYERS`, and nothing else here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAYERS = [
    ["core"],
    ["losses", "grading"],
    ["model", "primitives"],
    ["tasks", "engines"],
    ["trainer", "discovery", "countdown"],
    ["recipes", "report"],
    ["commands"],
    ["cli"],
]
TORCH_FREE = {"core", "losses", "grading", "tasks", "discovery", "report", "cli"}
TORCH_FREE_FILES = {"trainer/config.py", "recipes/config.py"}
"""A recipe's settings, which its help shows."""
INDEPENDENT = {
    "tasks": {"countdown", "questions"},
    "engines": {"native", "vllm", "vllm_server", "api"},
    "recipes": {"eval", "best_of_n", "sft", "expert_iteration", "grpo", "pretrain"},
}
"""Implementations of a room, which never import one another. They share the helpers that live beside them."""
PROTOCOLS_ONLY = {"recipes"}
"""Rooms that see the `Task` and `Engine` protocols, never a concrete one."""
CONCRETE_BY_NATURE = {"recipes/pretrain.py"}
"""The embedded policy is made from Countdown's own problems."""
ONLY_IN = {
    "vllm": ("engines/vllm.py",),
    "transformers": ("model/policy.py",),
    "matplotlib": ("report/", "discovery/report"),
}

SOURCE = Path(__file__).parents[1] / "src" / "veritune"
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}


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
    """The room "tasks" for "tasks/countdown.py", "losses" for "losses.py", "" for the package's own "__init__.py".

    "__main__.py" is the command line by another name.
    """
    return {"__init__.py": "", "__main__.py": "cli"}.get(path, path.split("/", maxsplit=1)[0].removesuffix(".py"))


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
        room = found.importing_room
        implementations = INDEPENDENT.get(room, set())
        own, other = found.importer.split("/")[1:2], found.module.split(".")[2:3]
        own = [name.removesuffix(".py") for name in own]
        if room_of_module(found.module) == room and own != other and implementations.issuperset(own + other):
            faults.append(f"{found.place}: implementations of {room} never import one another")
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
    return [
        f"{found.place}: {found.importing_room} is free of torch"
        for found in imports
        if is_torch_free(found.importer) and not found.for_types_only and found.module.split(".")[0] == "torch"
    ]


def is_torch_free(path: str) -> bool:
    return room_of_path(path) in TORCH_FREE or path in TORCH_FREE_FILES


def protocol_faults(imports: list[Import]) -> list[str]:
    return [
        f"{found.place}: {found.importing_room} sees the protocols in veritune.core.types alone"
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
    modules = [
        "veritune." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in sorted(SOURCE.rglob("*.py"))
        if is_torch_free(path.relative_to(SOURCE).as_posix()) and path.stem != "sandbox_child"
    ]
    assert len(modules) > 50
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
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
        (lower_layer_faults, "core/errors.py", "from veritune.grading import pool"),
        (lower_layer_faults, "grading/parser.py", "import veritune.trainer.loop"),
        (lower_layer_faults, "grading/parser.py", "from .. import trainer"),
        (lower_layer_faults, "primitives.py", "def f():\n    from veritune import recipes"),
        (
            lower_layer_faults,
            "types.py",
            "if TYPE_CHECKING:\n    from veritune.engines.native.engine import NativeEngine",
        ),
        (lower_layer_faults, "__init__.py", "from veritune.core.errors import VerituneError"),
        (sibling_faults, "tasks/questions.py", "from veritune.tasks.countdown import extract_answer"),
        (sibling_faults, "recipes/sft.py", "from . import grpo"),
        (third_party_faults, "recipes/sft.py", "from transformers import AutoTokenizer"),
        (third_party_faults, "engines/native.py", "import vllm.sampling_params"),
        (third_party_faults, "trainer/loop.py", "import matplotlib.pyplot as plt"),
        (torch_faults, "grading/parser.py", "def f():\n    import torch"),
        (torch_faults, "report/plots.py", "from torch import Tensor"),
        (torch_faults, "recipes/config.py", "import torch"),
        (protocol_faults, "recipes/grpo.py", "from veritune.tasks import load_task"),
        (protocol_faults, "recipes/sft.py", "from veritune.engines.native.engine import NativeEngine"),
    ],
)
def test_a_breach_is_found(rule, importer, source):
    assert len(rule(list(imports_in(source, importer)))) == 1


@pytest.mark.parametrize(
    "importer, source",
    [
        ("tasks/__init__.py", "from veritune.tasks.countdown import CountdownTask"),
        ("grading/math/parser.py", "from veritune.grading.math.tokens import tokenize"),
        ("core/types.py", "if TYPE_CHECKING:\n    import torch"),
        ("report/plots.py", "import matplotlib.pyplot as plt"),
        ("discovery/report.py", "import matplotlib"),
        ("engines/vllm.py", "import vllm"),
        ("model/policy.py", "from transformers import AutoTokenizer"),
        ("recipes/grpo.py", "from veritune.core.types import Engine, Task\nfrom veritune import __version__"),
        ("cli.py", "from veritune.core import config"),
    ],
)
def test_what_is_allowed_is_let_through(importer, source):
    imports = list(imports_in(source, importer))
    assert imports
    for rule in RULES:
        assert rule(imports) == []


def test_grpo_is_read_in_nine_files():
    page = (SOURCE.parents[1] / "README.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("**Read GRPO in this order**")
    files = re.findall(r"\(src/veritune/(.+?\.py)\)", listed.partition("\n\n")[0])
    assert files[0] == "recipes/grpo.py" and 7 <= len(files) <= 9
    assert sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 2200
