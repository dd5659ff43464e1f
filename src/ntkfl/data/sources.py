"""A dataset by its name, or a user's own file or folder: the one loader behind every command."""

from __future__ import annotations

import hashlib
from os.path import isdir
from pathlib import Path

import torch

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.dataset import Dataset
from ntkfl.data.files import Columns, from_file, is_data_file
from ntkfl.data.folders import PICTURES, from_folders, pictures, read_picture
from ntkfl.errors import ConfigError, DataError, unknown

_USUAL = Columns()
FORMS = ("FILE.csv", "FILE.npz", "FOLDER", "package.module:function")  # for errors


def is_own(name: str) -> bool:
    """Whether a dataset's name is that of a user's own file or folder."""
    return name not in NAMES and (is_data_file(name) or (bool(name) and isdir(name)))


def open_dataset(name: str, columns: Columns = _USUAL, targets: str | None = None) -> Dataset:
    """Rows to be dealt by a partition: of a dataset with a name, of a CSV, Parquet or .npz file with these `columns`,
    or of a folder of pictures, CLIENT/CLASS/FILE beside test/CLASS/FILE. `targets` of a file are real or classes, where
    whole numbers could be either.
    """
    if not is_data_file(name) and (flags := columns.flags()):
        raise ConfigError(f"{flags.split()[0]} names a column of a file, and {name} is none")
    if name in NAMES:
        return load(name)
    if is_data_file(name):
        return from_file(name, **columns._asdict(), targets=targets)
    if not is_own(name):
        raise unknown("dataset", name, (*NAMES, *FORMS))
    return _read_pictures(Path(name))


def own_digest(name: str) -> str:
    """A sha256 (hex) that changes with a file's content, or with the names, sizes and times of a folder's files."""
    path = Path(name)
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    found = sorted((str(p.relative_to(path)), p.stat()) for p in path.rglob("*") if p.is_file())
    return hashlib.sha256(repr([(own, s.st_size, s.st_mtime_ns) for own, s in found]).encode()).hexdigest()


def _read_pictures(folder: Path) -> Dataset:
    first = next((p for p in sorted(folder.glob("*/*/*")) if p.suffix.lower() in PICTURES), None)
    if first is None:
        raise DataError(f"{folder} holds no pictures as CLIENT/CLASS/FILE, beside test/CLASS/FILE")
    fed = from_folders(folder, pictures(read_picture(first).shape))
    writers = torch.repeat_interleave(torch.arange(len(fed)), torch.tensor(fed.sizes))
    return Dataset(
        str(folder), fed.rows, fed.test_rows, fed.classes, writers, fed.client_names, class_names=fed.class_names
    )
