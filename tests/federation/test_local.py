"""Clients of this process: samples that are made ready together are those that each client would load by itself."""

from __future__ import annotations

import pytest
import torch

import ntkfl
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import NTKFL

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_samples_of_a_cohort_are_gathered_at_once(device: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.federation.local.batched", lambda task: True)
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=9, alpha=0.5), seed=0)
    method = NTKFL(subsample_rate=rate)
    clients = Simulation(ntkfl.models.mlp(64, 5, 10), data, method, device=device).clients
    clients.load([1, 4])
    clients.load([0, 4, 7])
    assert set(clients._data) == {0, 1, 4, 7}
    for number in (0, 1, 4, 7):
        x, y = data.client(number)
        drawn = clients[number].drawn(3, len(y))
        own = clients[number].at(3)
        assert own.x.device.type == device
        assert torch.equal(own.x.cpu(), x[drawn])
        assert torch.equal(own.y.cpu(), y[drawn])
    storages = [clients[number].at(3).x.untyped_storage().data_ptr() for number in (0, 7, 1)]
    assert (storages[0] == storages[1]) == (rate == 1)  # gathered together, and nothing drawn from them
    assert storages[0] != storages[2]


def test_where_there_is_no_room_each_client_loads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.federation.local.batched", lambda task: True)
    monkeypatch.setattr("ntkfl.federation.local.available_bytes", lambda device: 1000)
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=9, alpha=0.5), seed=0)
    clients = Simulation(ntkfl.models.mlp(64, 5, 10), data, NTKFL()).clients
    clients.load([1, 4])
    assert not clients._data
    assert torch.equal(clients[4].at(1).x, data.client(4)[0])
