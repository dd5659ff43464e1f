"""A dataset by its name, such as that of a user's own file or folder: the one loader behind every command.

A file is CSV, Parquet or .npz, of one client or of many.

A table has a column of labels; an optional one names the client of each row, and a third is "train" or "test". All
other columns are numbers, the features. An .npz has x [N, …], y [N] and, likewise, `client` [N], `test_x` and `test_y`.
Labels may be text: classes by name.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.dataset import Dataset
from ntkfl.data.own import PICTURES, from_clients, from_folders, pictures, read_picture
from ntkfl.data.published import read_npz
from ntkfl.errors import DataError
from ntkfl.extras import missing

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SUFFIXES = (".csv", ".parquet", ".npz")
FORMS = ("FILE.csv", "FILE.npz", "FOLDER", "package.module:function")  # for errors
Cells: TypeAlias = NDArray[Any]
# A file's rows x [N, …] with labels [N] as they are written; whose each is, and which are for testing, where the file
# says so; the names of features, of a table.
_Content: TypeAlias = tuple[Cells, Cells, Cells | None, NDArray[np.bool_] | None, tuple[str, ...]]
_TEST_SHARE = 0.2  # of the rows, where a file does not say which are for testing
_FEW = 20  # rows of which each may have a class of its own
_MANY = 50  # whole numbers that are classes without a word, or a twentieth of the rows


def is_data_file(name: str) -> bool:
    """Whether a dataset's name is that of a file."""
    return Path(name).suffix.lower() in SUFFIXES


def is_own(name: str) -> bool:
    """Whether a dataset's name is that of a user's own file or folder."""
    return name not in NAMES and (is_data_file(name) or (bool(name) and isdir(name)))


def open_dataset(name: str, classes: Sequence[str] | None = None, **columns: str | None) -> Dataset:
    """Rows to be dealt by a partition: of a dataset with a name, of a CSV, Parquet or .npz file with these `columns`
    (and `targets`, see `from_file`), or of a folder of pictures, CLIENT/CLASS/FILE beside test/CLASS/FILE.
    """
    if name in NAMES:
        return load(name)
    if is_data_file(name):
        return from_file(name, classes=classes, **columns)
    first = next((p for p in sorted(Path(name).glob("*/*/*")) if p.suffix.lower() in PICTURES), None)
    if first is None:
        raise DataError(f"{name} holds no pictures as CLIENT/CLASS/FILE, beside test/CLASS/FILE")
    return replace(from_folders(name, pictures(read_picture(first).shape), classes=classes).pooled(), name=name)


