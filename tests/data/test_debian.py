"""Datasets out of Debian packages: a real package, made by dpkg-deb, handed over by an apt-get of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ntkfl.data import debian
from ntkfl.errors import DataError

pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb on this machine")


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt-get first on the PATH that serves one package from a folder and writes down how it was called."""
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: dataset-toy\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody\nDescription: toy\n"
    )
    (tree / "usr/share/datasets/toy").mkdir(parents=True)
    (tree / "usr/share/datasets/toy/train.gz").write_bytes(b"content")
    served = tmp_path / "served"
    served.mkdir()
    subprocess.run(
        ["dpkg-deb", "-b", str(tree), str(served / "dataset-toy_1.0_all.deb")], check=True, capture_output=True
    )
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/apt-get"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *update) exit 0;; *download*dataset-toy) '
        f"cp {served}/*.deb .;; *) echo 'E: Unable to locate package' >&2; exit 100;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_files_land_in_the_folder(apt: Path) -> None:
    debian.unpack_package("dataset-toy", "usr/share/datasets/toy", apt / "cache")
    assert (apt / "cache/train.gz").read_bytes() == b"content"
    assert [p.name for p in (apt / "cache").iterdir()] == ["train.gz"]


def test_the_systems_lists_and_cache_are_left_alone(apt: Path) -> None:
    debian.unpack_package("dataset-toy", "usr/share/datasets/toy", apt / "cache")
    for call in (apt / "calls").read_text().splitlines():
        assert "-oDir::State=" in call
        assert "-oDir::Cache=" in call


def test_a_package_that_does_not_exist(apt: Path) -> None:
    with pytest.raises(DataError, match="Unable to locate package"):
        debian.unpack_package("dataset-none", "usr", apt / "cache")
    assert not (apt / "cache").exists()
