"""What is shipped: one version, everything the package needs in the wheel, and a core that stands alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import ntkfl

ROOT = Path(__file__).parents[1]


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert version("ntkfl") == ntkfl.__version__
    experiments = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())["project"]
    assert experiments["version"] == ntkfl.__version__
    assert f"\nversion: {ntkfl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {ntkfl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_types_pages_and_no_tests(tmp_path: Path) -> None:
    wheels = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run([sys.executable, "-m", "pip", *wheels], check=True, timeout=200, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"ntkfl-{ntkfl.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src/ntkfl").rglob("*") if p.suffix != ".pyc"}
    assert {n for n in source if "." in Path(n).name and "__pycache__" not in n} <= names
    assert {"ntkfl/py.typed", "ntkfl/report/assets/page.html", "ntkfl/data/digits.npz"} <= names
    assert not [n for n in names if n.startswith(("tests/", "docs/", "examples/", "ntkfl_experiments/"))]


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ntkfl", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == ntkfl.__version__
