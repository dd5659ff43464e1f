"""Published files brought into a folder: from their authors, or out of a Debian package.

The standard library does it in as many lines as a library for downloads would take. Neither continues a broken one.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkfl.atomic import replacing
from ntkfl.errors import DataError
from ntkfl.progress import ProgressBar

_CHUNK = 1 << 16
_APT_S = 300


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


def has_apt() -> bool:
    """Whether this machine has Debian's tools."""
    return bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))


def unpack_package(package: str, inside: str, folder: Path) -> None:
    """Copy the files of a Debian package under its folder `inside` into `folder`. Nothing is installed; no root needed.

    apt works on lists and a cache of its own in a temporary folder: the system's are neither needed nor touched.
    """
    with tempfile.TemporaryDirectory(prefix="ntkfl-apt-") as name:
        work = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial"):
            (work / part).mkdir(parents=True)
        private = {
            "Dir::State": work / "state",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": work / "cache",
            "Debug::NoLocking": "1",
            "Acquire::Retries": "0",  # without a network, say so soon
            "Acquire::http::Timeout": "15",
            "Acquire::https::Timeout": "15",
            "APT::Sandbox::User": "root",  # as root, apt would drop to a user who cannot write here
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in private.items())]
        _run([*apt, "update"], work)
        _run([*apt, "download", package], work)
        _run(["dpkg-deb", "-x", *map(str, work.glob(f"{package}_*.deb")), "unpacked"], work)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted((work / "unpacked" / inside).glob("*")):
            with replacing(folder / path.name) as file:
                file.write(path.read_bytes())


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_APT_S, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise DataError(f"{command[0]} failed: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{command[0]} failed: {error}") from None
