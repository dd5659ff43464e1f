"""One loader behind every command: names, files, folders of pictures, a function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.data import IID, ByClient
from ntkfl.data.files import Columns
from ntkfl.data.sources import open_dataset, own_digest
from ntkfl.errors import ConfigError, DataError
from ntkfl.federation.config import RunConfig, load_data


def picture_folder(root: Path) -> Path:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    for client, counts in {"north": {"cat": 3, "dog": 2}, "south": {"cat": 4}, "test": {"cat": 2, "dog": 2}}.items():
        for label, count in counts.items():
            (root / client / label).mkdir(parents=True)
            for i in range(count):
                image.fromarray(np.full((5, 4), 60 * (label == "dog") + i, np.uint8)).save(
                    root / client / label / f"{i}.png"
                )
    return root


def test_names_files_and_what_is_neither(tmp_path: Path) -> None:
    assert len(open_dataset("digits")) == 1442
    (tmp_path / "a.csv").write_text("x,y,label\n" + "".join(f"{i},1,{i % 2}\n" for i in range(10)))
    dataset = open_dataset(str(tmp_path / "a.csv"), Columns(label="label"))
    assert len(dataset) + len(dataset.test_rows) == 10
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        open_dataset("digit")
    for name in ("", "x" * 5000, "a\0b", str(tmp_path / "none")):  # no file, whatever the system says of such names
        with pytest.raises(ConfigError, match="unknown dataset"):
            RunConfig(data={"dataset": name})
    with pytest.raises(ConfigError, match="--label-column names a column of a file"):
        open_dataset("digits", Columns(label="x"))


def test_pictures_have_clients_and_classes_by_name(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "photos")
    fed = load_data(RunConfig(data={"dataset": str(folder)}))
    assert (fed.client_names, fed.class_names) == (("north", "south"), ("cat", "dog"))
    assert fed.counts().tolist() == [[3, 2], [4, 0]]
    torch.testing.assert_close(fed.client(0)[0][4, 0, 0, 0], torch.tensor(61 / 255))
    assert open_dataset(str(folder)).partition(IID(clients=9)).sizes == [1] * 9
    shown = CliRunner().invoke(app, ["data", "show", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.output.splitlines()][-2:] == [
        ["north", "3", "2", "5"],
        ["south", "4", "·", "4"],
    ]
    before = own_digest(str(folder))
    (folder / "north" / "cat" / "0.png").unlink()
    assert own_digest(str(folder)) != before
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures as CLIENT/CLASS/FILE"):
        open_dataset(str(tmp_path / "empty"))


def test_a_table_says_whose_its_rows_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{i},{i % 2}\n" for i in range(10)))
    with pytest.raises(DataError, match=r"--client-column .* --partition iid"):
        open_dataset(str(tmp_path / "a.csv")).partition(ByClient())
