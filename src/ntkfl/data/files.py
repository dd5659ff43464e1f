"""A user's own data in one file: CSV, Parquet or .npz, of one client or of many.

A table has a column of labels; another, where there is one, says whose a row is, and a third is "train" or "test". They
are called `label`, `client` and `split`, or as `Columns` says. All other columns are numbers, the features. An .npz has
x [N, …], y [N] and, likewise, `client` [N], `test_x` and `test_y`. Labels may be text: classes by name.
"""

from __future__ import annotations

import difflib
import hashlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ntkfl.data.arrays import Kinds, read_npz
from ntkfl.data.cells import labels, listed, named_labels, numbers, read_table, rows_of
from ntkfl.data.dataset import Dataset
from ntkfl.data.from_arrays import from_clients
from ntkfl.errors import DataError

SUFFIXES = (".csv", ".parquet", ".npz")
# What a run's loss says of targets, where its user says nothing: squared error, that numbers are real (text is classes
# all the same); a loss of the user's own, nothing.
NUMBERS, UNKNOWN = "numbers", "unknown"
_TEST_SHARE = 0.2  # of the rows, where a file does not say which are for testing


class Columns(NamedTuple):
    """What a table calls the columns that are no features, and an archive its arrays; None: `label` (of an archive y),
    `client` and `split`.
    """

    label: str | None = None
    client: str | None = None
    split: str | None = None

    def flags(self) -> str:
        """The command line's names of what is given."""
        return " ".join(f"--{name}-column" for name, own in self._asdict().items() if own is not None)


class _Content(NamedTuple):
    """A file's rows x [N, …] with targets y; whose each is, and which are for testing, where the file says so."""

    x: NDArray[Any]
    y: NDArray[Any]
    clients: NDArray[Any] | None
    test: NDArray[np.bool_] | None
    class_names: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # columns of a table


def is_data_file(name: str) -> bool:
    """Whether a dataset's name is that of a file."""
    return Path(name).suffix.lower() in SUFFIXES


def from_file(
    path: Path | str,
    *,
    label: str | None = None,
    client: str | None = None,
    split: str | None = None,
    targets: str | None = None,
) -> Dataset:
    """Training and test rows of a file, to be dealt to clients by a partition, such as `ByClient`.

    `label`, `client` and `split` name its columns. Labels that are text are classes, numbered in the order of their
    names. Where the file does not say which rows are for testing, about a fifth of them is, by a hash of each row.
    `targets` is as for `from_clients`.
    """
    path, names = Path(path), Columns(label, client, split)
    content = _read_npz(path, names) if path.suffix.lower() == ".npz" else _read_table(path, names)
    test, drawn = content.test, content.test is None
    if test is None:
        test = draw_test(content.x)
    if test.all() or not test.any():
        raise DataError(f"{path}: all rows are for {'testing' if test.all() else 'training'}, none for the other")
    if content.class_names and targets == "real":
        raise DataError(f"{path}: labels are text, such as {content.class_names[0][:40]!r}: classes, not real targets")
    if targets == UNKNOWN and not content.class_names and content.y.dtype.kind != "f":
        raise DataError(f"{path}: targets are whole numbers: say whether they are real or classes (--targets real)")
    if targets in (NUMBERS, UNKNOWN):
        targets = "real" if targets == NUMBERS and not content.class_names else None
    train, held = ((content.x[rows], content.y[rows]) for rows in (~test, test))
    classes = len(content.class_names) or None
    whole = from_clients([train], test=held, name=path.name, classes=classes, targets=targets)
    rows = Dataset(str(path), whole.rows, whole.test_rows, whole.classes)
    rows = replace(rows, class_names=content.class_names, feature_names=content.features, test_drawn=drawn)
    if content.clients is None:
        return rows
    clients, writers = np.unique(content.clients[~test], return_inverse=True)
    return replace(rows, writers=torch.from_numpy(writers.astype(np.int64)), client_names=tuple(map(str, clients)))


