"""Standardising from sums: the pooled mean and deviation, whoever has which samples, and what it costs in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.data import Moments
from ntkfl.data.moments import Standardization
from ntkfl.errors import NTKFLError
from ntkfl.wire import Message

SPREAD = torch.tensor([1e-3, 1.0, 100.0, 5.0])


def table(n: int, shift: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator) * SPREAD + shift
    x[:, 3] = 7.0  # never varies
    return x, (x[:, 1] > shift).long()


def sites() -> ntkfl.data.Federated:
    parts = [table(n, shift, n) for n, shift in ((30, 0.0), (50, 2.0), (11, -3.0))]
    return ntkfl.data.from_clients(parts, test=table(200, 1.0, 1))


def test_moments_are_those_of_the_pooled_samples() -> None:
    fed = sites()
    pooled = torch.cat([fed.client(i)[0] for i in range(3)]).double()
    found = fed.moments()
    torch.testing.assert_close(found.mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.std[:3], pooled.std(0, correction=0)[:3], rtol=1e-6, atol=0)
    assert float(found.std[3]) == 1  # nothing to divide by


def test_standardised_clients() -> None:
    fed = sites()
    new = fed.standardized()
    x = torch.cat([new.client(i)[0] for i in range(3)])
    torch.testing.assert_close(x.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(x[:, :3].std(0, correction=0), torch.ones(3), rtol=1e-4, atol=0)
    assert bool((x[:, 3] == 0).all())
    assert new.standardization is not None
    torch.testing.assert_close(new.test[0], Standardization.of(new.standardization).standardize(fed.test[0]))
    assert new.fingerprint() != fed.fingerprint()
    assert new.describe()["standardized"] is True
    assert new.hold_out(1)[0].standardization is new.standardization


def test_images_are_standardised_by_channel_and_stay_bytes() -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=3), seed=0)
    new = fed.standardized()
    assert new.rows.x.dtype == torch.uint8
    x = torch.cat([new.client(i)[0] for i in range(3)])
    torch.testing.assert_close(x.mean(), torch.zeros(()), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std(correction=0), torch.ones(()), rtol=1e-5, atol=0)
    assert Moments.of(torch.randn(2, 3, 5, 5)).sums.shape == (3,)
    assert Moments.of(torch.randn(2, 7, 5)).sums.shape == (5,)
    with pytest.raises(NTKFLError, match="tokens"):
        Moments.of(torch.zeros(2, 3, dtype=torch.int64))


def test_what_it_takes_counts_in_the_first_round() -> None:
    how = {"rounds": 2, "clients_per_round": 2, "callbacks": []}
    method = ntkfl.methods.FedAvg(local_steps=2)
    plain, new = (ntkfl.train(nn.Linear(4, 2), fed, method, **how) for fed in (sites(), sites().standardized()))  # type: ignore[arg-type]
    first, second = new.history
    numbers = torch.zeros(4, dtype=torch.float64)
    arrays = {"samples": torch.zeros((), dtype=torch.float64), "sums": numbers, "squares": numbers}
    told = len(Message("sums", 0, arrays).encode())
    assert first["uplink"]["moments"] == 3 * told  # every client, whoever is asked first
    assert first["uplink_bytes"] == plain.history[0]["uplink_bytes"] + 3 * told
    assert first["downlink"]["moments"] > 3 * 2 * 8 * 4
    assert "moments" not in second["uplink"]
    # Features of sizes from 0.001 to 100: as they are, steps of one size do not suit them all.
    assert new.history[-1]["test_loss"] < plain.history[-1]["test_loss"]


@pytest.mark.parametrize(("name", "masked"), [("sum-ntk-fl", True), ("private-sums", False)])
def test_settings_that_hide_clients_refuse_it(name: str, masked: bool) -> None:
    method, privacy = ntkfl.methods.METHODS[name](), ntkfl.methods.Privacy(secure_sum=masked)
    with pytest.raises(NTKFLError, match="these settings would hide"):
        ntkfl.train(nn.Linear(4, 2), sites().standardized(), method, rounds=1, callbacks=[], privacy=privacy)
