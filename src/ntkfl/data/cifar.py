"""CIFAR-10, from its authors' binary archive or an .npz of the same images. No pickle is ever read."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path

import numpy as np

from ntkfl.data.arrays import Arrays, Bytes, read_npz
from ntkfl.data.download import Remote
from ntkfl.errors import DataError

ARCHIVE = "cifar-10-binary.tar.gz"
NPZ = "cifar10.npz"
DOWNLOADS = (
    Remote(
        f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)
# sha256 of the six batches of 10,000 records; the last is the test set.
BATCHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane
_BATCH_ROWS = 10000


def find(folder: Path) -> tuple[Path, ...]:
    """The archive or the .npz, else nothing."""
    return next(((folder / name,) for name in (NPZ, ARCHIVE) if (folder / name).is_file()), ())


def read(folder: Path) -> Arrays:
    """50,000 training and 10,000 test images; whichever file they come from, the batches' checksums must hold."""
    (path,) = find(folder)
    batches = read_npz_batches(path) if path.name == NPZ else read_archive(path)
    for (name, expected), batch in zip(BATCHES.items(), batches, strict=True):
        found = hashlib.sha256(batch.data).hexdigest()
        if found != expected:
            raise DataError(
                f"{path}: {name} is not the published content (sha256 {found[:12]}… instead of {expected[:12]}…): "
                "delete it and fetch it again"
            )
    *train, test = batches
    return Arrays(*_split(train), *_split([test]))


def read_archive(path: Path, rows: int = _BATCH_ROWS) -> list[Bytes]:
    """The batches in the archive as records [rows, 3073]; only files of exactly the right length are read."""
    found: dict[str, Bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                stream = archive.extractfile(member) if name in BATCHES and member.size == rows * _RECORD else None
                if stream is not None:
                    found[name] = np.frombuffer(stream.read(), np.uint8).reshape(rows, _RECORD)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, {error}: delete it and fetch it again") from None
    missing = [name for name in BATCHES if name not in found]
    if missing:
        raise DataError(f"{path}: holds no whole {', '.join(missing)}: delete it and fetch it again")
    return [found[name] for name in BATCHES]


def read_npz_batches(path: Path, rows: int = _BATCH_ROWS) -> list[Bytes]:
    """The same records [rows, 3073] from x_train, y_train, x_test, y_test with images [N, 32, 32, 3]."""
    arrays = read_npz(path, {"x_train": ("u", 4), "y_train": ("u", 1), "x_test": ("u", 4), "y_test": ("u", 1)})
    x, y = (np.concatenate([arrays[f"{axis}_train"], arrays[f"{axis}_test"]]) for axis in "xy")
    if x.dtype != np.uint8 or x.shape != (len(BATCHES) * rows, 32, 32, 3) or y.shape != x.shape[:1]:
        raise DataError(
            f"{path}: expected {len(BATCHES) * rows} labelled uint8 images [32, 32, 3], not {list(x.shape)}"
        )
    records = np.empty((len(y), _RECORD), np.uint8)
    records[:, 0] = y
    records[:, 1:].reshape(-1, 3, 32, 32)[:] = x.transpose(0, 3, 1, 2)
    return np.split(records, len(BATCHES))


def _split(batches: list[Bytes]) -> tuple[Bytes, Bytes]:
    """Images [N, 3, 32, 32] and labels [N] of the batches together."""
    records = np.concatenate(batches)
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), records[:, 0].copy()
