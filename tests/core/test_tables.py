"""Settings tables: the class depends on a choice, and a setting has one name in TOML, errors, flags and sweeps."""

import sys
import tomllib
from dataclasses import dataclass, field
from typing import Any

import pytest

from veritune import cli
from veritune.core.config import fill_tables, from_mapping, require, settings, to_toml
from veritune.core.errors import ConfigError
from veritune.core.registry import look_up
from veritune.core.tables import NoSettings, flat_values, flatten, overlay, table


@dataclass(frozen=True, kw_only=True)
class Kettle:
    litres: float = 1.5
    """What it holds."""
    whistles: bool = True
    """Whether it says when it is done."""

    def __post_init__(self) -> None:
        require(self, "litres", self.litres > 0, "positive")


@dataclass(frozen=True, kw_only=True)
class Pot:
    litres: float = 5.0
    """What it holds."""
    lid: str
    """Its lid."""


def vessel(name: str) -> type:
    return look_up("vessel", name, {"kettle": Kettle, "pot": Pot, "none": NoSettings})


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    vessel: str = "kettle"
    """What is put on the fire."""
    vessel_settings: Any = table("vessel", f"{__name__}:vessel")
    """The vessel's own settings."""
    heat: str = "none"
    """The heat."""
    fire_settings: Any = table("heat", f"{__name__}:vessel")
    """Named otherwise than its choice."""
    minutes: int = 3
    """How long."""
    names: tuple[str, ...] = field(default=())
    """Who is asked."""

    def __post_init__(self) -> None:
        fill_tables(self)


def test_a_table_holds_the_defaults_of_what_is_chosen():
    assert Kitchen().vessel_settings == Kettle(litres=1.5)
    assert Kitchen(vessel="none").vessel_settings == NoSettings()
    assert Kitchen(vessel="pot", vessel_settings=Pot(lid="glass")).vessel_settings.litres == 5.0
    with pytest.raises(ConfigError, match=r"vessel_settings is Kettle\(.*\); vessel 'pot' takes Pot"):
        Kitchen(vessel="pot", vessel_settings=Kettle())
    with pytest.raises(ConfigError, match=r"setting 'vessel.lid' is missing"):
        Kitchen(vessel="pot")


def test_tables_survive_toml():
    kitchen = Kitchen(vessel="pot", vessel_settings=Pot(lid="glass"), heat="kettle", fire_settings=Kettle(litres=2.0))
    assert to_toml(kitchen) == (
        'heat = "kettle"\nminutes = 3\nnames = []\n'
        '\n[vessel]\nname = "pot"\nlitres = 5.0\nlid = "glass"\n'
        "\n[fire]\nlitres = 2.0\nwhistles = true\n"
    )
    assert from_mapping(Kitchen, tomllib.loads(to_toml(kitchen)), "test") == kitchen
    assert from_mapping(Kitchen, {"vessel": "kettle", "vessel.litres": 2}, "test").vessel_settings == Kettle(litres=2.0)
    assert from_mapping(Kitchen, {"vessel": {"litres": 2}}, "test").vessel_settings == Kettle(litres=2.0)


def test_every_setting_has_one_name():
    assert flatten({"a": 1, "vessel": {"name": "pot", "lid": "x", "deep": {"er": 2}}, "b.name": 3}) == {
        **{"a": 1, "vessel": "pot", "vessel.lid": "x", "vessel.deep.er": 2, "b": 3}
    }
    assert flat_values(Kitchen()) == {
        **{"vessel": "kettle", "heat": "none", "minutes": 3, "names": ()},
        **{"vessel.litres": 1.5, "vessel.whistles": True},
    }
    described = {setting.name: setting for setting in settings(Kitchen, {"vessel": "pot"})}
    assert list(described) == ["vessel", "heat", "minutes", "names", "vessel.litres", "vessel.lid"]
    assert described["vessel.litres"].default == 5.0 and described["vessel.lid"].documentation == "Its lid."


