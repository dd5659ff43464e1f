"""What every reader returns, and the strict reading of .npz archives."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ntkfl.errors import DataError

Bytes: TypeAlias = NDArray[np.uint8]
_EXPANSION = 1040  # bytes out of one that was deflated, at most


class Arrays(NamedTuple):
    """Images uint8 [N, C, H, W], labels [N] of any integer type; writers [N] of the training rows where known."""

    images: Bytes
    labels: NDArray[np.integer[Any]]
    test_images: Bytes
    test_labels: NDArray[np.integer[Any]]
    writers: NDArray[np.integer[Any]] | None = None


def read_npz(path: Path, wanted: Mapping[str, tuple[str, int | None]]) -> dict[str, NDArray[Any]]:
    """The `wanted` arrays of an archive, each name with its dtype kinds and number of dimensions (None: any).

    Nothing is unpickled. An array's header is held against the bytes there are before anything is allocated for it.
    """
    arrays = {}
    try:
        held = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            for name, (kind, dims) in wanted.items():
                member = archive.getinfo(f"{name}.npy")
                if member.file_size > _EXPANSION * min(member.compress_size, held) + 64:
                    raise DataError(
                        f"{path}: array {name!r} claims {member.file_size} bytes, more than the file can hold"
                    )
                with archive.open(member) as stream:
                    shape, dtype, data_bytes = _header(stream, member.file_size)
                if dtype.kind not in kind or dims not in (None, len(shape)):
                    size = "any size" if dims is None else f"{dims}-D"
                    raise DataError(f"{path}: array {name!r} is {dtype} {list(shape)}, not of kind {kind!r} and {size}")
                if math.prod(shape) * dtype.itemsize != data_bytes:
                    raise DataError(f"{path}: array {name!r} says {list(shape)} but holds {data_bytes} bytes")
                with archive.open(member) as stream:
                    arrays[name] = npy.read_array(stream, allow_pickle=False)
    except KeyError as error:
        raise DataError(f"{path}: not the archive expected, {error.args[0]}") from None
    except DataError:
        raise
    except Exception as error:  # three formats in one another: broken ones raise whatever their readers come across
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as an .npz archive: {reason}") from None
    return arrays


def _header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and dtype of a .npy stream of `size` bytes, and how many bytes of data follow."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unknown .npy version {version}")
    shape, _, dtype = read(stream)
    return shape, dtype, size - stream.tell()
