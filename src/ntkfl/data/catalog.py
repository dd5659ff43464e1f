"""The datasets there are, where each is looked for, and how it is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ntkfl.data import cifar, digits, femnist, mnist
from ntkfl.data.arrays import Arrays, Bytes
from ntkfl.data.dataset import Dataset
from ntkfl.data.download import Remote, download
from ntkfl.data.table import TableRows
from ntkfl.errors import DataError, unknown

# Where distributions put datasets, e.g. Debian's dataset-fashion-mnist.
SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
BUILT_IN = "built in"


@dataclass(frozen=True)
class CatalogEntry:
    """One dataset: facts, how to recognise and read it in a folder, and how to get it."""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rows: tuple[int, int] | None  # training and test rows; None where it depends on the sample
    find: Callable[[Path], tuple[Path, ...]]  # the files of a whole copy in this folder, or ()
    read: Callable[[Path], Arrays]
    downloads: tuple[Remote, ...] = ()
    advice: str = ""  # how to get it, other than by download


@dataclass(frozen=True)
class Location:
    """A whole copy of a dataset: its folder (None for a built-in one) and its size on disk."""

    folder: Path | None
    bytes: int

    @property
    def where(self) -> str:
        """For people."""
        return BUILT_IN if self.folder is None else str(self.folder)


CATALOG: dict[str, CatalogEntry] = {
    "fashion-mnist": CatalogEntry(
        classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        rows=(60000, 10000),
        find=partial(mnist.find, files=mnist.FASHION),
        read=partial(mnist.read, files=mnist.FASHION),
        downloads=mnist.FASHION_DOWNLOADS,
        advice="`apt-get install dataset-fashion-mnist` (Debian, Ubuntu)",
    ),
    "mnist": CatalogEntry(
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        rows=(60000, 10000),
        find=partial(mnist.find, files=mnist.MNIST),
        read=partial(mnist.read, files=mnist.MNIST),
        downloads=mnist.MNIST_DOWNLOADS,
    ),
    "femnist": CatalogEntry(
        classes=femnist.CLASSES,
        mean=(0.0375,),  # of a sample of 385 writers; fixed, so that every sample is normalised alike
        std=(0.1619,),
        rows=None,
        find=femnist.find,
        read=femnist.read,
        advice="LEAF (github.com/TalwalkarLab/leaf): in its data/femnist run "
        "`./preprocess.sh -s niid --sf 0.05 -k 0 -t sample`, then copy data/train and data/test into femnist/",
    ),
    "cifar10": CatalogEntry(
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        rows=(50000, 10000),
        find=cifar.find,
        read=cifar.read,
        downloads=cifar.DOWNLOADS,
    ),
    "digits": CatalogEntry(
        classes=10,
        mean=(0.2872,),
        std=(0.3540,),
        rows=(1442, 355),
        find=lambda folder: (),
        read=lambda folder: digits.read(),
    ),
}
NAMES: tuple[str, ...] = tuple(CATALOG)


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """The dataset `name`, from `folder` (or its subfolder `name`) if given, else from the first place that has it.

    Places: $NTKFL_DATA, the user's cache, the system's dataset folders, then what `fetch` gets into the cache.
    """
    entry = _entry(name)
    found = locate(name, folder)
    if found is None:
        if folder is not None:
            raise DataError(f"{Path(folder)} does not hold {name}\n{_advice(name)}")
        where: Path | None = fetch(name)
    else:
        where = found.folder
    arrays = entry.read(where or Path())
    return Dataset(
        name=name,
        rows=_rows(entry, arrays.images, arrays.labels),
        test_rows=_rows(entry, arrays.test_images, arrays.test_labels),
        classes=entry.classes,
        writers=None if arrays.writers is None else torch.from_numpy(arrays.writers.astype(np.int64)),
        source=BUILT_IN if where is None else str(where),
    )


def _rows(entry: CatalogEntry, images: Bytes, labels: NDArray[Any]) -> TableRows:
    """Copies of what cannot be written to: torch has no read-only tensors."""
    x = torch.from_numpy(np.require(images, requirements=["C", "W"]))
    return TableRows(x, torch.from_numpy(labels.astype(np.int64)), entry.mean, entry.std)


def locate(name: str, folder: str | Path | None = None) -> Location | None:
    """Where a whole copy of `name` is, without reading it; None where it is nowhere on this machine."""
    entry = _entry(name)
    if name == "digits":
        return Location(None, 0)
    for place in places(name) if folder is None else [Path(folder) / name, Path(folder)]:
        files = entry.find(place)
        if files:
            return Location(place, sum(file.stat().st_size for file in files))
    return None


def places(name: str) -> list[Path]:
    """The folders searched for `name`, in order."""
    roots = [cache_folder(), *SYSTEM_FOLDERS]
    if own := os.environ.get("NTKFL_DATA"):
        if not Path(own).is_dir():
            raise DataError(f"NTKFL_DATA is {own!r}, which is no folder: correct it or unset it")
        roots.insert(0, Path(own))
    return [root / name for root in roots]


def cache_folder() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ntkfl"


def fetch(name: str) -> Path:
    """Get `name` from its authors into the cache, whatever part of it is missing there, and return its folder."""
    folder, remotes = cache_folder() / name, _entry(name).downloads
    if not remotes:
        raise _missing(name, "it cannot be downloaded")
    try:
        download(remotes, folder)
    except DataError as error:
        raise _missing(name, str(error)) from None
    return folder


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise unknown("dataset", name, CATALOG)
    return CATALOG[name]


def _missing(name: str, reason: str) -> DataError:
    looked = ", ".join(map(str, places(name)))
    return DataError(f"{name} is not on this machine (looked in {looked}): {reason}\n{_advice(name)}")


def _advice(name: str) -> str:
    entry = CATALOG[name]
    ways = [entry.advice] if entry.advice else []
    if entry.downloads:
        ways.append(f"`ntkfl data fetch {name}`")
    ways.append(f"set NTKFL_DATA to a folder that has {name}/")
    return f"get it: {'; or '.join(ways)}"
