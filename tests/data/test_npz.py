"""A client's data as a file: nothing but an error for anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ntkfl.data.files import from_file
from ntkfl.errors import DataError

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
