"""Samples in folders: CLASS/FILE of one client, CLIENT/CLASS/FILE of many; pictures, or what a function can read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkfl.data.arrays import Bytes
from ntkfl.data.federated import Federated
from ntkfl.data.from_arrays import Array, from_clients
from ntkfl.data.table import normalised
from ntkfl.errors import DataError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
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
    parts = {folder: _read_classes(folder, read, classes) for folder in (*clients, held)}
    named = {folder.name: parts[folder] for folder in clients}
    return from_clients(named, test=parts[held], class_names=classes, name=root.name, tokens=tokens)


def _read_classes(folder: Path, read: Read, classes: Sequence[str]) -> tuple[Array, Tensor]:
    """Inputs and labels [n] of the files in a folder with a folder for each class; a label is the class's position."""
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


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def pictures(shape: Sequence[int], mean: Sequence[float] = (), std: Sequence[float] = ()) -> Read:
    """Reads pictures of one shape (channels, height, width): (bytes/255 − mean)/std, a number for each channel."""
    means, stds = tuple(mean) or (0.0,) * shape[0], tuple(std) or (1.0,) * shape[0]
    if len(shape) != 3 or shape[0] not in (1, 3) or not len(means) == len(stds) == shape[0] or min(stds) <= 0:
        raise DataError("pictures have 1 or 3 channels, [C, H, W], and a mean and a std above 0 for each")

    def read(files: Sequence[Path]) -> Tensor:
        return normalised(torch.from_numpy(np.stack([read_picture(file, shape) for file in files])), means, stds)

    return read


def read_picture(file: Path, shape: Sequence[int] | None = None) -> Bytes:
    """A picture's bytes uint8 [C, H, W], 1 or 3 channels, in any format that Pillow reads. Where a shape is given, the
    picture must have it.
    """
    from PIL import Image  # only this way of keeping data needs it

    if file.suffix.lower() not in PICTURES:
        raise DataError(f"{file} is no picture: {', '.join(PICTURES)}")
    try:
        # A picture that claims to be huge is refused below, by its size: no warning is needed.
        with warnings.catch_warnings(action="ignore"), Image.open(file) as picture:
            if shape is not None and picture.size[::-1] != tuple(shape[1:]):  # before anything is decoded
                raise DataError(f"{file} is {picture.size[1]}×{picture.size[0]}, not {tuple(shape[1:])}")
            grey = picture.mode in ("1", "L") if shape is None else shape[0] == 1
            pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    except DataError:
        raise
    except Exception:  # broken pictures raise whatever their readers come across
        raise DataError(f"{file} is no picture that can be read") from None
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
