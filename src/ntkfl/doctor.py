"""What this machine has of all that `ntkfl` can use."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from ntkfl.data.catalog import CATALOG, locate
from ntkfl.errors import NTKFLError
from ntkfl.extras import by_extra, install_command
from ntkfl.version import __version__


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
    yield _gpu(needs_gpu)
    yield from _datasets()


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


def _gpu(needed: bool) -> Check:
    missing = "bad" if needed else "note"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Check(
            "good", "GPU", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free; use it with --device cuda"
        )
    if shutil.which("nvidia-smi") is None:
        advice = "install NVIDIA's driver, or leave --gpu out" if needed else "not needed"
        return Check(missing, "GPU", "none", advice)
    advice = "install a build of torch for it (https://pytorch.org/get-started/locally), or a newer driver"
    return Check(missing, "GPU", f"there, but torch {torch.__version__} cannot use it", advice)


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
