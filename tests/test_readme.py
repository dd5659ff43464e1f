"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but on the built-in digits and for two rounds."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for old, new in [
        ("fashion-mnist", "digits"),
        ("784", "64"),
        ("clients=300", "clients=40"),
        ("rounds=10", "rounds=2"),
    ]:
        assert old in code
        code = code.replace(old, new)
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["run"].history) == 2  # type: ignore[attr-defined]
    exec(code, {})  # again: nothing that the first time left behind is in the way


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_bringing_a_model_runs_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "models.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["run"].history[-1]["test_accuracy"] > 0.7  # type: ignore[attr-defined]
