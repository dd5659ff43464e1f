"""A dataset out of a Debian package: fetched and unpacked into the cache, nothing installed, no root needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ntkfl.errors import DataError

_SECONDS = 300


def available() -> bool:
    """Whether this machine has Debian's tools."""
    return bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))


def unpack_package(package: str, inside: str, folder: Path) -> None:
    """Copy the files of `package` under its folder `inside` into `folder`, each moved there whole.

    apt works on lists and a cache of its own in a temporary folder: the system's are neither needed nor touched.
    """
    with tempfile.TemporaryDirectory(prefix="ntkfl-apt-") as name:
        work = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial", "unpacked"):
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
        archives = list(work.glob(f"{package}_*.deb"))
        if not archives:
            raise DataError(f"apt-get downloaded no {package}")
        _run(["dpkg-deb", "-x", str(archives[0]), "unpacked"], work)
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted((work / "unpacked" / inside).glob("*")):
            partial = folder / (file.name + ".part")
            shutil.copyfile(file, partial)
            os.replace(partial, folder / file.name)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{command[0]} failed: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise DataError(f"{command[0]} failed: {said}")
