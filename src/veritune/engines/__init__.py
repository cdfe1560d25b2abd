"""Engines: one file each, behind the three methods of `veritune.core.types.Engine`, and the table of their settings."""

from __future__ import annotations

from veritune.core.errors import ConfigError
from veritune.core.registry import look_up
from veritune.core.types import EngineSettings

ENGINES = {
    "native": "veritune.engines.native.settings:NativeSettings",
    "vllm": "veritune.engines.vllm_settings:VLLMSettings",
    "vllm-server": "veritune.engines.vllm_settings:VLLMServerSettings",
    "api": "veritune.engines.api:APISettings",
}
"""The settings of each engine by its name; they make the engine, and none needs torch to be read."""


def settings_class(engine: str) -> type[EngineSettings]:
    """The settings of an engine by name, or of one from outside by package.module:Class."""
    found = look_up("engine", engine, ENGINES, "veritune.engines")
    if not (isinstance(found, type) and issubclass(found, EngineSettings)):
        raise ConfigError(f"engine is {engine!r}, which is no EngineSettings")
    return found
