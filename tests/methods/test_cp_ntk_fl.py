"""The preset, the codecs behind it, replay, and adjusted outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound, FedAvg
from ntkfl.methods.replay import INPUTS, LABELS, balanced
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sparsify import kept
from ntkfl.wire.topk import topk_bytes
from tests.methods.rounds import play, small_clients, small_task


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


def test_every_stage_can_be_switched_off_and_what_is_left_is_ntk_fl(digits: ntkfl.data.Federated) -> None:
    off = CPNTKFL(
        subsample_rate=1, projected_dim=None, sparsity=0, shuffle=False, **{
            name: NTKFL.model_fields[name].default for name in ("projection", "label_smoothing", "logit_adjustment")
        }
    )  # fmt: skip
    assert train(digits, off, 2).history == train(digits, NTKFL(), 2).history


def test_codec_and_sparsity_go_together() -> None:
    assert CPNTKFL(codec="factored").sparsity == 0
    assert CPNTKFL(codec="dense").sparsity == 0
    assert CPNTKFL(codec="topk").sparsity > 0
    with pytest.raises(ConfigError, match="go together"):
        CPNTKFL(codec="factored", sparsity=0.9)
    with pytest.raises(ConfigError, match="go together"):
        NTKFL(codec="topk")
    with pytest.raises(ConfigError, match="leave sparsity at 0"):
        ntkfl.methods.QSGD(sparsity=0.5)
    with pytest.raises(ConfigError, match="projected_dim must be below the 64"):
        CPNTKFL().model_input_shape((1, 8, 8))


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


def test_mild_sparsification_changes_little(digits: ntkfl.data.Federated) -> None:
    whole = train(digits, CPNTKFL(projected_dim=20, sparsity=0.0)).history[-1]["test_accuracy"]
    half = train(digits, CPNTKFL(projected_dim=20, sparsity=0.5)).history[-1]["test_accuracy"]
    assert abs(whole - half) < 0.05


def test_private_training_learns_digits(digits: ntkfl.data.Federated) -> None:
    run = train(digits, CPNTKFL(projected_dim=40, subsample_rate=0.6, sparsity=0.9), rounds=8)
    assert run.history[-1]["test_accuracy"] > 0.8


def test_the_projections_are_options_of_averaging_too(digits: ntkfl.data.Federated) -> None:
    """FedAvg': the same stages, another method."""
    torch.manual_seed(0)
    method = FedAvg(lr=0.3, local_steps=20, subsample_rate=0.5, projected_dim=40)
    run = ntkfl.train(ntkfl.models.mlp(40, 24, 10), digits, method, rounds=8, clients_per_round=10)
    assert run.history[-1]["test_accuracy"] > 0.6


# -- Replay -----------------------------------------------------------------------------------------------------------


def test_the_server_keeps_exactly_the_projected_inputs() -> None:
    task, clients = small_task(dtype=torch.float64), small_clients(8, 5)
    outcome, _ = play(NTKFL(replay=True, replay_per_class=3), task, clients)
    assert (outcome.state[INPUTS] - torch.cat([c.x for c in clients])).abs().max() < 1e-12
    assert torch.equal(outcome.state[LABELS], torch.cat([c.y for c in clients]))
    assert len(outcome.passed) == 4
    assert outcome.diagnostics["kept_samples"] == 13
    second, _ = play(NTKFL(replay=True, replay_per_class=3), task, clients, outcome.state, 2)
    assert len(second.state[LABELS]) == 26


def test_a_replayed_evolution_is_an_evolution() -> None:
    """One more step on one client's rows drawn whole is NTK-FL's own next round on them."""
    (client,) = small_clients(12)
    client.y = torch.arange(12) % 3
    task = small_task(dtype=torch.float64)
    method = NTKFL(replay=True, replay_evolutions=1, replay_per_class=4, label_smoothing=0)
    outcome, _ = play(method, task, [client])
    plain = NTKFL(label_smoothing=0)
    first, _ = play(plain, task, [client])
    second, _ = play(plain, task, [client], first.state, 2)
    assert torch.equal(outcome.passed[0], first.state["weights"])
    assert (outcome.state["weights"] - second.state["weights"]).abs().max() < 1e-4


def test_replay_helps_and_resumes(digits: ntkfl.data.Federated, tmp_path: Any) -> None:
    options = {"projected_dim": 40, "subsample_rate": 0.3}
    plain = train(digits, CPNTKFL(codec="factored", **options), rounds=4)
    method = CPNTKFL(replay=True, replay_per_class=20, **options)
    assert method.average == 0.98
    whole = train(digits, method, rounds=4, out=tmp_path / "whole")
    gains = [a["test_accuracy"] - b["test_accuracy"] for a, b in zip(whole.history, plain.history, strict=True)]
    assert sum(gains) / len(gains) > 0.01
    assert whole.history[-1]["uplink_bytes"] == plain.history[-1]["uplink_bytes"]  # no more is sent
    train(digits, method, rounds=2, out=tmp_path / "parts")
    train(digits, method, rounds=4, out=tmp_path / "parts", resume=True)
    for name in ("history.jsonl", "model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_replay_needs_inputs_it_can_have() -> None:
    with pytest.raises(ConfigError, match="codec 'factored'"):
        NTKFL(replay=True, codec="dense")
    with pytest.raises(ConfigError, match="codec 'factored'"):
        CPNTKFL(replay=True, codec="topk", sparsity=0.9)
    scaled = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    task = ntkfl.methods.Task(scaled, 3, "ce")
    with pytest.raises(ConfigError, match="gets the inputs themselves"):
        play(
            NTKFL(replay=True),
            task,
            [ClientRound(0, 3 * torch.randn(6, 5), torch.arange(6) % 3, Randomness.simulated(0))],
        )


def test_balanced_draws() -> None:
    y = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    rows = balanced(y, 10, 4, 1, 2)
    assert torch.bincount(y[rows], minlength=4).tolist() == [10, 10, 0, 10]
    assert len(set(rows[:10].tolist())) == 10  # without repetition where there are enough
    assert torch.equal(rows, balanced(y, 10, 4, 1, 2))
    assert not torch.equal(rows, balanced(y, 10, 4, 1, 3))
    assert len(balanced(torch.randn(30, 2), 10, 2, 0)) == 20


# -- Adjusted outputs -------------------------------------------------------------------------------------------------


def test_adjustment_makes_a_skewed_round_predict_as_a_balanced_one() -> None:
    """A model of biases alone learns log shares; with τ = 1 it learns nothing of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 3).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    task = ntkfl.methods.Task(model, 3, "ce")
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    client = ClientRound(0, torch.zeros(100, 1).double(), y, Randomness.simulated(0))
    options: dict[str, Any] = {"label_smoothing": 0, "steps": (40000.0,)}
    plain, _ = play(NTKFL(**options), task, [client])
    f = plain.state["weights"][3:]
    assert np.allclose((f - f[0]).numpy(), np.log([1, 0.5, 1 / 6]), atol=1e-2)
    adjusted, _ = play(NTKFL(logit_adjustment=1.0, **options), task, [client])
    f = adjusted.state["weights"][3:]
    assert float((f - f[0]).abs().max()) < 0.02
