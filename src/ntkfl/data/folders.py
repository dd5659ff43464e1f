"""Clients made of folders: CLIENT/CLASS/FILE, pictures or texts or anything a function can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.data.client import PICTURES, Images
from ntkfl.data.federated import Federated
from ntkfl.data.from_arrays import Array, from_clients
from ntkfl.errors import DataError

_TEST = "test"

Read = Callable[[Sequence[Path]], Array]


def from_folders(root: Path | str, read: Read, *, test: Path | str | None = None, tokens: bool = False) -> Federated:
    """A federation of the folders in `root`, one per client, with a folder for each class and files in those.

    `read(paths)` gives the inputs [n, …] of some files: `pictures((3, 32, 32))`, or a function of yours, as for texts.
    Classes are numbered in the order of their names, and clients called as their folders. `test` is a folder of
    classes, by default the one called test in `root`. With `tokens`, inputs are whole numbers.
    """
    root = Path(root)
    held = Path(test) if test is not None else root / _TEST
    if not held.is_dir():
        raise DataError(f"no test set at {held}: a folder with a folder for each class")
    clients = [folder for folder in _folders(root) if folder.resolve() != held.resolve()]
    if not clients:
        raise DataError(f"{root} holds no folder of a client")
    classes = sorted({group.name for folder in (*clients, held) for group in _folders(folder)})
    if len(classes) < 2:
        raise DataError(f"{root}: files lie in CLIENT/CLASS/FILE, and {len(classes)} classes were found")
    parts = [_samples(folder, read, classes) for folder in (*clients, held)]
    named = {folder.name: part for folder, part in zip(clients, parts[:-1], strict=True)}
    return from_clients(named, test=parts[-1], class_names=classes, name=root.name, tokens=tokens)


def pictures(shape: Sequence[int], mean: Sequence[float] = (), std: Sequence[float] = ()) -> Read:
    """Reads pictures of one shape (channels, height, width): (bytes/255 − mean)/std, a number for each channel."""
    images = Images(tuple(shape), tuple(mean), tuple(std))

    def read(paths: Sequence[Path]) -> Tensor:
        for path in paths:
            if path.suffix.lower() not in PICTURES:
                raise DataError(f"{path} is no picture: {', '.join(PICTURES)}")
        return images.read(paths)

    return read


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _samples(folder: Path, read: Read, classes: Sequence[str]) -> tuple[Array, Tensor]:
    named = [
        (file, classes.index(group.name))
        for group in _folders(folder)
        for file in sorted(p for p in group.iterdir() if p.is_file() and not p.name.startswith("."))
    ]
    if not named:
        raise DataError(f"{folder} holds no files: they lie in a folder for each class")
    x = read([file for file, _ in named])
    if len(x) != len(named):
        raise DataError(f"{folder}: {len(named)} files were read to {len(x)} inputs")
    return x, torch.tensor([label for _, label in named])