def test_another_choice_drops_only_what_it_does_not_have():
    below = {"vessel": "kettle", "vessel.litres": 2, "vessel.whistles": False, "minutes": 4}
    assert overlay(Kitchen, below, {"vessel": "pot", "minutes": 5}) == {
        **{"vessel": "pot", "vessel.litres": 2, "minutes": 5}
    }
    assert overlay(Kitchen, below, {"vessel": "kettle"}) == below


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vessel": "ketle"}, r"vessel is 'ketle'; allowed are kettle, pot, none, .* \(did you mean kettle\?\)"),
        (
            {"vessel.litre": 1},
            r"test: vessel kettle: unknown setting 'vessel.litre'; allowed are vessel.litres, "
            r"vessel.whistles \(did you mean vessel.litres\?\)",
        ),
        ({"vessel": {"name": "none", "lid": 1}}, r"test: vessel none: unknown setting 'vessel.lid'"),
        ({"vessel": {"litres": "much"}}, r"vessel.litres is 'much'; it must be of type float"),
        ({"vessel": {"litres": -1}}, r"^vessel.litres is -1.0; it must be positive"),
        ({"vessel": "pot"}, r"setting 'vessel.lid' is missing"),
        ({"vessel": 3}, r"vessel is 3; it must be of type str"),
        ({"minuts": 3}, r"unknown setting 'minuts'; .* \(did you mean minutes\?\)"),
        ({"oven.heat": 3}, r"unknown setting 'oven.heat'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_table(values, said):
    with pytest.raises(ConfigError, match=said):
        from_mapping(Kitchen, values, "test")


def test_a_name_can_be_an_object_from_outside(tmp_path, monkeypatch):
    (tmp_path / "outside_vessel.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Pan:\n    width: int = 28\n"
    )
    (tmp_path / "broken_vessel.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kitchen = from_mapping(Kitchen, {"vessel": "outside_vessel:Pan", "vessel.width": 20}, "test")
    assert kitchen.vessel_settings.width == 20
    for path, said in [
        ("outside_vessel:Pam", r"outside_vessel has no Pam \(did you mean Pan\?\)"),
        ("outside_vessel:dataclass", "they must be a dataclass"),
        ("broken_vessel:Pan", "broken_vessel cannot be imported: ZeroDivisionError: division by zero"),
        ("no_such_module:Pan", "no_such_module cannot be imported: ModuleNotFoundError"),
        (":Pan", "it must be package.module:name"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Kitchen(vessel=path)


# --- Flags -------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys):
    """Exit code, the config that the command was given, and what was printed, for some arguments."""
    given = []
    parts = {"config": Kitchen, "function": given.append}
    monkeypatch.setattr(cli, "_load", parts.__getitem__)
    monkeypatch.setitem(cli.COMMANDS, "cook", cli.Command("Cook.", "config", "function"))

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["cook", *arguments])
        said = capsys.readouterr()
        return exit_info.value.code or 0, given[-1] if given else None, said.out + said.err

    return call


def test_the_chosen_table_has_flags(call, tmp_path):
    file = tmp_path / "kitchen.toml"
    file.write_text('minutes = 7\n[vessel]\nname = "pot"\nlitres = 3.0\nlid = "tin"\n')
    _, _, said = call("--vessel=pot", "--help")
    assert "--vessel-lid TEXT" in said and "[required]" in said and "--vessel-whistles" not in said
    _, _, said = call("--help")
    assert "--vessel-whistles / --no-vessel-whistles" in said and "--vessel-lid" not in said
    assert "--vessel-lid" in call("--config", str(file), "--help")[2]
    assert call("--vessel-litres", "2", "--no-vessel-whistles")[:2] == (
        0,
        Kitchen(vessel_settings=Kettle(litres=2.0, whistles=False)),
    )
    assert call("--config", str(file), "--vessel-lid", "glass")[:2] == (
        0,
        Kitchen(minutes=7, vessel="pot", vessel_settings=Pot(litres=3.0, lid="glass")),
    )
    assert call("--config", str(file), "--vessel", "kettle")[:2] == (
        0,
        Kitchen(minutes=7, vessel_settings=Kettle(litres=3.0)),
    )


def test_a_list_is_given_at_once_or_bit_by_bit(call):
    assert call("--names", "a, b", "--names", "c")[1].names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vessel-whistle"], "'--vessel-whistles'?"),
        (["--vessel", "pott"], "error: vessel is 'pott'; allowed are kettle, pot, none"),
        (["--vessel-litres", "0"], "error: vessel.litres is 0.0; it must be positive\n"),
        (["--vessel-litres", "x"], "error: cook: vessel kettle: vessel.litres is 'x'; it must be of type float\n"),
        (["--config", "nowhere.toml"], "error: cannot read nowhere.toml"),
    ],
)
def test_a_wrong_flag_is_refused_kindly(call, arguments, said):
    code, _, printed = call(*arguments)
    assert code == 2 and said in printed and "Traceback" not in printed


def test_a_setting_of_one_table_alone_needs_no_table_before_it():
    from veritune.core.config import from_mapping
    from veritune.recipes.config import GRPOConfig

    flat = {"max_rows": 7, "seed": 3, "data": "problems.jsonl"}
    nested = {"engine": {"max_rows": 7}, "seed": 3, "task": {"data": "problems.jsonl"}}
    assert from_mapping(GRPOConfig, flat, "test") == from_mapping(GRPOConfig, nested, "test")
    # engine_dtype is the engine's; dtype stays the policy's, whose name it is.
    vllm = from_mapping(GRPOConfig, {"engine": "vllm", "engine_dtype": "float32", "dtype": "bfloat16"}, "test")
    assert (vllm.engine_settings.dtype, vllm.dtype) == ("float32", "bfloat16")
