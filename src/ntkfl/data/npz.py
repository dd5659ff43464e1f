"""One client's data as a file: an .npz archive with x and y, read without pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkfl.data.federated import Federated
from ntkfl.errors import DataError


def read_npz(path: Path) -> tuple[Tensor, Tensor]:
    """x float32 [n, ...] and y: int64 [n] classes, or float32 [n, d2] real targets."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            x, y = archive["x"], archive["y"]
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except KeyError as error:
        raise DataError(f"{path} has no array named {error.args[0].split()[0]!r}: it needs x and y") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, TypeError, AttributeError):
        raise DataError(f"{path} is no .npz archive of plain arrays x and y") from None
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf" or x.ndim < 2 or y.ndim < 1 or len(x) != len(y):
        raise DataError(f"{path}: x must be numbers [n, features…] and y one label or row of targets a sample")
    targets = y.astype(np.int64) if y.dtype.kind in "biu" else y.astype(np.float32).reshape(len(y), -1)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(targets)


def deal(federated: Federated, folder: Path) -> list[Path]:
    """Every client's data, and the test set, as files of their own: client-0.npz …, test.npz."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        named = [(f"client-{i}", federated.client(i)) for i in range(len(federated))] + [("test", federated.test)]
        paths = []
        for name, (x, y) in named:
            paths.append(folder / f"{name}.npz")
            np.savez(paths[-1], x=x.numpy(), y=y.numpy())
        return paths
    except OSError as error:
        raise DataError(f"cannot write into {folder}: {error.strerror}") from None
