"""Engines: one file each, behind the three methods of `veritune.types.Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veritune.configs import CommonConfig
from veritune.errors import ConfigError

if TYPE_CHECKING:
    from veritune.policies import Policy
    from veritune.types import Engine


def create_engine(config: CommonConfig, policy: Policy) -> Engine:
    """The engine that `config.engine` names, serving `policy`."""
    if config.engine == "native":
        from veritune.engines.native import NativeEngine

        return NativeEngine(policy, max_rows=config.max_rows)
    raise ConfigError(f"engine is {config.engine!r}; allowed is native")
