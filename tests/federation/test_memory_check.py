"""Memory said beforehand: near what a run then takes, and an error where there is not enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.federation.memory_check import BASE_BYTES, available_bytes, available_for, check_memory, predicted_bytes
from ntkfl.methods import NTKFL, FedAvg, SumRidge, Task

MEASURE = """
import re, tempfile, torch, ntkfl
def peak():  # not getrusage, which remembers the size of the process this one was started from
    return 1024 * int(re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read())[1])
from ntkfl.federation.callbacks import Functions
from ntkfl.federation.memory_check import BASE_BYTES
from ntkfl.methods import NTKFL, SumRidge
torch.manual_seed(0)
wide = lambda shape, outputs: torch.nn.Sequential(torch.nn.Flatten(), ntkfl.models.mlp(784, 1000, 10))
model = getattr(ntkfl.models, "{model}", wide)((1, 28, 28), 10)
clients = [(torch.randn({n}, 1, 28, 28), torch.arange({n}) % 10) for _ in range({clients})]
fed = ntkfl.data.from_clients(clients, test=(torch.randn(20, 1, 28, 28), torch.arange(20) % 10))
lines = []
before = peak()
method = {method}
with tempfile.TemporaryDirectory() as out:
    ntkfl.train(
        model, fed, method, rounds={rounds}, clients_per_round={asked}, callbacks=[Functions(on_start=lines.append)],
        out=out if {rounds} > 1 else None,
    )
after = peak()
from ntkfl.federation.memory_check import predicted_bytes
from ntkfl.methods import Task
task = Task(model, 10, "ce", total_clients={clients})
expected = predicted_bytes(task, method, [{n}] * {clients}, {asked}, fed.test[0][:1]) - BASE_BYTES
print(after - before, expected)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say what a process took")
@pytest.mark.parametrize(
    ("model", "n", "clients", "asked", "rounds", "most", "method"),
    [
        ("cnn", 300, 4, 4, 1, 2.5, "NTKFL(steps=(1.0, 2.0, 3.0))"),
        ("gru", 60, 4, 4, 1, 2.5, "NTKFL(steps=(1.0, 2.0, 3.0))"),
        ("wide", 20, 40, 40, 1, 1.5, "SumRidge(penalty=0.1)"),
        ("wide", 20, 40, 40, 1, 1.5, "SumRidge(keep_shares=True)"),
        ("wide", 20, 40, 2, 20, 1.5, "SumRidge(penalty=0.1)"),  # what is kept is that of all clients seen so far
    ],
)
def test_the_prediction_is_near_the_truth(
    model: str, n: int, clients: int, asked: int, rounds: int, most: float, method: str
) -> None:
    """In a process of its own, beyond what was there before training: at least the 2.5th part, and `most` times it at
    most. Runs of several rounds have a folder.
    """
    program = MEASURE.format(model=model, n=n, clients=clients, asked=asked, rounds=rounds, method=method)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    taken, expected = map(int, done.stdout.split())
    assert expected / 2.5 < taken < expected * most


def task(model: nn.Module) -> Task:
    return Task(model, 10, "ce")


def test_it_grows_as_it_should() -> None:
    probe = torch.zeros(1, 784)
    small = task(ntkfl.models.mlp(784, 100, 10))

    def needs(method: ntkfl.methods.Method, clients: int = 10, n: int = 200) -> int:
        return predicted_bytes(small, method, [n] * 20, clients, probe) - BASE_BYTES

    assert needs(NTKFL(), clients=20) > 1.7 * needs(NTKFL()) - (64 << 20)
    assert needs(NTKFL(codec="dense")) > 50 * (needs(NTKFL()) - (40 << 20))
    assert needs(NTKFL(codec="dense", subsample_rate=0.5)) < 0.6 * needs(NTKFL(codec="dense"))
    assert needs(NTKFL(kernel="trace"), n=4000) > needs(NTKFL(), n=4000) + 4 * 40_000**2
    assert needs(FedAvg(), clients=20) > needs(FedAvg())
    assert needs(SumRidge(values="8bit")) > needs(SumRidge())


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigError, match=r"needs about 40\.0 GiB, and 20\.0 GiB are free") as caught:
        check_memory(40 << 30, 20 << 30, NTKFL(), 20)
    assert "8 clients a round would fit" in str(caught.value)
    assert "subsample_rate 0.45" in str(caught.value)
    with pytest.raises(ConfigError, match=r"are free$"):
        check_memory(40 << 30, 1 << 20, FedAvg(), 20)
    assert check_memory(1 << 30, None, NTKFL(), 20) == "expects to need about 1.0 GiB"
    assert "of 2.0 GiB" in check_memory(1 << 30, 2 << 30, NTKFL(), 20)


def test_a_run_that_would_not_fit_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.federation.simulation.available_for", lambda method, device: 100 << 20)
    fed = ntkfl.data.from_clients(
        [(torch.randn(9, 4), torch.arange(9) % 3)], test=(torch.randn(9, 4), torch.arange(9) % 3)
    )
    with pytest.raises(ConfigError, match="are free"):
        ntkfl.train(ntkfl.models.mlp(4, 5, 3), fed, NTKFL(), rounds=1, clients_per_round=1)


def test_free_memory_is_known_here() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is None or 1 << 20 < available < 1 << 50


def test_rows_that_an_accelerator_has_no_room_for_may_stay_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 100, "cuda": 7}
    monkeypatch.setattr("ntkfl.federation.memory_check.available_bytes", lambda device: free[device.type])
    found = [available_for(method, torch.device(on)) for method in (NTKFL(), FedAvg()) for on in ("cpu", "cuda")]
    assert found == [100, 107, 100, 7]
