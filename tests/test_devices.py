"""A device that is not there is one clear line, whoever asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ntkfl.devices import find_device
from ntkfl.errors import ConfigError
from tests.fork_server import run

ABSENT = ["gpu", "cuda:99", *([] if torch.cuda.is_available() else ["cuda"])]


@pytest.mark.parametrize("name", ABSENT)
def test_a_device_that_is_not_there_names_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no device '{name}' can be used on this machine: there is cpu"):
        find_device(name)


@pytest.mark.parametrize("verb", [["train", "--dataset", "digits"], ["compare", "configs/quickstart.toml"], ["bench"]])
def test_commands_end_with_one_line(verb: list[str], tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"] if verb[0] != "bench" else []
    ended = run("-m", "ntkfl", *verb, "--device", "gpu", *out, directory=Path(__file__).parents[1])
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "no device 'gpu'" in ended.stderr
