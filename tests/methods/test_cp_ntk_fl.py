"""The preset, its stages, and the codecs behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.methods import CPNTKFL, NTKFL, FedAvg
from ntkfl.privacy.sparsify import kept
from ntkfl.wire.topk import topk_bytes


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)


def train(fed: ntkfl.data.Federated, method: NTKFL, rounds: int = 4, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    model = ntkfl.models.mlp(method.projected_dim or 64, 24, 10)
    return ntkfl.train(model, fed, method, rounds=rounds, clients_per_round=5, **options)


def test_the_preset_is_the_papers_table_1() -> None:
    method = CPNTKFL()
    assert (method.projected_dim, method.subsample_rate) == (200, 0.3)
    assert method.sparsity >= 0.97
    assert method.shuffle
    assert method.values == "8bit"
    assert isinstance(method, NTKFL)


def test_every_stage_can_be_switched_off_and_what_is_left_is_ntk_fl(
    digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = CPNTKFL(
        subsample_rate=1, projected_dim=None, sparsity=0, shuffle=False, **{
            name: NTKFL.model_fields[name].default for name in ("projection", "label_smoothing")
        }
    )  # fmt: skip
    monkeypatch.setattr(CPNTKFL, "prior", 0.0)
    assert train(digits, off, 2).history == train(digits, NTKFL(), 2).history


@pytest.mark.parametrize("codec", ["topk", "factored", "dense"])
def test_uplink_bytes_are_those_of_the_codec(codec: str, digits: ntkfl.data.Federated) -> None:
    """Rows of a round have one size, which the codec's own arithmetic gives."""
    method = CPNTKFL(projected_dim=20, codec=codec)
    run = train(digits, method, 1)
    record = run.history[0]
    d = 20 * 24 + 24 + 24 * 10 + 10
    n = 10 * d
    payload = {
        "topk": topk_bytes(n, kept(method.sparsity, n), "8bit") if method.sparsity else 0,
        "factored": 4 * (20 + 10 * 24 + 24 + 10 * 10),
        "dense": 4 * n,
    }[codec]
    row = record["uplink"]["upload"] / record["samples"]
    assert payload + 4 * 10 + 1 < row < payload + 4 * 10 + 1 + 360  # outputs, label, and headers, seal and frame
    assert record["samples"] == sum(max(1, int(0.3 * digits.sizes[i] + 0.5)) for i in record["clients"])


def test_dense_and_factored_train_alike(digits: ntkfl.data.Federated) -> None:
    a, b = (train(digits, CPNTKFL(projected_dim=20, codec=codec), 2).history[-1] for codec in ("dense", "factored"))
    assert abs(a["test_loss"] - b["test_loss"]) < 1e-3


def test_the_projections_are_options_of_averaging_too(digits: ntkfl.data.Federated) -> None:
    """FedAvg': the same stages, another method."""
    torch.manual_seed(0)
    method = FedAvg(lr=0.3, local_steps=20, subsample_rate=0.5, projected_dim=40)
    run = ntkfl.train(ntkfl.models.mlp(40, 24, 10), digits, method, rounds=8, clients_per_round=10)
    assert run.history[-1]["test_accuracy"] > 0.6
