"""What this machine has of all that `ntkfl` can use."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from ntkfl.data.catalog import CATALOG, cache_folder, locate
from ntkfl.errors import NTKFLError
from ntkfl.extras import by_extra, install_command
from ntkfl.version import __version__

_ENOUGH_MEMORY = 2 << 30  # a paper-scale round, and room
_ENOUGH_DISK = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing looked at. `kind` is good, note (something optional is missing) or bad (something needed is)."""

    kind: str
    what: str
    found: str
    advice: str = ""


def examine(needs_gpu: bool = False) -> Iterator[Check]:
    """All findings, in the order people would ask."""
    yield Check("good", "Python", f"{platform.python_version()}, {sys.executable}")
    yield Check("good", "ntkfl", f"{__version__} in {Path(__file__).parent}")
    yield from _requirements()
    yield _memory()
    yield _disk()
    yield _gpu(needs_gpu)
    yield from _datasets()
    yield _cache()


def _requirements() -> Iterator[Check]:
    """The core's requirements in one line where all is well, and a line an extra."""
    for extra, wanted in by_extra().items():
        wrong = [problem for requirement in wanted if (problem := _problem(requirement))]
        if extra:
            kind, what, advice = "note", f"extra {extra}", f"to use it: {install_command(extra)}"
        else:
            kind, what, advice = "bad", "packages", f"install again, or {install_command(extra)}"
        if wrong:
            yield Check(kind, what, ", ".join(wrong), advice)
        else:
            have = "" if extra else f"torch {torch.__version__}, {torch.get_num_threads()} threads; "
            yield Check("good", what, f"{have}{len(wanted)} package{'s'[: len(wanted) != 1]}, all there")


def _problem(requirement: Requirement) -> str:
    """What is wrong with an installed package, in words; empty where nothing is."""
    try:
        have = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} missing"
    return "" if requirement.specifier.contains(have, prereleases=True) else f"{requirement.name} {have}"


def _memory() -> Check:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Check("note", "memory", "cannot be told here", "a paper-scale round takes up to 2 GiB")
    text = f"{free / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    if free >= _ENOUGH_MEMORY:
        return Check("good", "memory", text)
    return Check("note", "memory", text, "a paper-scale round takes up to 2 GiB: take fewer clients or samples in one")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    if free >= _ENOUGH_DISK:
        return Check("good", "disk", text)
    return Check("note", "disk", text, "keep runs elsewhere: --out /another/disk/runs")


def _gpu(needed: bool) -> Check:
    missing = "bad" if needed else "note"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Check(
            "good", "GPU", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free; use it with --device cuda"
        )
    if shutil.which("nvidia-smi") is None:
        if needed:
            return Check(missing, "GPU", "none: no NVIDIA driver is installed", "install one, or leave --gpu out")
        return Check(missing, "GPU", "none", "not needed: a paper-scale server update takes seconds on two cores")
    if torch.version.cuda is None:
        advice = "install a CUDA build of torch over it, see https://pytorch.org/get-started/locally"
        return Check(missing, "GPU", f"there, but torch {torch.__version__} is built for the CPU alone", advice)
    advice = "check with nvidia-smi that the driver is loaded and new enough"
    return Check(missing, "GPU", f"there, but torch (CUDA {torch.version.cuda}) cannot use it", advice)


def _datasets() -> Iterator[Check]:
    for name in CATALOG:
        try:
            found = locate(name)
        except NTKFLError as error:
            yield Check("bad", "data", str(error))
            return
        if found:
            yield Check("good", "data", f"{name}, {found.where}")
        elif CATALOG[name].downloads:
            yield Check(
                "note", "data", f"{name} is not here", f"downloaded on first use, or now: ntkfl data fetch {name}"
            )
        else:
            yield Check("note", "data", f"{name} is not here", f"ntkfl data fetch {name} says how to make it")


def _cache() -> Check:
    folder = cache_folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check("good", "cache", f"{folder} can be written")
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a folder of yours, or NTKFL_DATA to where the data are"
        return Check("note", "cache", f"{folder} cannot be written: {error.strerror}", advice)
