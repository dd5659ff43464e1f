"""A device that is not there is one clear line, whoever asks for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import ntkfl
from ntkfl.devices import devices_here, find_device, joined_on, to_host, warm_up
from ntkfl.errors import ConfigError
from tests.fork_server import run

ABSENT = ["gpu", "cuda:99", *([] if torch.cuda.is_available() else ["cuda"])]


@pytest.mark.parametrize("name", ABSENT)
def test_a_device_that_is_not_there_names_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no device '{name}' can be used on this machine: there is cpu"):
        find_device(name)


def test_every_device_that_is_named_can_be_used() -> None:
    assert [find_device(name).type for name in devices_here()] == [name.split(":")[0] for name in devices_here()]


def test_training_from_python_says_so_too() -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=2), seed=0)
    with pytest.raises(ConfigError, match="no device 'gpu'"):
        ntkfl.train(
            ntkfl.models.mlp(64, 8, 10), fed, ntkfl.methods.FedAvg(), rounds=1, clients_per_round=2, device="gpu"
        )


@pytest.mark.parametrize("verb", [["train", "--dataset", "digits"], ["compare", "configs/quickstart.toml"], ["bench"]])
def test_commands_end_with_one_line(verb: list[str], tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"] if verb[0] != "bench" else []
    ended = run("-m", "ntkfl", *verb, "--device", "gpu", *out, directory=Path(__file__).parents[1])
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "no device 'gpu'" in ended.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_there_and_back_in_few_copies(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    parts = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3) - 5]
    classes = [torch.tensor([3], dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.uint8)]
    if device == "cuda":
        classes[0] = classes[0].pin_memory()  # and the other is not
    there, labels = joined_on(torch.device(device), [parts, classes])
    assert there.device.type == labels.device.type == device
    here = to_host([there.T, labels, parts[0]])
    assert [t.device.type for t in here] == ["cpu"] * 3
    assert torch.equal(here[0], torch.cat(parts).T)
    assert here[1].tolist() == [3, 4, 5]
    assert here[2] is parts[0]


@pytest.mark.parametrize("name", [None, "cpu", "cuda:99", torch.device("cuda")])
def test_a_device_is_made_ready_beside_what_follows_if_it_can_be(name: str | torch.device | None) -> None:
    before = threading.active_count()
    warm_up(name)
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before  # and nothing was raised
