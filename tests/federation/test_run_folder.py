"""Folders and checkpoints that were cut short, damaged, locked, or could not be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ntkfl.errors import RunFolderError
from ntkfl.federation.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.open({"seed": 1, "method": {"name": "ntk-fl", "steps": None, "lr": 0.1}}, resume=False)
    for number in (1, 2, 3):
        folder.append("history.jsonl", {"round": number})
    folder.save_checkpoint(2, {"state/weights": torch.arange(5.0), "client/3/c": torch.ones(2, 2)})
    return folder


def test_a_line_cut_short_is_not_counted(folder: RunFolder) -> None:
    with open(folder.path / "history.jsonl", "a") as file:
        file.write('{"round": 4, "test_acc')
    assert len(folder.records()) == 3


def test_a_checkpoint_that_was_cut_short_or_changed_is_refused(folder: RunFolder) -> None:
    path = folder.path / "checkpoint/state.safetensors"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(RunFolderError, match="cut short or damaged"):
            folder.load_checkpoint()
    for at in range(8, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            done, tensors = folder.load_checkpoint()
        except RunFolderError:
            continue
        assert done == 2  # a flip in the padding of the header changes nothing that is read
        assert torch.equal(tensors["state/weights"], torch.arange(5.0))


def test_a_checkpoint_replaced_while_it_is_read_is_still_whole(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on while others look at it: the reader gets the checkpoint it opened, and not half of the next."""
    read = Path.read_bytes

    def replaced(path: Path) -> bytes:
        content = read(path)
        if path.name == "state.safetensors":
            folder.save_checkpoint(3, {"state/weights": torch.arange(6.0)})
        return content

    monkeypatch.setattr(Path, "read_bytes", replaced)
    done, tensors = folder.load_checkpoint()
    assert (done, len(tensors["state/weights"])) == (2, 5)


def test_what_a_killed_process_left_half_written_is_swept_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        (folder.path / "config.toml.1-2.part").write_text("half")
        folder.open({"seed": 1}, resume=False)
    assert folder.holds_run
    assert not list(folder.path.glob("*.part"))
