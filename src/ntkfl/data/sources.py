"""A dataset by its name, or a user's own file or folder: the one loader behind every command."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from os.path import isdir
from pathlib import Path

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.dataset import Dataset
from ntkfl.data.files import from_file, is_data_file
from ntkfl.data.own import PICTURES, from_folders, pictures, read_picture
from ntkfl.errors import DataError, unknown

FORMS = ("FILE.csv", "FILE.npz", "FOLDER", "package.module:function")  # for errors


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
    if not is_own(name):
        raise unknown("dataset", name, (*NAMES, *FORMS))
    first = next((p for p in sorted(Path(name).glob("*/*/*")) if p.suffix.lower() in PICTURES), None)
    if first is None:
        raise DataError(f"{name} holds no pictures as CLIENT/CLASS/FILE, beside test/CLASS/FILE")
    return replace(from_folders(name, pictures(read_picture(first).shape), classes=classes).pooled(), name=name)


def own_digest(name: str) -> str:
    """A sha256 (hex) that changes with the names, sizes and times of a folder's files, or of the one file."""
    files = sorted(path for path in Path(name).rglob("*") if path.is_file()) or [Path(name)]
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()
