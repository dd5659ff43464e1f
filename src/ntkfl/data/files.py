"""A user's own data in one file: CSV, Parquet or .npz, of one client or of many.

A table has a column `label`; `client`, where there is one, says whose a row is, and `split` is "train" or "test". All
other columns are numbers, the features. An .npz has x [N, …], y [N] and, likewise, `client` [N], `test_x` and `test_y`.
"""

from __future__ import annotations

import csv
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ntkfl.data.arrays import read_npz
from ntkfl.data.dataset import RowDataset
from ntkfl.data.from_arrays import from_clients
from ntkfl.data.seeds import generator
from ntkfl.errors import DataError

SUFFIXES = (".csv", ".parquet", ".npz")
LABEL, CLIENT, SPLIT = "label", "client", "split"
_TEST_SHARE = 0.2  # of the rows, where a file does not say which are for testing
_LARGEST = 8 << 30  # bytes of a CSV: it is held as text while it is read


class _Content(NamedTuple):
    x: NDArray[Any]
    y: NDArray[Any]
    clients: NDArray[Any] | None
    test: NDArray[np.bool_] | None  # which rows are for testing


def is_data_file(name: str) -> bool:
    """Whether a dataset's name is that of a file."""
    return Path(name).suffix.lower() in SUFFIXES


def from_file(path: Path | str, *, classes: int | None = None, tokens: bool = False) -> RowDataset:
    """Training and test rows of a file, to be dealt to clients by a partition, such as `ByClient`.

    Where the file does not say which rows are for testing, a fifth of them is, drawn at random but always the same.
    `classes` and `tokens` are as for `from_clients`.
    """
    path = Path(path)
    content = _read(path)
    test = content.test
    if test is None:
        test = np.zeros(len(content.y), dtype=bool)
        chosen = generator(0, "test rows").permutation(len(test))[: max(1, round(_TEST_SHARE * len(test)))]
        test[chosen] = True
    if test.all() or not test.any():
        raise DataError(f"{path}: all rows are for {'testing' if test.all() else 'training'}, none for the other")
    parts = [(content.x[rows], content.y[rows]) for rows in (~test, test)]
    whole = from_clients(parts[:1], test=parts[1], classes=classes, name=path.name, tokens=tokens)
    writers = None
    if content.clients is not None:
        writers = torch.from_numpy(np.unique(content.clients[~test], return_inverse=True)[1].astype(np.int64))
    return RowDataset(str(path), whole.rows, whole.test_rows, whole.classes, writers)


def read_rows(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """x [n, features] and y [n] of one client's table: all its rows, whatever `client` and `split` say."""
    content = _read(path)
    return content.x, content.y


def _read(path: Path) -> _Content:
    if path.suffix.lower() == ".npz":
        return _read_npz(path)
    columns = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    if LABEL not in columns:
        raise DataError(f"{path} has no column {LABEL!r}; its columns are {', '.join(columns)}")
    features = [name for name in columns if name not in (LABEL, CLIENT, SPLIT)]
    if not features:
        raise DataError(f"{path} has no features: every column but {LABEL!r}, {CLIENT!r} and {SPLIT!r} is one")
    x = np.stack([_numbers(path, name, columns[name]) for name in features], axis=1)
    y = _numbers(path, LABEL, columns[LABEL])
    if all(value.removeprefix("-").isdecimal() and len(value) < 10 for value in columns[LABEL]):
        y = y.astype(np.int64)  # classes; with a decimal point they are real-valued targets
    clients = np.asarray(columns[CLIENT]) if CLIENT in columns else None
    return _Content(x, y, clients, _test_rows(path, columns[SPLIT]) if SPLIT in columns else None)


def _read_csv(path: Path) -> dict[str, list[str]]:
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


def _read_parquet(path: Path) -> dict[str, list[str]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow; or save the table as CSV") from None
    try:
        table = parquet.read_table(path)
        return {name: [str(value) for value in table[name].to_pylist()] for name in table.column_names}
    except Exception as error:  # whatever a broken file makes it raise
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None


def _numbers(path: Path, name: str, values: list[str]) -> NDArray[Any]:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        pass
    for number, value in enumerate(values, start=2):
        try:
            float(value)
        except ValueError:
            raise DataError(
                f"{path}: row {number} has {value[:40]!r} in column {name!r}, which must be numbers"
            ) from None
    raise DataError(f"{path}: column {name!r} does not hold numbers")


def _test_rows(path: Path, values: list[str]) -> NDArray[np.bool_]:
    wrong = set(values) - {"train", "test"}
    if wrong:
        raise DataError(f"{path}: column {SPLIT!r} has {min(wrong)[:40]!r}; it must be train or test")
    return np.array([value == "test" for value in values])


def _read_npz(path: Path) -> _Content:
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
    except Exception:  # broken archives raise whatever their reader comes across
        names = set()  # `read_npz` says what is wrong
    kinds: dict[str, tuple[str, int | None]] = {"x": ("biuf", None), "y": ("biuf", None)}
    more: dict[str, tuple[str, int | None]] = {
        "client": ("biuU", 1),
        "test_x": ("biuf", None),
        "test_y": ("biuf", None),
    }
    arrays = read_npz(path, kinds | {name: kind for name, kind in more.items() if name in names})
    x, y, clients = arrays["x"], arrays["y"], arrays.get("client")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or (clients is not None and len(clients) != len(y)):
        raise DataError(f"{path}: x {list(x.shape)}, y {list(y.shape)} and client must have one entry per row")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError(f"{path}: test_x and test_y come together")
    if "test_x" not in arrays:
        return _Content(x, y, clients, None)
    test_x, test_y = arrays["test_x"], arrays["test_y"]
    real = {array.dtype.kind == "f" for array in (y, test_y)}
    if (
        test_x.shape[1:] != x.shape[1:]
        or test_y.shape[1:] != y.shape[1:]
        or len(test_x) != len(test_y)
        or len(real) > 1
    ):
        raise DataError(f"{path}: test_x {list(test_x.shape)} and test_y {list(test_y.shape)} do not fit x and y")
    test = np.arange(len(y) + len(test_y)) >= len(y)
    if clients is not None:
        clients = np.concatenate([clients, np.resize(clients, len(test_y))])  # of no meaning: test rows have no client
    return _Content(np.concatenate([x, test_x]), np.concatenate([y, test_y]), clients, test)
