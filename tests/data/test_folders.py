"""Folders as clients: pictures, texts, and what is wrong with them in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import ntkfl
from ntkfl.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Two clients and a test set: cats are dark, dogs are bright, and the second client has no dog."""
    root = tmp_path / "sites"
    for client, counts in {"north": {"cat": 3, "dog": 2}, "south": {"cat": 4}, "test": {"cat": 2, "dog": 2}}.items():
        for label, count in counts.items():
            folder = root / client / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.full((5, 4, 3), 40 * (label == "dog") + i, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    (root / ".hidden").mkdir()
    return root


def test_pictures(sites: Path) -> None:
    fed = ntkfl.data.from_folders(sites, ntkfl.data.pictures((3, 5, 4), mean=(0.1,) * 3, std=(0.5,) * 3))
    assert fed.sizes == [5, 4]
    assert fed.counts().tolist() == [[3, 2], [4, 0]]
    x, y = fed.client(0)
    assert x.shape == (5, 3, 5, 4)
    assert y.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(x[4, 0, 0, 0], torch.tensor((41 / 255 - 0.1) / 0.5))
    assert len(fed.test[1]) == 4


def test_texts(tmp_path: Path) -> None:
    for folder, text in (
        ("a/good", "fine fine"),
        ("a/bad", "poor"),
        ("b/bad", "poor poor poor"),
        ("held/good", "fine"),
    ):
        (tmp_path / "all" / folder).mkdir(parents=True)
        (tmp_path / "all" / folder / "1.txt").write_text(text)

    def read(paths: Sequence[Path]) -> torch.Tensor:
        return torch.tensor([[p.read_text().count("fine"), p.read_text().count("poor")] for p in paths])

    fed = ntkfl.data.from_folders(tmp_path / "all", read, test=tmp_path / "all" / "held", tokens=True)
    assert fed.client(0)[0].tolist() == [[0, 1], [2, 0]]  # bad before good
    assert fed.client(1)[1].tolist() == [0]
    assert fed.test[1].tolist() == [1]


def test_what_is_wrong(sites: Path, tmp_path: Path) -> None:
    read = ntkfl.data.pictures((3, 5, 4))
    with pytest.raises(DataError, match="no test set"):
        ntkfl.data.from_folders(sites, read, test=tmp_path / "none")
    with pytest.raises(DataError, match=r"is 5×4, not \(9, 9\)"):
        ntkfl.data.from_folders(sites, ntkfl.data.pictures((3, 9, 9)))
    with pytest.raises(DataError, match="5 files were read to 1 inputs"):
        ntkfl.data.from_folders(sites, lambda paths: np.zeros((1, 2)))
    (sites / "north" / "cat" / "notes.txt").write_text("?")
    with pytest.raises(DataError, match=r"notes.txt is no picture"):
        ntkfl.data.from_folders(sites, read)
    (sites / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="empty holds no files"):
        ntkfl.data.from_folders(sites, lambda paths: np.zeros((len(paths), 2)))
    (tmp_path / "flat" / "test").mkdir(parents=True)
    with pytest.raises(DataError, match="no folder of a client"):
        ntkfl.data.from_folders(tmp_path / "flat", read)
