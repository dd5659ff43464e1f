"""Clients' data as files: .npz archives with x and y."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ntkfl.atomic import replacing
from ntkfl.data.federated import Federated
from ntkfl.errors import DataError


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
