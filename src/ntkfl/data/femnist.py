"""FEMNIST's digits with their writers, from one .npz or from the JSON files that LEAF makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkfl.data.arrays import Arrays, Bytes, read_npz
from ntkfl.errors import DataError

NPZ = "femnist_digits.npz"
CLASSES = 10  # LEAF numbers digits first: 0-9, then 26 capitals, then 26 small letters
_PIXELS = 28 * 28


def find(folder: Path) -> tuple[Path, ...]:
    """The .npz, or LEAF's train/*.json and test/*.json; else nothing."""
    if (folder / NPZ).is_file():
        return (folder / NPZ,)
    train, test = (sorted((folder / part).glob("*.json")) for part in ("train", "test"))
    return (*train, *test) if train and test else ()


def read(folder: Path) -> Arrays:
    """Digits 0-9 as uint8 [N, 1, 28, 28], bright on black as in MNIST, and the writer of each training row."""
    paths = find(folder)
    if paths[0].name == NPZ:
        return read_digits(paths[0])
    train, test = (_read_leaf([path for path in paths if path.parent.name == part]) for part in ("train", "test"))
    return Arrays(train[0], train[1], test[0], test[1], writers=train[2])


def read_digits(path: Path) -> Arrays:
    """From images [N, 28, 28], labels, writer, and split (0 train, 1 test), each [N]."""
    arrays = read_npz(path, {"images": ("u", 3), "labels": ("u", 1), "writer": ("i", 1), "split": ("u", 1)})
    images, labels, writer, split = (arrays[name] for name in ("images", "labels", "writer", "split"))
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise DataError(f"{path}: images must be uint8 [N, 28, 28], not {images.dtype} {list(images.shape)}")
    if not len(images) == len(labels) == len(writer) == len(split) or split.max(initial=0) > 1:
        raise DataError(f"{path}: images, labels, writer and split (0 or 1) must have the same length")
    train, test = split == 0, split == 1
    return Arrays(images[train][:, None], labels[train], images[test][:, None], labels[test], writer[train])


def _read_leaf(paths: list[Path]) -> tuple[Bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Images, labels and writers of LEAF files. A writer's number is the rank of its name among all of them."""
    images: list[Bytes] = []
    labels: list[NDArray[np.int64]] = []
    names: list[str] = []
    for path in paths:
        try:
            content: Any = json.loads(path.read_bytes())
            for name in content["users"]:
                data = content["user_data"][name]
                x, y = np.array(data["x"], np.float64).reshape(-1, _PIXELS), np.array(data["y"] or [], np.int64)
                # Written so that NaN fails; labels that were no whole numbers are not those that were read.
                if len(x) != len(y) or y.tolist() != data["y"] or not (x.size == 0 or (x.min() >= 0 and x.max() <= 1)):
                    raise ValueError(f"user {name!r} must have {_PIXELS} pixels in 0..1 for each of its labels")
                digits = (y >= 0) & (y < CLASSES)
                # LEAF draws black (0) on white (1).
                images.append((255 - np.rint(255 * x[digits])).astype(np.uint8).reshape(-1, 1, 28, 28))
                labels.append(y[digits])
                names += [str(name)] * len(labels[-1])
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            what = f"{type(error).__name__} {error}"
            raise DataError(f"{path}: not a LEAF file with users and user_data: {what}") from None
    if not names:
        raise DataError(f"{paths[0].parent}: no digits in LEAF's files there")
    return np.concatenate(images), np.concatenate(labels), np.unique(names, return_inverse=True)[1]
