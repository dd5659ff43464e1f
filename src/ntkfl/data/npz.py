"""One client's data as a file: an .npz archive with x and y, read without pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from ntkfl.atomic import replacing
from ntkfl.data.arrays import read_npz
from ntkfl.data.federated import Federated
from ntkfl.data.from_arrays import checked_pair
from ntkfl.errors import DataError


def read_client(path: Path) -> tuple[Tensor, Tensor]:
    """x float32 [n, ...] and y: int64 [n] classes, or float32 [n, d2] real targets."""
    arrays = read_npz(path, {"x": ("biuf", None), "y": ("biuf", None)})
    return checked_pair(str(path), (arrays["x"], arrays["y"]))


def deal(federated: Federated, folder: Path, on_file: Callable[[], None] = lambda: None) -> list[Path]:
    """Every client's data, and the test set, as files: client-0.npz …, test.npz. `on_file` hears of each."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for i in range(len(federated) + 1):
            name, (x, y) = (f"client-{i}", federated.client(i)) if i < len(federated) else ("test", federated.test)
            paths.append(folder / f"{name}.npz")
            with replacing(paths[-1]) as file:
                np.savez(file, x=x.numpy(), y=y.numpy())
            on_file()
        return paths
    except OSError as error:
        raise DataError(f"cannot write into {folder}: {error.strerror}") from None
