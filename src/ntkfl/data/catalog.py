"""Datasets by name: what they are, where a copy is looked for, and how one is downloaded from its authors."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ntkfl.atomic import replacing
from ntkfl.data import published
from ntkfl.data.dataset import Dataset, TableRows
from ntkfl.data.published import Arrays
from ntkfl.errors import DataError, unknown
from ntkfl.progress import ProgressBar

# Where distributions put datasets, e.g. Debian's dataset-fashion-mnist.
SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Remote:
    """A published file: where it is, and the length and sha256 it must have."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class CatalogEntry:
    """One dataset: facts, the files of a whole copy, how to read it out of a folder, and how to get it.

    `mean` and `std` are of each channel, of pixels in 0..1. `convert` makes the files of what was downloaded, where
    these are not the same. `advice` says how to get it, by default by `ntkfl data fetch`.
    """

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rows: str
    files: tuple[str, ...]
    read: Callable[[Path], Arrays]
    downloads: tuple[Remote, ...] = ()
    convert: Callable[[Path], None] | None = None
    advice: str = ""


def _idx_downloads(url: str, *facts: tuple[int, str]) -> tuple[Remote, ...]:
    return tuple(Remote(f"{url}/{name}.gz", *fact) for name, fact in zip(published.IDX, facts, strict=True))


CATALOG: dict[str, CatalogEntry] = {
    "fashion-mnist": CatalogEntry(
        classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        rows="60,000 + 10,000",
        files=published.IDX,
        read=partial(
            published.read_idx,
            sha256=(
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        downloads=_idx_downloads(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        advice="`apt-get install dataset-fashion-mnist` (Debian, Ubuntu)",
    ),
    "mnist": CatalogEntry(
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        rows="60,000 + 10,000",
        files=published.IDX,
        read=partial(
            published.read_idx,
            sha256=(
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        downloads=_idx_downloads(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "femnist": CatalogEntry(
        classes=10,  # LEAF numbers digits first; letters are left out
        mean=(0.0375,),  # of a sample of 385 writers; fixed, so that every sample is normalised alike
        std=(0.1619,),
        rows="by sample",
        files=(published.FEMNIST,),
        read=published.read_femnist,
        advice=f"make femnist/{published.FEMNIST} of the digits that LEAF (github.com/TalwalkarLab/leaf) prepares: "
        "docs/data.md says what is in it",
    ),
    "cifar10": CatalogEntry(
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        rows="50,000 + 10,000",
        files=(published.CIFAR10,),
        read=published.read_cifar10,
        downloads=(
            Remote(
                f"https://www.cs.toronto.edu/~kriz/{published.CIFAR10_ARCHIVE}",
                170052171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        convert=published.convert_cifar10,
    ),
    "digits": CatalogEntry(
        classes=10,
        mean=(0.2872,),
        std=(0.3540,),
        rows="1,442 + 355",
        files=(published.DIGITS,),
        read=published.read_digits,
    ),
}
NAMES: tuple[str, ...] = tuple(CATALOG)


def load(name: str) -> Dataset:
    """The dataset `name`, from the first place that has a whole copy: $NTKFL_DATA, the user's cache, the system's
    dataset folders, then what `fetch` gets into the cache.
    """
    entry = _entry(name)
    images, labels, test_images, test_labels, writers = entry.read(locate(name) or fetch(name))
    rows, test_rows = (
        TableRows(
            torch.from_numpy(np.require(x, requirements=["C", "W"])),  # a copy of what cannot be written to
            torch.from_numpy(y.astype(np.int64)),
            entry.mean,
            entry.std,
        )
        for x, y in ((images, labels), (test_images, test_labels))
    )
    of_writers = None if writers is None else torch.from_numpy(writers.astype(np.int64))
    return Dataset(name=name, rows=rows, test_rows=test_rows, classes=entry.classes, writers=of_writers)


def locate(name: str) -> Path | None:
    """The folder of a whole copy of `name`, without reading it; None where it is nowhere on this machine."""
    files = _entry(name).files
    return next((place for place in places(name) if all(published.find(place, file) for file in files)), None)


def places(name: str) -> list[Path]:
    """The folders searched for `name`, in order; the digits come with the package."""
    if name == "digits":
        return [published.HERE]
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
    entry, folder = _entry(name), cache_folder() / name
    try:
        if not entry.downloads:
            raise DataError("it cannot be downloaded")
        download(entry.downloads, folder)
    except DataError as error:
        looked, advice = ", ".join(map(str, places(name))), entry.advice or f"`ntkfl data fetch {name}`"
        raise DataError(
            f"{name} is not on this machine (looked in {looked}): {error}\n"
            f"get it: {advice}; or set NTKFL_DATA to a folder that has {name}/"
        ) from None
    if entry.convert is not None:
        entry.convert(folder)
    return folder


def download(remotes: Sequence[Remote], folder: Path, timeout: float = 10.0) -> None:
    """Put those of the files into `folder` that are not there. A file gets its name when it is there and right.

    A server that is silent for `timeout` seconds is given up. A broken download begins anew.
    """
    wanted = [remote for remote in remotes if not (folder / remote.name).exists()]
    with ProgressBar(sum(remote.bytes for remote in wanted)) as bar:
        for remote in wanted:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _get(remote, folder, timeout, bar)
            except (OSError, http.client.HTTPException) as error:
                reason = error.reason if type(error) is urllib.error.URLError else error
                raise DataError(f"{remote.url}: {reason or type(error).__name__}") from None


def _get(remote: Remote, folder: Path, timeout: float, bar: ProgressBar) -> None:
    done, digest = 0, hashlib.sha256()
    with urllib.request.urlopen(remote.url, timeout=timeout) as answer, replacing(folder / remote.name) as file:
        # Never more than is missing: an endless answer must not fill the disk.
        while done < remote.bytes and (chunk := answer.read(min(_CHUNK, remote.bytes - done))):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            bar.end(remote.name, len(chunk))
        if done < remote.bytes or digest.hexdigest() != remote.sha256:
            raise DataError(f"{remote.url}: the {done} bytes there are not the published {remote.bytes}: try again")


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise unknown("dataset", name, CATALOG)
    return CATALOG[name]
