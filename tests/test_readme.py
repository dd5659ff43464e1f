"""What the README shows must run."""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ntkfl

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_its_pretrained_network_learns_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but with a small network in place of torchvision's, and pictures of twelve pixels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=SimpleNamespace(resnet18=_small)))
    rng = np.random.default_rng(0)
    for owner, count in (("site-1", 8), ("site-2", 8), ("test", 10)):
        for label in range(10):
            folder = tmp_path / "photos" / owner / str(label)
            folder.mkdir(parents=True)
            for i in range(count if owner == "test" or label % 2 == owner.endswith("2") else 1):
                pixels = rng.integers(0, 90, (12, 12, 3), dtype=np.uint8)
                pixels[:, label] += 150
                Image.fromarray(pixels).save(folder / f"{i}.png")
    code = blocks()[1]
    assert "224" in code
    names: dict[str, object] = {"ntkfl": ntkfl}
    exec(code.replace("224", "12"), names)
    (record,) = names["run"].history  # type: ignore[attr-defined]
    assert record["test_accuracy"] > 0.8


def _small(weights: str) -> nn.Module:
    """A network with a last layer called `fc`, as torchvision's residual networks have."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 8, 3), "relu": nn.ReLU(), "flat": nn.Flatten(), "fc": nn.Linear(800, 1000)}
    return nn.Sequential(OrderedDict(parts))


def test_its_training_from_scratch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but on the built-in digits and for two rounds."""
    monkeypatch.chdir(tmp_path)
    code = blocks()[0]
    small = {"fashion-mnist": "digits", "784": "64", "clients=300": "clients=40", "rounds=10": "rounds=2"}
    for old, new in small.items():
        assert old in code
        code = code.replace(old, new)
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["run"].history) == 2  # type: ignore[attr-defined]


def test_its_jacobian_is_as_large_as_it_says() -> None:
    names: dict[str, object] = {"ntkfl": ntkfl}
    exec(blocks()[2], names)
    J, H = names["J"], names["H"]
    assert isinstance(J, ntkfl.Jacobian)
    assert isinstance(H, torch.Tensor)
    said = README.read_text()
    assert f"{list(J.shape)}: layer" in said
    assert f"here {J.nbytes / 1e6:.0f} MB where all derivatives take {4 * math.prod(J.shape) / 1e6:,.0f} MB" in said
    assert f"NTK {list(H.shape)}" in said
