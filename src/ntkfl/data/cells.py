"""Cells of a table, as text: how CSV and Parquet files are read, and how a column becomes numbers or classes."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import DataError, unknown

_SHOWN = 10  # names of columns in an error
_WRONG = 5  # bad cells in an error
_FEW = 20  # rows of which each may have a class of its own
_LARGEST = 8 << 30  # bytes of a CSV: it is held as text while it is read


def read_csv(path: Path) -> dict[str, list[str]]:
    try:
        if path.stat().st_size > _LARGEST:
            raise DataError(f"{path} is larger than {_LARGEST >> 30} GiB: save it as .npz")
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines, strict=True)
            header = [name.strip() for name in next(reader, [])]
            rows = [row for row in reader if row]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    if len(set(header)) < len(header) or "" in header:
        raise DataError(f"{path}: the first line must name every column, each once")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} values, the header has {len(header)}")
    return {name: [row[i].strip() for row in rows] for i, name in enumerate(header)}


def read_parquet(path: Path) -> dict[str, list[str]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow; or save the table as CSV") from None
    try:
        table = parquet.read_table(path)
        return {name: [str(value) for value in table[name].to_pylist()] for name in table.column_names}
    except Exception as error:  # whatever a broken file makes it raise
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None


def numbers(path: Path, name: str, values: Sequence[str], hint: str = "") -> NDArray[Any]:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        pass
    wrong = [(number, value) for number, value in enumerate(values, start=2) if not _is_number(value)]
    if wrong:
        cells = ", ".join(f"row {number} has {value[:40]!r}" for number, value in wrong[:_WRONG])
        more = f" and {len(wrong) - _WRONG:,} more" if len(wrong) > _WRONG else ""
        raise DataError(f"{path}: {cells}{more} in column {name!r}, which must be numbers{hint}")
    raise DataError(f"{path}: column {name!r} does not hold numbers")


def labels(
    path: Path, name: str, values: Sequence[str], class_names: Sequence[str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """(classes or real targets [N], the classes' names where labels are text or `class_names` are given)."""
    if class_names and set(values) <= set(class_names):
        number = {own: i for i, own in enumerate(class_names)}
        return np.array([number[value] for value in values], dtype=np.int64), tuple(class_names)
    if all(_is_whole(value) for value in values):
        return np.array(values, dtype=np.float64).astype(np.int64), tuple(class_names)
    texts = [value for value in values if not _is_number(value)]
    if not texts or any(_is_number(value) and not _is_whole(value) for value in values):
        return numbers(path, name, values), ()  # real-valued targets, and an error where one of them is text
    if class_names:
        wrong = next(value for value in values if value not in class_names)
        raise DataError(f"{path}: {unknown('class', wrong[:40], class_names)}")
    known, y = np.unique(np.asarray(values), return_inverse=True)
    if len(known) == len(values) > _FEW or "" in known:
        if "" in known:
            raise DataError(f"{path}: {rows_of(values, '')} without a label in column {name!r}")
        raise DataError(f"{path}: column {name!r} has a label of its own in every row: is it the column of labels?")
    return y.astype(np.int64), tuple(map(str, known))


def rows_of(values: Sequence[str], value: str) -> str:
    """ "row 3", or "rows 3, 7", of a file whose header is row 1; at most five by number."""
    found = [str(number) for number, own in enumerate(values, start=2) if own == value]
    more = f" and {len(found) - _WRONG:,} more" if len(found) > _WRONG else ""
    return f"row{'s' if len(found) > 1 else ''} {', '.join(found[:_WRONG])}{more}"


def listed(names: Iterable[str]) -> str:
    """At most ten of them: tables of pixels have hundreds."""
    known = [repr(name) if "," in name else name for name in names]
    return ", ".join(known if len(known) <= _SHOWN else [*known[: _SHOWN // 2], "…", *known[-_SHOWN // 2 :]])


def _is_whole(value: str) -> bool:
    return value.removeprefix("-").isdecimal() and len(value) < 10


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
