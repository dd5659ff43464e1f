"""A client's own data in the forms it may have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from ntkfl.data.client import read_own
from ntkfl.data.folders import Images
from ntkfl.errors import ConfigError, DataError
from ntkfl.user_code import find_factory


def bytes_of(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures_in_a_folder_a_class(tmp_path: Path, channels: int, mode: str) -> None:
    for label, seed in ((2, 0), (0, 1)):
        (tmp_path / str(label)).mkdir()
        pixels = np.random.default_rng(seed).integers(0, 256, (4, 3, channels), dtype=np.uint8)
        Image.fromarray(pixels.squeeze(), mode).save(tmp_path / str(label) / "a.png")
    (tmp_path / "2" / "notes.txt").write_text("not a picture")
    x, y = read_own(str(tmp_path), Images((channels, 4, 3), (0.5,) * channels, (0.25,) * channels), find_factory)
    assert y.tolist() == [0, 2]  # in the order of the folders' names
    expected = np.random.default_rng(1).integers(0, 256, (4, 3, channels), dtype=np.uint8)
    torch.testing.assert_close(x[0], torch.from_numpy(expected).permute(2, 0, 1).float() / 255 * 4 - 2)


def test_class_names_decide_the_label_not_which_classes_a_client_has(tmp_path: Path) -> None:
    (tmp_path / "dog").mkdir()
    Image.fromarray(bytes_of(4, 3), "L").save(tmp_path / "dog" / "a.png")
    assert read_own(str(tmp_path), Images((1, 4, 3), classes=("cat", "dog")), find_factory)[1].tolist() == [1]
    with pytest.raises(DataError, match="'dog', expected one of cat, cow"):
        read_own(str(tmp_path), Images((1, 4, 3), classes=("cat", "cow")), find_factory)
    with pytest.raises(DataError, match="expected a class's number"):
        read_own(str(tmp_path), Images((1, 4, 3)), find_factory)


def test_pictures_that_do_not_fit_or_are_none(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    Image.fromarray(bytes_of(5, 5), "L").save(tmp_path / "0" / "a.png")
    with pytest.raises(DataError, match=r"a.png is 5×5, not \(4, 3\)"):
        read_own(str(tmp_path), Images((1, 4, 3)), find_factory)
    (tmp_path / "0" / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="no picture that can be read"):
        read_own(str(tmp_path), Images((1, 4, 3)), find_factory)
    with pytest.raises(DataError, match="1 or 3 channels"):
        read_own(str(tmp_path), Images((64,)), find_factory)
    (tmp_path / "0" / "a.png").unlink()
    with pytest.raises(DataError, match="holds no files"):
        read_own(str(tmp_path), Images((1, 4, 3)), find_factory)


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hospital.py").write_text(
        "import numpy as np\n\ndef patients():\n    return np.ones((3, 4)), np.array([0, 1, 1])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    x, y = read_own("hospital:patients", Images((4,)), find_factory)
    assert x.shape == (3, 4)
    assert y.tolist() == [0, 1, 1]
    with pytest.raises(ConfigError, match="no function"):
        read_own("hospital:doctors", Images((4,)), find_factory)


def test_npz_and_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.ones((2, 4)), y=np.array([0, 1]))
    assert read_own(str(tmp_path / "own.npz"), Images((4,)), find_factory)[0].shape == (2, 4)
    with pytest.raises(DataError, match=r"expected an \.npz, \.csv or \.parquet file, a folder"):
        read_own(str(tmp_path / "absent"), Images((4,)), find_factory)


def test_a_folder_numbered_beyond_all_classes(tmp_path: Path) -> None:
    (tmp_path / ("9" * 200)).mkdir()
    Image.new("L", (4, 4)).save(tmp_path / ("9" * 200) / "a.png")
    with pytest.raises(DataError, match="expected a class's number"):
        read_own(str(tmp_path), Images((1, 4, 4)), find_factory)
