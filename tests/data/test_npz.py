"""A client's data as a file: dealt and read back, and nothing but an error for anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ntkfl
from ntkfl.data.files import from_file
from ntkfl.data.npz import deal
from ntkfl.errors import DataError


def test_dealt_and_read_back(tmp_path: Path) -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=3, alpha=1.0), seed=0)
    paths = deal(fed, tmp_path / "dealt")
    assert [path.name for path in paths] == ["client-0.npz", "client-1.npz", "client-2.npz", "test.npz"]
    for path, (x, y) in zip(paths, [*(fed.client(i) for i in range(3)), fed.test], strict=True):
        with np.load(path, allow_pickle=False) as dealt:
            assert torch.equal(torch.from_numpy(dealt["x"]), x)
            assert torch.equal(torch.from_numpy(dealt["y"]), y)


X, Y = np.zeros((3, 2)), np.zeros(3, dtype=int)


def test_missing_cut_short_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        from_file(tmp_path / "none.npz")
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    whole = (tmp_path / "a.npz").read_bytes()
    for content in (b"", b"text", whole[:-30], whole[: len(whole) // 2]):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(DataError):
            from_file(tmp_path / "b.npz")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        deal(ntkfl.data.from_clients([(X, Y)], test=(X, Y)), tmp_path / "file")


def test_an_archive_with_a_password_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((2, 3)), y=np.array([0, 1]))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\x01\x02")
    raw[at + 8] |= 1
    raw[6] |= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match="cannot be read"):
        from_file(path)
