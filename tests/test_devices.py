"""A missing device is a one-line error in every command; `train` has it in `tests/cli/test_mistakes.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ntkfl.devices import find_device
from ntkfl.errors import ConfigError
from tests.fork_server import run


@pytest.mark.parametrize("name", ["gpu", "cuda:99", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_names_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no device '{name}' can be used on this machine: there is cpu"):
        find_device(name)


@pytest.mark.parametrize("words", [["compare", Path(__file__).parents[1] / "configs/quickstart.toml"], ["bench"]])
def test_commands_end_with_one_line(words: list[str | Path], tmp_path: Path) -> None:
    ended = run("-m", "ntkfl", *words, "--device", "gpu", directory=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "no device 'gpu'" in ended.stderr