def own_digest(name: str) -> str:
    """A sha256 (hex) that changes with the names, sizes and times of a folder's files, or of the one file."""
    files = sorted(path for path in Path(name).rglob("*") if path.is_file()) or [Path(name)]
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def from_file(
    path: Path | str,
    *,
    label: str | None = None,
    client: str | None = None,
    split: str | None = None,
    targets: str | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Training and test rows of a file, to be dealt to clients by a partition, such as `ByClient`.

    `label`, `client` and `split` name its columns; by default they are called so (labels of an .npz: y). `classes` are
    the labels that there may be, in the order of their numbers. Without them, labels that are text are numbered by
    name, and whole numbers are classes up to the largest: that tells which labels occur, so that differential privacy
    asks for `classes`. Where the file does not say which rows are for testing, about a fifth of them is, by a hash of
    each row.

    `targets` says what numbers are, "real" or "classes"; by default whole ones are classes. "numbers" means "real"
    unless classes have names; "unknown" refuses whole numbers.
    """
    path = Path(path)
    read = _read_npz if path.suffix.lower() == ".npz" else _read_table
    x, raw, clients, test, features = read(path, label, client, split)
    about = {} if test is not None else {"test": "a random part of all rows"}
    test = draw_test(x) if test is None else test
    if test.all() or not test.any():
        raise DataError(f"{path}: all rows are for {'testing' if test.all() else 'training'}, none for the other")
    y, names = _numbered(path, raw, classes)
    real = targets == "real" or (targets == "numbers" and not names)
    if targets == "unknown" and not names and y.dtype.kind != "f":
        raise DataError(f"{path}: targets are whole numbers: say whether they are real or classes (--targets real)")
    if targets is None and not names and y.dtype.kind != "f" and len(np.unique(y)) > max(_MANY, len(y) // 20):
        raise DataError(
            f"{path}: the labels are {len(np.unique(y)):,} different whole numbers: say what they are by "
            "--set data.targets=real (with --set loss=mse) or --set data.targets=classes"
        )
    if real and names:
        raise DataError(f"{path}: labels are classes, such as {names[0][:40]!r}, and not real targets")
    if targets == "classes" and (y % 1 != 0).any():
        raise DataError(f"{path}: targets are told to be classes, and there are numbers that are not whole")
    if real or targets == "classes":
        y = y.astype(np.float32 if real else np.int64)
    fed = from_clients([(x[~test], y[~test])], test=(x[test], y[test]), name=path.name, class_names=names)
    rows = replace(
        fed.pooled(),
        name=str(path),
        writers=None,
        feature_names=features,
        classes_declared=classes is not None or y.dtype.kind == "f",
        description=about,
    )
    if clients is None:
        return rows
    known, writers = np.unique(clients[~test], return_inverse=True)
    return replace(rows, writers=torch.from_numpy(writers.astype(np.int64)), client_names=tuple(map(str, known)))


def draw_test(x: Cells) -> NDArray[np.bool_]:
    """Which rows of x [n, …] are for testing, where nothing says it: about a fifth, by a hash of each row's inputs. So
    where a row goes does not depend on other rows, as ε has it, and equal rows are on one side.
    """
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8, key=b"ntkfl test rows v1").digest() for row in x]
    places = np.frombuffer(b"".join(hashes), dtype="<u8") / 2.0**64
    test: NDArray[np.bool_] = places <= max(_TEST_SHARE, places.min(initial=1.0))  # of a few rows, one at least
    return test


def _numbered(path: Path, raw: Cells, classes: Sequence[str] | None) -> tuple[Cells, tuple[str, ...]]:
    """(labels as numbers, the classes' names where they are named): places in `classes`, or the numbers that are
    written, or else places among the texts that occur, sorted.
    """
    if classes is None:
        for kind in (np.int64, np.float64):
            try:
                return raw if raw.dtype.kind in "biuf" else raw.astype(kind), ()
            except (ValueError, OverflowError):
                continue
    if raw.ndim != 1:
        raise DataError(f"{path}: labels that name classes are one per row, not {list(raw.shape)}")
    found, y = np.unique(raw.astype(str), return_inverse=True)
    names = tuple(map(str, found)) if classes is None else tuple(classes)
    for name in map(str, found):
        if name == "" or name not in names:
            where = f"row {2 + int(np.flatnonzero(raw.astype(str) == name)[0])}"
            raise DataError(f"{path}: {where} has the label {name[:40]!r}" + (f", none of {names}" if classes else ""))
    if classes is None and len(names) > max(_FEW, len(raw) // 2):
        raise DataError(f"{path}: half the rows have a label of their own: is it the column of labels?")
    return np.array([names.index(str(name)) for name in found])[y], names


def _read_table(path: Path, label: str | None, client: str | None, split: str | None) -> _Content:
    """A CSV or Parquet file. Its columns of labels, clients and splits hold what is written there."""
    named = {"label": label or "label", "client": client or "client", "split": split or "split"}
    frame = _frame(path, [*named.values()])
    for role, given in (("label", named["label"]), ("client", client), ("split", split)):
        if given is not None and given not in frame:
            columns = ", ".join([*frame.columns[:10], *(["…"] if len(frame.columns) > 10 else [])])
            raise DataError(
                f"{path} has no column {given!r}; its columns are {columns}: say which it is by --{role}-column "
                f"(in Python: {role}=)"
            )
    features = [str(name) for name in frame if name not in named.values()]
    if not features:
        raise DataError(f"{path} has no features: every column but {', '.join(named.values())} is one")
    x = np.stack([_numbers(path, frame[name]) for name in features], axis=1)
    texts = {role: frame[name].to_numpy(str) if name in frame else None for role, name in named.items()}
    raw, clients, parts = texts.values()
    assert raw is not None
    if clients is not None and (clients == "").any():
        raise DataError(f"{path}: row {2 + int((clients == '').argmax())} has no client in column {named['client']!r}")
    if parts is not None and (wrong := {*parts} - {"train", "test"}):
        raise DataError(f"{path}: column {named['split']!r} has {min(wrong)[:40]!r}; it must be train or test")
    return x, raw, clients, None if parts is None else parts == "test", tuple(features)


def _frame(path: Path, texts: Sequence[str]) -> DataFrame:
    """What pandas reads; names, and cells of the columns `texts`, without spaces around them."""
    try:
        import pandas
    except ImportError:
        raise missing(f"{path}: a table", "data") from None
    try:
        # a row that is longer than the header
        with warnings.catch_warnings(action="error", category=pandas.errors.ParserWarning):
            if path.suffix.lower() == ".parquet":
                frame = pandas.read_parquet(path)
            else:
                written = dict.fromkeys(texts, str)
                frame = pandas.read_csv(path, dtype=written, keep_default_na=False, index_col=False)
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow; or save the table as CSV") from None
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except Exception as error:  # whatever a broken file makes it raise
        with path.open("rb") as file:
            hint = "; are its columns separated by ';'? Save it with commas" if b";" in file.read(1000) else ""
        raise DataError(f"{path} cannot be read as a table: {' '.join(str(error).split())}{hint}") from None
    if frame.empty:
        raise DataError(f"{path} has no rows below its header")
    frame.columns = frame.columns.astype(str).str.strip()
    for name in frame.columns.intersection([*texts]):
        frame[name] = frame[name].astype(object).fillna("").astype(str).str.strip()
    return frame


def _numbers(path: Path, column: Series) -> NDArray[np.float64]:
    """A feature [N]. An error has the two lines of pandas that make numbers of what is none, as notes."""
    import pandas

    texts = column.astype(str)
    dates = column.dtype.kind in "mM"  # of which pandas would make nanoseconds
    found: NDArray[np.float64] = pandas.to_numeric(texts if dates else column, errors="coerce").to_numpy(
        np.float64, na_value=np.nan
    )
    if not (wrong := np.isnan(found)).any():
        return found
    name, row, read = str(column.name), int(wrong.argmax()), f"pandas.read_{path.suffix.lower()[1:]}({path.name!r})"
    if wrong.mean() > 0.5:
        what, how = (
            "holds text, and features must be numbers",
            "give each value a column of its own, at all sites alike",
        )
        mend = f"t = pandas.get_dummies({read}, columns=[{name!r}], dtype=int)", "t"
    else:
        what, how = (
            f"has no number in {int(wrong.sum()):,} of {len(wrong):,} rows",
            "leave these out, or fill them by fillna",
        )
        mend = f"t = {read}; t[{name!r}] = pandas.to_numeric(t[{name!r}], errors='coerce')", "t.dropna()"
    error = DataError(
        f"{path}: column {name!r} (row {row + 2} has {texts.iloc[row][:40]!r}) {what}: if it names the client or the "
        f"label, say so by --client-column or --label-column; else {how}"
    )
    error.add_note(f"  {mend[0]}\n  {mend[1]}.to_csv('mended.csv', index=False)")
    raise error


def _read_npz(path: Path, *columns: str | None) -> _Content:
    if any(columns):
        raise DataError(f"{path}: an archive has no columns; its arrays are x, y, client, test_x and test_y")
    arrays = read_npz(path, ("x", "y"), ("client", "test_x", "test_y"))
    x, y, clients, test = arrays["x"], arrays["y"], arrays.get("client"), None
    try:
        if "test_x" in arrays or "test_y" in arrays:
            held = arrays["test_y"]
            if (y.dtype.kind == "f") != (held.dtype.kind == "f"):
                raise ValueError("one of y and test_y is real")
            test = np.arange(len(y) + len(held)) >= len(y)
            x, y = np.concatenate([x, arrays["test_x"]]), np.concatenate([y, held])
            if clients is not None:  # test rows have no client: any will do
                clients = np.concatenate([clients, np.resize(clients, len(held))])
        if len(x) != len(y) or (clients is not None and clients.shape != y.shape[:1]):
            raise ValueError("there must be one entry per row")
    except (ValueError, TypeError, KeyError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise DataError(f"{path}: the arrays {shapes} do not fit together: {error}") from None
    return x, y, clients, test, ()
