"""One client: samples drawn once per round, and no simulator in a deployed one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from ntkfl.federation.client import Client, seeded
from ntkfl.methods import NTKFL, Method, Task
from ntkfl.privacy.settings import Privacy

X, Y = torch.randn(30, 5), torch.arange(30) % 3


def task(**privacy: Any) -> Task:
    torch.manual_seed(0)
    return Task(torch.nn.Linear(5, 3), 3, "ce", privacy=Privacy(**privacy), total_clients=4)


def client(method: Method, rate: float = 1.0, **options: Any) -> Client:
    return Client(2, task(subsample_rate=rate), method, lambda: (X, Y), seeded(7, 2), **options)


def test_samples_are_drawn_once_per_round() -> None:
    own = client(NTKFL(), 0.5)
    first = own.at(1)
    assert len(first) == 15
    assert own.at(1) is first
    again = own.at(2)
    assert not torch.equal(again.x, first.x)
    assert again.randomness.seed("noise") != first.randomness.seed("noise")
    own.rest()
    assert torch.equal(own.at(2).x, again.x)  # seeded: it draws the same after a rest
    assert len(client(NTKFL(), rows=7).at(1)) == 7  # no more than were agreed


def test_a_client_loads_no_simulator() -> None:
    """Nor what only a server or an experiment needs: less to read for whoever answers for a client's machine."""
    module = "ntkfl.federation.client"
    program = f"import sys, {module}; print(*sorted(name for name in sys.modules if name.startswith('ntkfl')))"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert module in loaded
    unwanted = {
        *(f"ntkfl.federation.{name}" for name in ("simulation", "byzantine", "transport", "server")),
        "ntkfl.services.store",
        "ntkfl.services.key_server",
    }
    assert not loaded & unwanted
    assert not any(
        name.split(".")[1] in ("audit", "compare", "report", "cli", "flower") for name in loaded if "." in name
    )
    assert not any(name.startswith("ntkfl_experiments") for name in loaded)
