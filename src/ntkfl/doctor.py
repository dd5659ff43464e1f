"""What this machine has of all that `ntkfl` can use."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from ntkfl.data.catalog import CATALOG, cache_folder, locate
from ntkfl.errors import NTKFLError
from ntkfl.federation.memory_check import available_bytes
from ntkfl.version import __version__

_ENOUGH_MEMORY = 2 << 30  # a paper-scale round, and room
_ENOUGH_DISK = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `kind` is good, note (something optional is missing) or bad (something needed is)."""

    kind: str
    what: str
    found: str
    advice: str = ""


def examine(needs_gpu: bool = False) -> Iterator[Finding]:
    """All findings, in the order people would ask."""
    yield Finding("good", "Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("good", "ntkfl", f"{__version__} in {Path(__file__).parent}")
    yield from _requirements()
    yield _memory()
    yield _disk()
    yield _gpu(needs_gpu)
    yield from _datasets()
    yield _cache()


def _requirements() -> Iterator[Finding]:
    """The core's requirements in one line where all is well, and a line an extra."""
    needed: dict[str, list[Requirement]] = {"": []}
    for text in requires("ntkfl") or []:
        requirement = Requirement(text)
        marked = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        needed.setdefault(marked[1] if marked else "", []).append(requirement)
    for extra, wanted in needed.items():
        wrong = [problem for requirement in wanted if (problem := _problem(requirement))]
        if extra:
            kind, what, advice = "note", f"extra {extra}", f"to use it: pip install 'ntkfl[{extra}]'"
        else:
            kind, what, advice = "bad", "packages", "install again: pip install --upgrade ntkfl, or make venv"
        if wrong:
            yield Finding(kind, what, ", ".join(wrong), advice)
        else:
            have = "" if extra else f"torch {torch.__version__}, {torch.get_num_threads()} threads; "
            yield Finding("good", what, f"{have}{len(wanted)} package{'s'[: len(wanted) != 1]}, all there")


def _problem(requirement: Requirement) -> str:
    """What is wrong with an installed package, in words; empty where nothing is."""
    if requirement.name == "ntkfl":
        return ""
    try:
        have = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} missing"
    return "" if requirement.specifier.contains(have, prereleases=True) else f"{requirement.name} {have}"


def _memory() -> Finding:
    free = available_bytes(torch.device("cpu"))
    if free is None:
        return Finding(
            "note", "memory", "cannot be told here", "runs say what they expect to need, and nobody can check it"
        )
    text = f"{free / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    if free >= _ENOUGH_MEMORY:
        return Finding("good", "memory", text)
    return Finding(
        "note", "memory", text, "a run that needs more is refused before it starts, with settings that would fit"
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    if free >= _ENOUGH_DISK:
        return Finding("good", "disk", text)
    return Finding("note", "disk", text, "keep runs elsewhere: --out /another/disk/runs")


def _gpu(needed: bool) -> Finding:
    missing = "bad" if needed else "note"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Finding(
            "good", "GPU", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free; use it with --device cuda"
        )
    if shutil.which("nvidia-smi") is None:
        return Finding(missing, "GPU", "none", "not needed: a paper-scale server update takes seconds on two cores")
    if torch.version.cuda is None:
        advice = "install a CUDA build of torch over it, see https://pytorch.org/get-started/locally"
        return Finding(missing, "GPU", f"there, but torch {torch.__version__} is built for the CPU alone", advice)
    advice = "check with nvidia-smi that the driver is loaded and new enough"
    return Finding(missing, "GPU", f"there, but torch (CUDA {torch.version.cuda}) cannot use it", advice)


def _datasets() -> Iterator[Finding]:
    for name in CATALOG:
        try:
            found = locate(name)
        except NTKFLError as error:
            yield Finding("bad", "data", str(error))
            return
        if found:
            yield Finding("good", "data", f"{name}, {found.where}")
        elif CATALOG[name].downloads:
            yield Finding(
                "note", "data", f"{name} is not here", f"downloaded on first use, or now: ntkfl data fetch {name}"
            )
        else:
            yield Finding("note", "data", f"{name} is not here", f"ntkfl data fetch {name} says how to make it")


def _cache() -> Finding:
    folder = cache_folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("good", "cache", f"{folder} can be written")
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a folder of yours, or NTKFL_DATA to where the data are"
        return Finding("note", "cache", f"{folder} cannot be written: {error.strerror}", advice)
