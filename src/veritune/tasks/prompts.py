"""Prompt templates: a text with `{question}` in it, shipped under `assets/prompts` or the user's own file."""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from veritune.core.errors import ConfigError
from veritune.core.types import Example

PLACEHOLDER = "{question}"


def shipped_prompts() -> list[str]:
    """The names that `load_prompt` knows without a path."""
    folder = resources.files("veritune") / "assets" / "prompts"
    return sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir() if entry.name.endswith(".txt"))


def load_prompt(name_or_path: str) -> str:
    """The text of a shipped template, or of the file at a path, byte for byte: a trailing newline belongs to it.

    Raises ConfigError where there is neither, the file is not UTF-8 text, or it has no `{question}`.
    """
    if name_or_path in shipped_prompts():
        source = resources.files("veritune") / "assets" / "prompts" / f"{name_or_path}.txt"
        return source.read_bytes().decode("utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(shipped_prompts())
        raise ConfigError(f"prompt is {name_or_path!r}; it must be one of {known}, or the path of a file")
    try:
        template = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt file {path} cannot be read as UTF-8 text: {error}") from error
    if PLACEHOLDER not in template:
        raise ConfigError(f"prompt file {path} has no {PLACEHOLDER}, the place where the question goes")
    return template


def fill_prompt(template: str, question: str) -> str:
    """The template with the question in its place. Any other brace, in either text, stays as it is."""
    return template.replace(PLACEHOLDER, question)


class TemplateTask:
    """The part of a task that puts its questions into a template, which `--prompt` can replace."""

    template: ClassVar[str] = "r1_zero"
    """The name of a shipped prompt, or the path of a text file with {question} in it."""
    chat_template: ClassVar[str] = "question_only"
    """The same where the prompt is sent as a user's message."""

    def prompt(self, example: Example) -> str:
        """The question in the prompt."""
        return fill_prompt(self._text, example.question)

    @cached_property
    def _text(self) -> str:
        return load_prompt(self.template)

    def __getstate__(self) -> dict[str, Any]:
        """What a grading process is sent: nothing that was read or computed."""
        return {name: value for name, value in vars(self).items() if name != "notify" and not name.startswith("_")}
