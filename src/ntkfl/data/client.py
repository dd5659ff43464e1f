"""One client's own data, in the form it has them: a file, a folder of pictures for each class, a function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkfl.data.arrays import Bytes
from ntkfl.data.files import USUAL, Columns, is_data_file, read_rows
from ntkfl.data.from_arrays import checked_pair, read_source
from ntkfl.data.table import normalised
from ntkfl.errors import DataError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")


@dataclass(frozen=True)
class Images:
    """How bytes of images become inputs: shape (channels, height, width), a mean and a std a channel, class names; and
    the names of a table's features, in order.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def read(self, files: Sequence[Path]) -> Tensor:
        """Pictures of that shape as float32 [n, C, H, W], normalised."""
        channels = self.shape[0]
        mean, std = self.mean or (0.0,) * channels, self.std or (1.0,) * channels
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise DataError(f"mean and std must hold {channels} numbers each, std above 0")
        return normalised(torch.from_numpy(np.stack([read_picture(file, self.shape) for file in files])), mean, std)


def read_own(
    source: str,
    images: Images,
    find: Callable[[str], Callable[..., Any]],
    columns: Columns = USUAL,
    *,
    test: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [n, …] and y of `source`: FILE.npz, .csv or .parquet, a folder, or `package.module:function`.

    The function gives (x, y), a torch Dataset or a DataLoader; `columns` are what a file calls its own. With `test`,
    of a file that says which rows are for testing these alone.

    `find` turns such a name into the function. A folder holds a folder of pictures for each class, named by its number
    or as in `images.classes`.
    """
    path = Path(source)
    if path.is_dir():
        return _read_pictures(path, images)
    if is_data_file(source):
        return checked_pair(source, read_rows(path, columns, images.classes, images.features, test=test))
    if ":" in source and not path.exists():
        return read_source(source, find(source)())
    raise DataError(
        f"no data at {source}: expected an .npz, .csv or .parquet file, a folder, or package.module:function"
    )


def _read_pictures(folder: Path, images: Images) -> tuple[Tensor, Tensor]:
    files, labels = list[Path](), list[int]()
    for group in sorted(p for p in folder.iterdir() if p.is_dir()):
        label = _label(group.name, images.classes, folder)
        found = sorted(p for p in group.iterdir() if p.suffix.lower() in PICTURES)
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{folder} holds no folder of pictures for each class")
    return checked_pair(str(folder), (images.read(files), torch.tensor(labels)))


def read_picture(file: Path, shape: Sequence[int]) -> Bytes:
    """A picture's bytes uint8 [C, H, W], which must be of that shape: 1 or 3 channels, any format that Pillow reads."""
    from PIL import Image  # only this way of keeping data needs it

    mode = {1: "L", 3: "RGB"}.get(shape[0] if len(shape) == 3 else 0)
    if mode is None:
        raise DataError(f"{file}: pictures have 1 or 3 channels; the run's inputs are {list(shape)}")
    try:
        # A picture that claims to be huge is refused below, by its size: no warning is needed.
        with warnings.catch_warnings(action="ignore"), Image.open(file) as picture:
            if picture.size[::-1] != tuple(shape[1:]):  # before anything is decoded
                raise DataError(f"{file} is {picture.size[1]}×{picture.size[0]}, not {tuple(shape[1:])}")
            pixels = np.asarray(picture.convert(mode))
    except DataError:
        raise
    except Exception:  # broken pictures raise whatever their readers come across
        raise DataError(f"{file} is no picture that can be read") from None
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _label(name: str, classes: Sequence[str], folder: Path) -> int:
    if name in classes:
        return classes.index(name)
    if not classes and name.isdecimal() and len(name) < 10:
        return int(name)
    expected = (
        f"one of {', '.join(classes)}"
        if classes
        else "a class's number; for names, list them in the run's setting class_names"
    )
    raise DataError(f"{folder}: a folder called {name!r}, expected {expected}")
