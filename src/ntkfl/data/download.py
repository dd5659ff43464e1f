"""Published files brought into a folder, from their authors.

The standard library does it in as many lines as a library for downloads would take. Neither continues a broken one.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkfl.atomic import replacing
from ntkfl.errors import DataError
from ntkfl.progress import ProgressBar

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


def download(remotes: Sequence[Remote], folder: Path, timeout: float = 10.0) -> None:
    """Put those of the files into `folder` that are not there. A file gets its name when it is there and right."""
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
            bar.end(pieces=len(chunk), what=remote.name)
        if done < remote.bytes or digest.hexdigest() != remote.sha256:
            raise DataError(f"{remote.url}: the {done} bytes there are not the published {remote.bytes}: try again")
