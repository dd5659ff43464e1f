"""MNIST and Fashion-MNIST: four idx files each."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ntkfl.data.arrays import Arrays, Bytes
from ntkfl.data.download import Remote
from ntkfl.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class IdxFile:
    """A published file: its name without .gz, its shape, and the sha256 of its content, however it was compressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """The file in `folder`, compressed or not."""
        candidates = (folder / f"{self.name}.gz", folder / self.name)
        return next((path for path in candidates if path.is_file()), None)

    def read(self, folder: Path) -> Bytes:
        """The array behind a header whose length the shape tells; the sha256 says that all of it is as published."""
        path = self.find(folder)
        if path is None:
            raise DataError(f"{folder / self.name}[.gz] is missing")
        try:
            raw = path.read_bytes()
            raw = gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read, {error}: delete it and fetch it again") from None
        found = hashlib.sha256(raw).hexdigest()
        if found != self.sha256:
            raise DataError(
                f"{path}: not the published content (sha256 {found[:12]}… instead of {self.sha256[:12]}…): "
                "delete it and fetch it again"
            )
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(self.shape)).reshape(self.shape)


_LAYOUT = (
    ("train-images-idx3-ubyte", (60000, 28, 28)),
    ("train-labels-idx1-ubyte", (60000,)),
    ("t10k-images-idx3-ubyte", (10000, 28, 28)),
    ("t10k-labels-idx1-ubyte", (10000,)),
)


def _files(*sha256: str) -> tuple[IdxFile, ...]:
    return tuple(IdxFile(name, shape, digest) for (name, shape), digest in zip(_LAYOUT, sha256, strict=True))


def _downloads(url: str, *published: tuple[int, str]) -> tuple[Remote, ...]:
    return tuple(Remote(f"{url}/{name}.gz", *facts) for (name, _), facts in zip(_LAYOUT, published, strict=True))


# By content: distributions compress the same files differently.
FASHION = _files(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
FASHION_DOWNLOADS = _downloads(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
MNIST = _files(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
MNIST_DOWNLOADS = _downloads(
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)


def find(folder: Path, files: tuple[IdxFile, ...]) -> tuple[Path, ...]:
    """The four files where all are there, else nothing."""
    paths = [file.find(folder) for file in files]
    return tuple(path for path in paths if path) if all(paths) else ()


def read(folder: Path, files: tuple[IdxFile, ...]) -> Arrays:
    """The four files of `folder`, in the order train images, train labels, test images, test labels."""
    images, labels, test_images, test_labels = (file.read(folder) for file in files)
    return Arrays(images[:, None], labels, test_images[:, None], test_labels)
