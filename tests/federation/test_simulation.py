"""Training in one process: what it records, that it repeats itself, and that it learns."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError, ModelError, NumericalError, RunFolderError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.methods import NTKFL, FedAvg

QUICK = NTKFL(steps=(50.0, 400.0))


def net(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return ntkfl.models.mlp(*(sizes or (64, 20, 10)))


def run(fed: ntkfl.data.Federated, method: ntkfl.methods.Method = QUICK, **options: Any) -> ntkfl.Run:
    return ntkfl.train(net(), fed, method, **({"rounds": 3, "clients_per_round": 5} | options))


def test_a_record_a_round(digits: ntkfl.data.Federated) -> None:
    finished = run(digits)
    names = ["round", "test_accuracy", "test_loss", "train_loss", "steps", "uplink_bytes", "downlink_bytes", "clients"]
    for number, record in enumerate(finished.history, start=1):
        assert set(names) <= set(record)
        assert record["round"] == number
        assert record["steps"] in (50.0, 400.0)
        assert len(set(record["clients"])) == 5
        assert all(0 <= i < 20 for i in record["clients"])
        assert record["uplink_bytes"] == sum(record["uplink"].values())
        assert record["downlink_bytes"] == sum(record["downlink"].values())
    weights = finished.history[0]["downlink"]["weights"] / 5
    d = 64 * 20 + 20 + 20 * 10 + 10
    assert 4 * d < weights < 4 * d + 64
    candidates = finished.history[0]["downlink"]["candidates"] / 5  # of two, one and the way to the other, float16
    assert 4 * d < candidates < 4 * d + 256


def test_the_users_model_keeps_its_weights(digits: ntkfl.data.Federated) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    finished = ntkfl.train(model, digits, QUICK, rounds=1, clients_per_round=3)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not torch.equal(finished.model[1].weight, model[1].weight)


def test_averaging_follows_its_formula(digits: ntkfl.data.Federated, tmp_path: Path) -> None:
    """w̄ ← e w̄ + (1−e) w, e = min(average, k/(k+5)); the trajectory itself is the same without averaging."""
    own = []
    for rounds in (1, 2, 3, 4):
        path = tmp_path / str(rounds)
        run(digits, NTKFL(steps=(50.0, 400.0), average=0), rounds=rounds, out=path)
        own.append(RunFolder(path).load_checkpoint()[1]["state/weights"])
    averaged = own[0]
    for k, w in enumerate(own[1:], start=1):
        e = min(0.3, k / (k + 5))
        averaged = e * averaged + (1 - e) * w
    path = tmp_path / "averaged"
    finished = run(digits, NTKFL(steps=(50.0, 400.0), average=0.3), rounds=4, out=path)
    tensors = RunFolder(path).load_checkpoint()[1]
    assert torch.equal(tensors["state/weights"], own[-1])
    assert (tensors["averaged"] - averaged).abs().max() < 1e-6
    assert finished.history[-1]["last_accuracy"] != finished.history[-1]["test_accuracy"]


def test_regression_trains_with_mse() -> None:
    A = torch.randn(6, 2)
    clients = [((x := torch.randn(30, 6)), x @ A) for _ in range(6)]
    xt = torch.randn(50, 6)
    fed = ntkfl.data.from_clients(clients, test=(xt, xt @ A))
    finished = ntkfl.train(ntkfl.models.mlp(6, 40, 2), fed, NTKFL(loss="mse"), rounds=5, clients_per_round=3)
    losses = [r["test_loss"] for r in finished.history]
    assert finished.history[-1]["test_accuracy"] is None
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(ConfigError, match="use loss 'mse'"):
        ntkfl.train(ntkfl.models.mlp(6, 40, 2), fed, NTKFL(), rounds=1, clients_per_round=3)


def test_nothing_is_overwritten_and_no_other_run_continued(digits: ntkfl.data.Federated, tmp_path: Path) -> None:
    folder, other = tmp_path / "a", ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=20), seed=0)
    run(digits, rounds=1, out=folder)
    run(digits, rounds=3, out=folder, resume=True)
    assert RunFolder(folder).config()["rounds"] == 3
    before = (folder / "history.jsonl").read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.tex").write_text("precious")
    refused: list[tuple[str, ntkfl.data.Federated, dict[str, Any]]] = [
        ("already holds a run", digits, {"resume": False}),
        ("not empty and holds no run", digits, {"out": tmp_path / "b"}),
        (r"another configuration: method\.lr is 0\.01 there, 0.02 here", digits, {"method": NTKFL(lr=0.02)}),
        ("another configuration: seed is 0 there, 5 here", digits, {"seed": 5}),
        (r"another configuration: data\.", other, {}),
        ("already holds 3 rounds, more than the 2 asked for", digits, {"rounds": 2}),
    ]
    for message, fed, options in refused:
        with pytest.raises(RunFolderError, match=message):
            run(fed, **{"out": folder, "resume": True} | options)
    with pytest.raises(RunFolderError, match="initial weights differ"):
        ntkfl.train(ntkfl.models.mlp(64, 20, 10), digits, QUICK, clients_per_round=5, out=folder, resume=True)
    assert (folder / "history.jsonl").read_bytes() == before
    assert (tmp_path / "b/thesis.tex").read_text() == "precious"


def test_stop_at(digits: ntkfl.data.Federated) -> None:
    finished = run(digits, NTKFL(), rounds=10, clients_per_round=10, stop_at=0.5)
    assert len(finished.history) < 10
    assert finished.history[-1]["test_accuracy"] >= 0.5


def test_tied_weights_are_saved(digits: ntkfl.data.Federated, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))

    for method in (QUICK, FedAvg(local_steps=2)):
        path = tmp_path / method.name
        finished = ntkfl.train(Tied(), digits, method, rounds=1, clients_per_round=3, out=path)
        saved = load_file(path / "model.safetensors")
        assert torch.equal(saved["a.weight"], saved["b.weight"])
        assert torch.equal(saved["a.weight"], finished.model.a.weight)
        finished.model.load_state_dict(saved)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x.flatten(1)), x


def spoilt() -> nn.Module:
    model = net()
    with torch.no_grad():
        model[1].bias[0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("error", "model", "method", "options"),
    [
        (ConfigError, net, FedAvg, {}),  # a class in place of an instance
        (ConfigError, net, QUICK, {"rounds": 0}),
        (ConfigError, net, QUICK, {"rounds": 2.5}),
        (ConfigError, net, QUICK, {"clients_per_round": 21}),
        (ModelError, nn.Flatten, QUICK, {}),  # nothing to train
        (ModelError, Pair, QUICK, {}),
        (ModelError, lambda: net(65, 20, 10), QUICK, {}),
        (ModelError, lambda: net(64, 20, 7), QUICK, {}),
        (NumericalError, spoilt, QUICK, {}),
        (NumericalError, net, FedAvg(lr=1e30, local_steps=5), {}),
    ],
)
def test_what_cannot_train_is_refused(
    error: type[Exception], model: Any, method: Any, options: dict[str, Any], digits: ntkfl.data.Federated
) -> None:
    with pytest.raises(error):
        ntkfl.train(model(), digits, method, **{"rounds": 1, "clients_per_round": 5} | options)


class Noted:
    """Writes down its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def on_begin(self, rounds: int) -> None:
        self.calls.append(("begin", rounds))

    def on_round(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        self.calls.append((record["round"], timing["round"]))

    def on_end(self) -> None:
        self.calls.append(("end",))


def test_functions_and_objects_are_called_in_the_order_given(digits: ntkfl.data.Federated) -> None:
    calls: list[Any] = []
    heard = [Noted(calls), lambda record, timing: calls.append(record["round"])]
    run(digits, FedAvg(local_steps=1), rounds=2, callbacks=heard)
    assert calls == [("begin", 2), (1, 1), 1, (2, 2), 2, ("end",)]
    with pytest.raises(ConfigError, match="a callback is a function, or an object with on_round"):
        run(digits, FedAvg(local_steps=1), callbacks=[3])


def test_held_out_clients_are_not_asked_however_many_a_round_asks(digits: ntkfl.data.Federated) -> None:
    clients = len(digits)
    run = ntkfl.train(net(64, 4, 10), digits, FedAvg(local_steps=1), rounds=1, clients_per_round=clients, hold_out=3)
    assert len(run.history[0]["clients"]) == clients - 3
    with pytest.raises(ConfigError, match="clients_per_round must be from 1 to all"):
        ntkfl.train(net(64, 4, 10), digits, FedAvg(), clients_per_round=clients + 1, hold_out=3)


def test_features_of_unlike_sizes_are_warned_of() -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=draws) * torch.tensor([1.0, 100.0, 0.0]), torch.arange(40) % 2
    clients = [(x[:15], y[:15]), (x[15:30], y[15:30])]
    for scale, warned in ((1.0, True), (0.01, False)):
        scaled = [(x * torch.tensor([1.0, scale, 1.0]), y) for x, y in [*clients, (x[30:], y[30:])]]
        lines: list[str] = []
        data = ntkfl.data.from_clients(scaled[:2], test=scaled[2])
        ntkfl.train(net(3, 2), data, QUICK, rounds=1, callbacks=[SimpleNamespace(on_start=lines.append)])
        assert any("times as large as others: scale them" in line for line in lines) == warned
