"""The page on data: what it says of other libraries, and that it has every dataset. `tests/docs` runs its blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ntkfl
from ntkfl.data import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_wrapper_of_hugging_face_datasets_on_the_library_itself() -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    (block,) = [example for example in EXAMPLES if "class Pairs" in example]
    space: dict[str, Any] = {}
    exec(compile(block, "docs/data.md", "exec"), space)
    rows = {"image": np.arange(5 * 4).reshape(5, 1, 2, 2).tolist(), "label": [0, 1, 0, 1, 1]}
    items = datasets.Dataset.from_dict(rows).with_format("torch")
    fed = ntkfl.data.from_clients([space["Pairs"](items)], test=space["Pairs"](items))
    assert fed.client(0)[0].shape == (5, 1, 2, 2)
    assert fed.client(0)[1].tolist() == [0, 1, 0, 1, 1]


def test_every_dataset_is_described() -> None:
    assert len(EXAMPLES) == 7
    assert all(f"| `{name}` |" in PAGE for name in NAMES)
