"""Runs that diverge or end worse than a constant prediction say so, with options that exist."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.errors import NTKFLError
from ntkfl.federation.server import remarks
from ntkfl.methods import METHODS, FedAvg, Method, Privacy, SumNTKFL
from tests.cli.test_train import ntkfl as command


def trained(fed: ntkfl.data.Federated, method: Method, rounds: int = 6, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    model = ntkfl.models.mlp(math.prod(fed.input_shape), 8, fed.output_dim)
    return ntkfl.train(model, fed, method, rounds=rounds, clients_per_round=3, callbacks=[], **options)


def test_constants_are_of_the_labels(digits: ntkfl.data.Federated) -> None:
    shares = torch.bincount(digits.test[1]).double() / len(digits.test[1])
    constant = trained(digits, FedAvg(local_steps=1), 1).config["constant"]
    assert constant["loss"] == pytest.approx(float(-(shares * shares.log()).sum()))
    assert constant["accuracy"] == pytest.approx(float(shares.max()))
    x, y = torch.randn(40, 3), torch.randn(40, 2)
    run = trained(ntkfl.data.from_clients([(x, y)] * 3, test=(x, y)), FedAvg(loss="mse", local_steps=1), 1)
    assert run.config["constant"] == {"loss": pytest.approx(float(y.var(0, correction=0).mean() / 2), rel=1e-5)}


def test_a_run_whose_loss_explodes_has_failed(digits: ntkfl.data.Federated) -> None:
    with pytest.warns(UserWarning, match="the model is worse than a constant prediction: test loss") as met:
        run = trained(digits, FedAvg(lr=300.0, local_steps=3))
    assert "take shorter steps" in str(met[0].message)
    assert met[0].filename == __file__
    assert run.failure.startswith("the model is worse than a constant prediction")
    assert [record["round"] for record in run.history if "warning" in record] == [1]
    assert any(line.startswith("warning: the model is worse") for line in remarks(run.history[0]))
    with pytest.raises(NTKFLError) as error:
        trained(digits, FedAvg(lr=1e30, local_steps=5))
    assert any("take shorter steps" in note for note in error.value.__notes__)


def test_real_targets_are_compared_with_their_mean() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    shifted = ntkfl.data.from_clients([(x, 30 + x[:, :1])] * 3, test=(x, x[:, :1]))
    with pytest.warns(UserWarning, match="worse than a constant prediction: test loss"):
        trained(shifted, FedAvg(loss="mse", local_steps=20))


@pytest.mark.parametrize("method", [FedAvg(), SumNTKFL(), METHODS["private-sums"]()])
@pytest.mark.parametrize("rounds", [1, 6])
def test_runs_that_learn_are_left_alone(method: Method, rounds: int, digits: ntkfl.data.Federated) -> None:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        privacy = Privacy(epsilon=None) if method.name == "private-sums" else None
        run = trained(digits, method, rounds, privacy=privacy)
    assert not run.failure
    assert not [warning for warning in met if "constant" in str(warning.message)]


def test_the_command_ends_with_an_error_and_keeps_the_run(tmp_path: Path) -> None:
    small = ["--dataset", "digits", "--clients", "10", "--clients-per-round", "4", "--set", "model.hidden=[12]"]
    how = ["--method", "fedavg", "--set", "local_steps=2", "--rounds", "6", "--out", tmp_path / "a"]
    failed = command("train", *small, *how, "--set", "lr=300")
    assert failed.returncode == 2
    assert failed.stderr.startswith("ntkfl: the model is worse than a constant prediction: test loss")
    run = ntkfl.Run.load(tmp_path / "a")
    assert (len(run.history), bool(run.failure)) == (6, True)
