"""Rows with their places, from every kind of source, whole and broken."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from veritune.core.errors import DataError
from veritune.tasks.data_files import cell, read_table, text_cell

ROWS = [{"q": "one", "a": 1, "note": "x"}, {"q": "two", "a": 2, "note": "y"}, {"q": "three", "a": 3, "note": "z"}]


def write(path, rows=ROWS):
    if path.suffix.lower() == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        new_writer = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
        with new_writer(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def pair(row, place):
    return place.number, text_cell(row, "q", place), cell(row, "a", place)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "file.arrow", "stream.arrow", "ROWS.JSONL"])
@pytest.mark.parametrize("columns", [None, ("q", "a")])
def test_every_form_gives_the_same_records(tmp_path, name, columns):
    table = read_table(write(tmp_path / name), pair, columns=columns)
    assert table.records == [(1, "one", 1), (2, "two", 2), (3, "three", 3)]
    assert (table.skipped, table.first_fault) == (0, None)


@pytest.mark.parametrize("name", ["rows.parquet", "file.arrow", "stream.arrow"])
def test_only_the_columns_that_are_needed_are_read_if_all_are_there(tmp_path, name):
    seen = []
    read_table(write(tmp_path / name), lambda row, place: seen.append(sorted(row)), columns=("q", "a"))
    assert seen == [["a", "q"]] * 3
    with pytest.raises(DataError, match=r"row 1: 'b' is missing; the row has 'q', 'a', 'note'"):
        read_table(tmp_path / name, lambda row, place: cell(row, "b", place), columns=("q", "b"))


def test_blank_lines_count_as_lines_but_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "one", "a": 1}\r\n\r\n  \n{"q": "two", "a": 2}')
    assert read_table(path, pair).records == [(1, "one", 1), (4, "two", 2)]


BROKEN = [
    ('{"q": "one", ', "line 2: not valid JSON"),
    ('{"q": "\xff"}', "line 2: not valid JSON"),
    ("[" * 100_000, "line 2: not valid JSON"),
    ("1" * 5000, "line 2: "),
    ("[1, 2]", r"line 2: the row is \[1, 2\]; it must be an object with named columns"),
    ("null", "line 2: the row is None"),
    ('{"a": 1}', "line 2: 'q' is missing; the row has 'a'"),
    ("{}", "line 2: 'q' is missing; the row has nothing"),
    ('{"q": 3, "a": 1}', "line 2: 'q' is 3; it must be text that is not empty"),
    ('{"q": " \\n", "a": 1}', "line 2: 'q' is"),
    ('{"q": "\\ud800", "a": 1}', "line 2: 'q' is"),
]


@pytest.mark.parametrize("line, message", BROKEN, ids=range(len(BROKEN)))
def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"q": "one", "a": 1}\n' + line.encode("latin-1") + b'\n{"q": "two", "a": 2}\n{}\n')
    with pytest.raises(DataError, match=message) as caught:
        read_table(path, pair)
    assert str(caught.value).startswith(f"{path} line 2: ") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200
    table = read_table(path, pair, skip_bad_rows=True)
    assert [record[1] for record in table.records] == ["one", "two"]
    assert (table.skipped, table.first_fault) == (2, str(caught.value))


def test_sources_that_hold_nothing_usable_are_named(tmp_path):
    pytest.importorskip("pyarrow")
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    bad.write_text("{}\n[]\n")
    empty.write_text("\n")
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "junk.arrow").write_bytes(b"ARROW1")
    (tmp_path / "table.csv").write_text("q,a\n")
    for source, message in [
        (bad, "none of its 2 rows can be used; the first: .*line 1: 'q' is missing"),
        (empty, "it has no rows"),
        (tmp_path / "missing.jsonl", "there is no such file"),
        (tmp_path / "junk.parquet", "not a readable Parquet file"),
        (tmp_path / "junk.arrow", "not a readable Arrow file"),
        (tmp_path / "table.csv", r"files that end in '.csv' are not read; allowed are .jsonl, .parquet, .arrow$"),
        (tmp_path, "is a folder; give one of its files"),
        (Path("owner/name"), "a data set of the hub is written hub:owner/name"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read_table(source, pair, skip_bad_rows=True)
        assert str(caught.value).startswith(str(source)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"need pyarrow; pip install 'veritune\[parquet\]'"):
        read_table(tmp_path / name, pair)


# The hub


class FakeTable(list):
    column_names = ("q", "a", "note")

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` package that notes how it is called."""
    calls = []

    class DatasetsError(Exception):
        pass

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        if name == "no/network":
            raise ConnectionError("Couldn't reach 'no/network' on the Hub\n(see below)")
        if name == "not/generated":
            raise DatasetsError
        return FakeTable(ROWS)

    package, exceptions = types.ModuleType("datasets"), types.ModuleType("datasets.exceptions")
    package.load_dataset, exceptions.DatasetsError = load_dataset, DatasetsError
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    return calls


def test_a_hub_data_set_is_read_with_its_configuration_and_split(hub):
    records = [(1, "one", 1), (2, "two", 2), (3, "three", 3)]
    assert read_table(Path("hub:openai/gsm8k:main@test"), pair, columns=("q", "a")).records == records
    assert read_table(Path("hub:owner/name"), pair).records == records
    assert hub == [("openai/gsm8k", "main", "test"), ("owner/name", None, "train")]
    with pytest.raises(DataError, match=r"^hub:owner/name row 1: 'b' is missing"):
        read_table(Path("hub:owner/name"), lambda row, place: cell(row, "b", place))


def test_a_hub_that_fails_is_one_line(hub):
    for source, message in [
        ("hub:no/network", "the data set cannot be loaded: Couldn't reach 'no/network' on the Hub$"),
        ("hub:not/generated", "the data set cannot be loaded: DatasetsError$"),
    ]:
        with pytest.raises(DataError, match=f"^{source}: {message}"):
            read_table(Path(source), pair)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"^hub:owner/name: .* need `datasets`; pip install 'veritune\[hub\]'"):
        read_table(Path("hub:owner/name"), pair)
