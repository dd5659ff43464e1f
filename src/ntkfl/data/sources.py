"""A dataset by its name, or a user's own file or folder: the one loader behind every command."""

from __future__ import annotations

import hashlib
from os.path import isdir
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ntkfl.data.catalog import NAMES, load
from ntkfl.data.client import IDX_BYTES, PICTURES
from ntkfl.data.dataset import Dataset, RowDataset
from ntkfl.data.files import USUAL, Columns, draw_test, from_file, is_data_file
from ntkfl.data.folders import from_folders, pictures
from ntkfl.data.idx import parse, read_content
from ntkfl.data.table import Rows
from ntkfl.errors import ConfigError, DataError, unknown

_TEST = ("t10k", "test")  # how names of idx files for testing begin
FORMS = ("FILE.csv", "FILE.npz", "FOLDER", "package.module:function")  # for errors


def is_own(name: str) -> bool:
    """Whether a dataset's name is that of a user's own file or folder."""
    return name not in NAMES and (is_data_file(name) or (bool(name) and isdir(name)))


def names_clients(name: str) -> bool:
    """Whether rows are dealt as such a file or folder says, unless told otherwise: all but a folder of idx files."""
    return is_own(name) and (is_data_file(name) or not _idx_files(Path(name)))


def open_dataset(name: str, columns: Columns = USUAL, targets: str | None = None) -> Dataset | RowDataset:
    """Rows to be dealt by a partition: of a dataset with a name, of a CSV, Parquet or .npz file with these `columns`,
    of a folder of idx files (train-…, and t10k-… or test-…), or of one of pictures, CLIENT/CLASS/FILE beside
    test/CLASS/FILE. `targets` of a file are real or classes, where whole numbers could be either.
    """
    if not is_data_file(name) and (flags := columns.flags()):
        raise ConfigError(f"{flags.split()[0]} names a column of a file, and {name} is none")
    if name in NAMES:
        return load(name)
    if is_data_file(name):
        return from_file(name, **columns._asdict(), targets=targets)
    if not is_own(name):
        raise unknown("dataset", name, (*NAMES, *FORMS))
    return _read_idx(Path(name)) if _idx_files(Path(name)) else _read_pictures(Path(name))


def own_digest(name: str) -> str:
    """A sha256 (hex) that changes with a file's content, or with the names, sizes and times of a folder's files."""
    path = Path(name)
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    found = sorted((str(p.relative_to(path)), p.stat()) for p in path.rglob("*") if p.is_file())
    return hashlib.sha256(repr([(own, s.st_size, s.st_mtime_ns) for own, s in found]).encode()).hexdigest()


def _idx_files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if "idx" in p.name and p.is_file())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None


def _read_idx(folder: Path) -> RowDataset:
    files = _idx_files(folder)
    testing = [file for file in files if file.name.startswith(_TEST)]
    x, y = _pair(folder, [file for file in files if file not in testing])
    if testing:
        test_x, test_y = _pair(folder, testing)
    else:
        test = draw_test(len(y))
        (x, test_x), (y, test_y) = (x[~test], x[test]), (y[~test], y[test])
    if x.shape[1:] != test_x.shape[1:]:
        raise DataError(f"{folder}: training and test images differ in shape")
    mean, std = (0.0,) * x.shape[1], (1.0,) * x.shape[1]
    rows, test_rows = (Rows(torch.from_numpy(a), torch.from_numpy(b), mean, std) for a, b in ((x, y), (test_x, test_y)))
    classes = max(2, 1 + int(max(y.max(), test_y.max())))
    return RowDataset(str(folder), rows, test_rows, classes, test_drawn=not testing)


def _pair(folder: Path, files: list[Path]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 [N, C, H, W] and labels [N] of two files."""
    arrays = [parse(read_content(file, IDX_BYTES), str(file)) for file in files]
    labels, images = [a for a in arrays if a.ndim == 1], [a for a in arrays if a.ndim > 2]
    if len(arrays) != 2 or len(labels) != 1 or len(images) != 1 or not 0 < len(labels[0]) == len(images[0]):
        raise DataError(f"{folder}: expected idx files of images and of their labels, for training and for testing")
    return images[0][:, None].copy() if images[0].ndim == 3 else images[0].copy(), labels[0].astype(np.int64)


def _read_pictures(folder: Path) -> RowDataset:
    from PIL import Image  # only this way of keeping data needs it

    first = next((p for p in sorted(folder.glob("*/*/*")) if p.suffix.lower() in PICTURES), None)
    if first is None:
        raise DataError(f"{folder} holds neither idx files nor pictures as CLIENT/CLASS/FILE, beside test/CLASS/FILE")
    try:
        with Image.open(first) as picture:
            shape = (1 if picture.mode in ("1", "L") else 3, picture.size[1], picture.size[0])
    except Exception:  # broken pictures raise whatever their readers come across
        raise DataError(f"{first} is no picture that can be read") from None
    fed = from_folders(folder, pictures(shape))
    writers = torch.repeat_interleave(torch.arange(len(fed)), torch.tensor(fed.sizes))
    return RowDataset(
        str(folder), fed.rows, fed.test_rows, fed.classes, writers, fed.client_names, class_names=fed.class_names
    )
