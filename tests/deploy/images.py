"""What an image contains, without a container engine: a fresh virtual environment that holds the same packages, linked
from those of this one, and nothing else.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of all packages that these need, by what is installed here."""
    wanted, known = [Requirement(line) for line in requirements], set[str]()
    while wanted:
        one = wanted.pop()
        name = re.sub("[-_.]+", "-", one.name).lower()
        if name in known:
            continue
        known.add(name)
        needs = [Requirement(text) for text in metadata.requires(name) or ()]
        wanted += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return known


def environment(folder: Path, requirements: Iterable[str]) -> Path:
    """The Python of a new environment with these, what they need, and this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ntkfl").symlink_to(ROOT / "src" / "ntkfl")
    for name in closure(requirements):
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "python"
