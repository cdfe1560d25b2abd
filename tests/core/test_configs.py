"""Configs to TOML and back, and what is said of a wrong value."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from veritune.core.config import field_documentation, from_mapping, to_toml
from veritune.core.errors import ConfigError
from veritune.losses import ClipSettings
from veritune.recipes.config import GRPOConfig


@dataclass(frozen=True)
class Settings:
    rate: float = 0.1
    """How fast."""
    name: str = 'a "quoted"\nname'
    """What it
    is called."""
    sizes: tuple[int, ...] = (1, 2)
    """How many."""
    folder: Path | None = None
    """Where."""
    kind: Literal["a", 3] = "a"
    """Which."""
    on: bool = False
    """Whether."""


def test_a_config_survives_toml():
    settings = Settings(rate=1e-5, sizes=(), folder=Path("x/y"), kind=3, on=True)
    assert from_mapping(Settings, tomllib.loads(to_toml(settings)), "test") == settings
    assert from_mapping(Settings, tomllib.loads(to_toml(Settings())), "test") == Settings()
    boundless = Settings(rate=math.inf)
    assert from_mapping(Settings, tomllib.loads(to_toml(boundless)), "test") == boundless


def test_documentation_is_the_string_under_the_field():
    assert field_documentation(Settings)["name"] == "What it is called."
    documented = field_documentation(GRPOConfig)
    assert documented["group_size"] == "Responses sampled for each prompt."
    assert documented["seed"] == "The seed that every random draw of the run is derived from."


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rat": 1}, r"unknown setting 'rat'; allowed are rate, name"),
        ({"rate": "fast"}, r"rate is 'fast'; it must be of type float"),
        ({"rate": True}, r"rate is True; it must be of type float"),
        ({"kind": "b"}, r"kind is 'b'; allowed are a, 3"),
        ({"sizes": "12"}, r"sizes is '12'; it must be a list"),
        ({"sizes": [1, "2"]}, r"sizes is '2'; it must be of type int"),
        ({"on": 1}, r"on is 1; it must be of type bool"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed(values, said):
    with pytest.raises(ConfigError, match=said):
        from_mapping(Settings, values, "test.toml")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout_batch_size": 100}, "rollout_batch_size is 100; it must be a multiple of group_size"),
        ({"train_batch_size": 4}, "train_batch_size is 4; it must be at least group_size"),
        ({"train_batch_size": 96}, "train_batch_size is 96; it must be a divisor of rollout_batch_size"),
        ({"loss_type": "grpo_clip"}, "no old policy"),
        ({"loss_type": "grpo_no_clip"}, "no old policy"),
        ({"top_p": 0.9}, "top_p is 0.9; it must be 1 while training"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({"group_size": 1, "train_batch_size": 256}, "compares siblings"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup_steps": 1000}, "warmup_steps is 1000"),
        ({"steps": 0}, "steps is 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0"),
        ({"loss_settings": ClipSettings()}, "loss_type 'reinforce_with_baseline' takes NoSettings"),
        ({"temperature": float("inf")}, "temperature is inf; it must be .* finite"),
        ({"weight_decay": float("inf")}, "weight_decay is inf; it must be .* finite"),
        ({"kl_coefficient": float("inf")}, "kl_coefficient is inf; it must be .* finite"),
    ],
)
def test_impossible_settings_are_refused_before_anything_loads(settings, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(**settings)


def test_a_loss_brings_its_coefficients():
    values = {"loss_type": "cispo", "train_batch_size": 128, "loss": {"cliprange_high": 0.5}}
    config = from_mapping(GRPOConfig, values, "test.toml")
    assert config.loss_settings == ClipSettings(cliprange=0.2, cliprange_high=0.5)
    assert from_mapping(GRPOConfig, tomllib.loads(to_toml(config)), "test.toml") == config
    for settings, said in (
        ({"cliprange": 0.0}, "loss.cliprange is 0.0; it must be positive"),
        ({"cliprange_high": 0.1}, "loss.cliprange_high is 0.1; it must be at least cliprange"),
        ({"clip": 0.1}, r"unknown setting 'loss.clip'; allowed are loss.cliprange, loss.cliprange_high"),
    ):
        with pytest.raises(ConfigError, match=said):
            from_mapping(GRPOConfig, {**values, "loss": settings}, "test.toml")
    with pytest.raises(ConfigError, match=r"unknown setting 'loss\.cliprange'"):  # of a loss that does not clip
        from_mapping(GRPOConfig, {"loss": {"cliprange": 0.3}}, "test.toml")
    changed = dataclasses.replace(GRPOConfig(), loss_type="gspo", train_batch_size=128)
    assert changed.loss_settings == ClipSettings()


def test_clipping_is_allowed_with_an_old_policy():
    assert GRPOConfig(loss_type="grpo_clip", epochs_per_rollout_batch=2).off_policy
    assert GRPOConfig(loss_type="grpo_clip", train_batch_size=128).off_policy
    assert not GRPOConfig().off_policy
