"""The page on data runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ntkfl.data import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one writes a file
    exec(compile(example, "docs/data.md", "exec"), {})


def test_every_dataset_is_described() -> None:
    assert len(EXAMPLES) == 7
    assert all(f"| `{name}` |" in PAGE for name in NAMES)
