"""What every reader returns, and the reading of .npz archives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import DataError

Bytes: TypeAlias = NDArray[np.uint8]
Kinds: TypeAlias = Mapping[str, tuple[str, int | None]]  # arrays by name: dtype kinds, number of dimensions (None: any)


class Arrays(NamedTuple):
    """Images uint8 [N, C, H, W], labels [N] of any integer type; writers [N] of the training rows where known."""

    images: Bytes
    labels: NDArray[np.integer[Any]]
    test_images: Bytes
    test_labels: NDArray[np.integer[Any]]
    writers: NDArray[np.integer[Any]] | None = None


def read_npz(path: Path, wanted: Kinds, optional: Kinds | None = None) -> dict[str, NDArray[Any]]:
    """The `wanted` arrays of an archive, and of the `optional` ones those it has. Nothing is unpickled."""
    kinds = {**wanted, **(optional or {})}
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asanyarray(archive[name]) for name in kinds if name in wanted or name in archive.files}
    except KeyError as error:
        raise DataError(f"{path}: not the archive expected, {error.args[0]}") from None
    except Exception as error:  # three formats in one another: broken ones raise whatever their readers come across
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as an .npz archive: {reason}") from None
    for name, array in arrays.items():
        kind, dims = kinds[name]
        if array.dtype.kind not in kind or dims not in (None, array.ndim):
            size = "any size" if dims is None else f"{dims}-D"
            raise DataError(
                f"{path}: array {name!r} is {array.dtype} {list(array.shape)}, not of kind {kind!r} and {size}"
            )
    return arrays
