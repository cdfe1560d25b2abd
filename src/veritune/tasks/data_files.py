"""Rows with named columns, from JSONL, Parquet and Arrow files and from data sets of the hub, each with its place.

A caller says what a row must be by the function that reads one; every fault is a DataError that names file, row and
column, or is counted where bad rows are to be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from veritune.core.errors import DataError

HUB_PREFIX = "hub:"
"""What a source begins with that is a data set id: hub:OWNER/NAME, and optionally :CONFIGURATION and @SPLIT."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can spell and no tokenizer reads."""

Record = TypeVar("Record")


class Place(NamedTuple):
    """Where a row stands, for a person: `problems.jsonl line 3`."""

    source: str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.source} {self.unit} {self.number}"


RawRows = Iterator[tuple[Place, Any]]
"""Rows before they are checked: a JSON text as bytes, or a value."""
Columns = Sequence[str] | None


@dataclass(frozen=True)
class Table(Generic[Record]):
    """The records of a source, in its order, and what was left out of them."""

    records: list[Record]
    skipped: int
    """Bad rows that were left out."""
    first_fault: str | None
    """What was wrong with the first of these."""


def read_table(
    source: Path,
    read_row: Callable[[Mapping[str, Any], Place], Record],
    *,
    columns: Columns = None,
    skip_bad_rows: bool = False,
) -> Table[Record]:
    """Every row of a file (.jsonl, .parquet or .arrow) or of a hub data set, as `read_row(row, place)` makes it.

    `columns` are those that `read_row` needs, for formats that can read some alone; None reads all. A row that is no
    object of named columns, or for which `read_row` raises DataError, raises it, or with `skip_bad_rows` is left out
    and counted. Raises DataError for a source that cannot be read or that has no row, or no good one.
    """
    records: list[Record] = []
    faults: list[DataError] = []
    for place, raw in _raw_rows(source, columns):
        try:
            records.append(read_row(_as_row(raw, place), place))
        except DataError as error:
            if not skip_bad_rows:
                raise
            faults.append(error)
    if not records and faults:
        raise DataError(f"{source}: none of its {len(faults)} rows can be used; the first: {faults[0]}")
    if not records:
        raise DataError(f"{source}: it has no rows")
    return Table(records, len(faults), str(faults[0]) if faults else None)


def cell(row: Mapping[str, Any], column: str, place: Place) -> Any:
    """The value of a column; DataError naming the place, the column and those that there are where it is missing."""
    if column not in row:
        raise DataError(f"{place}: {column!r} is missing; the row has {', '.join(map(repr, row)) or 'nothing'}")
    return row[column]


def text_cell(row: Mapping[str, Any], column: str, place: Place) -> str:
    """The value of a column that must be text with something in it."""
    value = cell(row, column, place)
    if not isinstance(value, str) or not value.strip() or _SURROGATE.search(value):
        raise DataError(f"{place}: {column!r} is {value!r:.80}; it must be text that is not empty")
    return value


def _as_row(raw: Any, place: Place) -> Mapping[str, Any]:
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:  # ValueError covers both broken JSON and broken UTF-8
            raise DataError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{place}: the row is {raw!r:.80}; it must be an object with named columns")
    return raw


def _raw_rows(source: Path, columns: Columns) -> RawRows:
    if str(source).startswith(HUB_PREFIX):
        return _hub_rows(str(source), columns)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
    if source.is_dir():
        raise DataError(f"{source}: is a folder; give one of its files")
    reader = readers.get(source.suffix.lower())
    if reader is None:
        hint = f"; a data set of the hub is written {HUB_PREFIX}{source}" if not source.exists() else ""
        raise DataError(
            f"{source}: files that end in {source.suffix!r} are not read; allowed are {', '.join(readers)}{hint}"
        )
    if not source.is_file():
        raise DataError(f"{source}: there is no such file")
    return reader(source, columns)


def _jsonl_rows(path: Path, columns: Columns) -> RawRows:
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield Place(str(path), "line", line_number), line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parquet_rows(path: Path, columns: Columns) -> RawRows:
    pyarrow = _import_pyarrow(path, "Parquet")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = _projection(file.schema_arrow.names, columns)
            yield from _batch_rows(path, file.iter_batches(columns=chosen))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {_first_line(error)}") from error


def _arrow_rows(path: Path, columns: Columns) -> RawRows:
    pyarrow = _import_pyarrow(path, "Arrow")
    try:
        with pyarrow.OSFile(str(path)) as file:
            try:
                reader = pyarrow.ipc.open_file(file)
                batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:  # the other of Arrow's two forms, in which `datasets` keeps its tables
                file.seek(0)
                batches = reader = pyarrow.ipc.open_stream(file)
            chosen = _projection(reader.schema.names, columns)
            yield from _batch_rows(path, (batch.select(chosen) if chosen else batch for batch in batches))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Arrow file: {_first_line(error)}") from error


def _batch_rows(path: Path, batches: Iterable[Any]) -> RawRows:
    rows = (row for batch in batches for row in batch.to_pylist())
    for row_number, row in enumerate(rows, start=1):
        yield Place(str(path), "row", row_number), row


def _projection(names: Sequence[str], columns: Columns) -> list[str] | None:
    """The columns to read: those that are needed, or all where one is missing, so that its error can name them."""
    return list(columns) if columns is not None and set(columns) <= set(names) else None


def _import_pyarrow(path: Path, form: str) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: {form} files need pyarrow; pip install 'veritune[parquet]'") from error
    return pyarrow


def _hub_rows(source: str, columns: Columns) -> RawRows:
    name, _, split = source.removeprefix(HUB_PREFIX).partition("@")
    dataset, _, configuration = name.partition(":")
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{source}: data sets of the hub need `datasets`; pip install 'veritune[hub]'") from error
    try:
        table = load_dataset(dataset, configuration or None, split=split or "train")
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{source}: the data set cannot be loaded: {_first_line(error)}") from error
    chosen = _projection(table.column_names, columns)
    for row_number, row in enumerate(table.select_columns(chosen) if chosen else table, start=1):
        yield Place(source, "row", row_number), row


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