def draw_test(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of x [n, …] are for testing, where nothing says it: about a fifth, by a hash of each row's inputs. So
    where a row goes does not depend on other rows, as ε has it, and equal rows are on one side.
    """
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8, key=b"ntkfl test rows v1").digest() for row in x]
    places = np.frombuffer(b"".join(hashes), dtype="<u8") / 2.0**64
    test: NDArray[np.bool_] = places <= max(_TEST_SHARE, places.min(initial=1.0))  # of a few rows, one at least
    return test


def _read_table(path: Path, names: Columns) -> _Content:
    label, client, split = names.label or "label", names.client or "client", names.split or "split"
    columns = read_table(path, (label, client, split))
    for given in names:
        if given is not None and given not in columns:
            near = difflib.get_close_matches(given, columns, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"{path} has no column {given!r}: {hint}its columns are {listed(columns)}")
    if label not in columns:
        raise DataError(
            f"{path} has no column {label!r}; its columns are {listed(columns)}: say which holds labels by "
            "--label-column (in Python: label=)"
        )
    features = [name for name in columns if name not in (label, client, split)]
    if not features:
        raise DataError(f"{path} has no features: every column but {label!r}, {client!r} and {split!r} is one")
    hint = ", unless it says whose a row is (--client-column {0}) or is the label (--label-column {0})"
    x = np.stack([numbers(path, columns[name], hint.format(shlex.quote(name))) for name in features], axis=1)
    y, classes = labels(path, columns[label])
    clients = columns[client].to_numpy(str) if client in columns else None
    if clients is not None and (clients == "").any():
        raise DataError(f"{path}: {rows_of(clients, '')} without a client in column {client!r}")
    test = None
    if split in columns:
        test = columns[split].to_numpy(str) == "test"
        if wrong := {*columns[split]} - {"train", "test"}:
            raise DataError(f"{path}: column {split!r} has {min(wrong)[:40]!r}; it must be train or test")
    return _Content(x, y, clients, test, classes, tuple(features))


def _read_npz(path: Path, given: Columns) -> _Content:
    if given.split is not None:
        raise DataError(f"{path}: an archive's test samples are its arrays test_x and test_y, not a column")
    label, client = given.label or "y", given.client or "client"
    kinds: Kinds = {"x": ("biuf", None), label: ("biufU", None)}
    more: Kinds = {client: ("biuU", 1), "test_x": ("biuf", None), "test_y": ("biufU", None)}
    if given.client is not None:
        kinds = {**kinds, client: more[client]}
    arrays = read_npz(path, kinds, more)
    x, y, clients, test = arrays["x"], arrays[label], arrays.get(client), None
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or (clients is not None and len(clients) != len(y)):
        raise DataError(f"{path}: x {list(x.shape)}, y {list(y.shape)} and client must have one entry per row")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError(f"{path}: test_x and test_y come together")
    if "test_x" in arrays:
        test_x, test_y = arrays["test_x"], arrays["test_y"]
        kind = {array.dtype.kind if array.dtype.kind in "fU" else "whole" for array in (y, test_y)}
        same = test_x.shape[1:] == x.shape[1:] and test_y.shape[1:] == y.shape[1:] and len(kind) == 1
        if not same or len(test_x) != len(test_y):
            raise DataError(f"{path}: test_x {list(test_x.shape)} and test_y {list(test_y.shape)} do not fit x and y")
        test = np.arange(len(y) + len(test_y)) >= len(y)
        if clients is not None:
            clients = np.concatenate(
                [clients, np.resize(clients, len(test_y))]
            )  # test rows have no client: any will do
        x, y = np.concatenate([x, test_x]), np.concatenate([y, test_y])
    if y.dtype.kind != "U":
        return _Content(x, y, clients, test)
    if y.ndim != 1:
        raise DataError(f"{path}: labels that are text are one per row, not {list(y.shape)}")
    numbered, classes = named_labels(path, label, y)
    return _Content(x, numbered, clients, test, classes)
