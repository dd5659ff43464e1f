"""A run's posterior: of what its server kept, the same after loading, and better calibrated than outputs alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.errors import NTKFLError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from ntkfl.federation.uncertainty import calibration, coverage, expected_calibration_error
from ntkfl.methods import SumNTKFL, SumRidge
from ntkfl.tangent.posterior import Prediction, RidgePosterior
from ntkfl.tangent.ridge import RidgeSums, solve

F, CLASSES = 12, 3


def logistic(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes drawn from a softmax of known weights."""
    generator = torch.Generator().manual_seed(seed)
    W = 0.6 * torch.randn(F, CLASSES, generator=torch.Generator().manual_seed(7))
    x = torch.randn(n, F, generator=generator)
    return x, torch.multinomial((x @ W).softmax(1), 1, generator=generator)[:, 0]


def federation(n: int, clients: int = 4) -> ntkfl.data.Federated:
    parts = [logistic(n // clients, seed) for seed in range(clients)]
    return ntkfl.data.from_clients(parts, test=logistic(3000, 99), classes=CLASSES)


def trained(method: ntkfl.methods.Method, n: int = 80, rounds: int = 1, out: Path | None = None) -> ntkfl.Run:
    model = nn.Linear(F, CLASSES)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return ntkfl.train(model, federation(n), method, rounds=rounds, clients_per_round=4, out=out, callbacks=[])


@pytest.mark.parametrize("options", [{}, {"keep_shares": True}, {"features": 8}, {"label_smoothing": 0.1}])
def test_ridge_has_the_posterior_of_the_pooled_sums(options: dict[str, object], tmp_path: Path) -> None:
    run = trained(SumRidge(penalty=0.01, **options), out=tmp_path / "run")  # type: ignore[arg-type]
    x, _ = federation(80).test
    found = run.posterior().predict(x)
    pooled = [federation(80).client(i) for i in range(4)]
    features, y = torch.cat([a for a, _ in pooled]).double(), torch.cat([b for _, b in pooled])
    smoothing = run.method.label_smoothing
    Y = nn.functional.one_hot(y, CLASSES).double() * (1 - smoothing) + smoothing / CLASSES
    signs = None
    if "features" in options:
        from ntkfl.methods.sum_ridge import random_signs

        signs = random_signs(F, 8)
        features = features @ signs
    sums = RidgeSums.of(features, Y)
    expected = RidgePosterior(sums, 0.01, solve(sums, 0.01), smoothing, signs).predict(x, run.model(x))
    torch.testing.assert_close(found.std, expected.std, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=1e-3, atol=1e-5)
    loaded = ntkfl.Run.load(tmp_path / "run", nn.Linear(F, CLASSES)).posterior().predict(x)
    assert torch.equal(found.std, loaded.std)


@pytest.mark.parametrize("model", ["head", "mlp"])
def test_laplace_of_a_head_that_overfits(model: str) -> None:
    """80 samples, 39 weights, trained to the end: outputs alone are too sure, the posterior is not."""
    method = SumNTKFL(time=None, mu=1, delta=1e-3, label_smoothing=0, average=0, values="float32", control="fixed")
    fed = federation(80)
    if model == "head":
        run = trained(method, rounds=8)
    else:
        torch.manual_seed(0)
        net = ntkfl.models.mlp(F, 30, CLASSES)
        method = method.model_copy(update={"mu": 4.0, "time": 200.0})
        run = ntkfl.train(net, fed, method, rounds=8, clients_per_round=4, callbacks=[])
    x, y = fed.test
    found = calibration(run.posterior().predict(x), y)
    assert found.log_loss is not None
    assert found.plain_log_loss is not None
    assert found.log_loss < found.plain_log_loss - 0.02
    assert found.calibration_error is not None
    assert found.plain_calibration_error is not None
    assert found.calibration_error < 0.7 * found.plain_calibration_error


@pytest.mark.parametrize("method", [SumRidge(), SumNTKFL(linear_head=True)])
def test_a_temperature_makes_up_for_what_is_assumed(method: ntkfl.methods.Method) -> None:
    """Samples of very different scale are anything but Gaussian: fitted on some, better calibrated on others."""

    def scaled(n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 2, (n,), generator=generator)
        x = torch.randn(n, 6, generator=generator) + 0.5 * (2 * y.unsqueeze(1) - 1)
        return x * torch.randn(n, 1, generator=generator).exp(), y

    fed = ntkfl.data.from_clients([scaled(100, i) for i in range(3)], test=scaled(4000, 9))
    model = ntkfl.models.head(nn.Identity(), 2, features=6)
    run = ntkfl.train(model, fed, method, rounds=1, clients_per_round=3, callbacks=[])
    plain, (x, y) = run.posterior(), fed.test
    fitted = plain.tempered(*scaled(2000, 10))
    before, after = (calibration(p.predict(x), y) for p in (plain, fitted))
    assert fitted.temperature != 1
    assert after.log_loss is not None
    assert before.log_loss is not None
    assert after.log_loss < before.log_loss
    assert after.calibration_error is not None
    assert before.calibration_error is not None
    assert after.calibration_error < 0.8 * before.calibration_error
    assert after.accuracy == before.accuracy


def test_the_posterior_narrows_with_samples() -> None:
    method = SumNTKFL(time=None, mu=1, delta=1e-3, label_smoothing=0, average=0, control="fixed")
    x, _ = federation(80).test
    few, many = (float(trained(method, n, 5).posterior().predict(x).std.mean()) for n in (200, 3200))
    assert 0.15 < many / few < 0.4  # 1/√16, and a prior


def test_real_targets_lie_in_their_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(F, 1, generator=generator)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, F, generator=generator)
        return x, x @ W + 0.5 * torch.randn(n, 1, generator=generator)

    fed = ntkfl.data.from_clients([draw(20) for _ in range(3)], test=draw(2000))
    run = ntkfl.train(nn.Linear(F, 1), fed, SumRidge(penalty=1e-3), rounds=1, clients_per_round=3, callbacks=[])
    prediction = run.posterior().predict(fed.test[0])
    assert prediction.probabilities is None
    found = coverage(prediction, fed.test[1])
    assert prediction.noise is not None
    assert 0.38 < float(prediction.noise) < 0.62  # 0.5, from 47 degrees of freedom: a deviation of 0.05
    for level, part in found.items():
        assert abs(part - float(level)) < 0.08


def test_calibration_error_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0])
    # Bins of a half: all of them are in the upper one, 2 of 4 right, said 0.7375 on average.
    assert expected_calibration_error(p, y, bins=2) == pytest.approx(0.2375)
    assert expected_calibration_error(p, y, bins=10) == pytest.approx((0.1 + 0.8 + 0.3 + 0.55) / 4)
    sure = Prediction(torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert calibration(sure, torch.tensor([0, 1])).log_loss == pytest.approx(0.5 * 0.6931, abs=1e-4)


def test_where_there_is_none() -> None:
    with pytest.raises(NTKFLError, match="use sum-ridge or sum-ntk-fl"):
        trained(ntkfl.methods.FedAvg(local_steps=1)).posterior()
    with pytest.raises(NTKFLError, match="for squared error use sum-ridge"):
        trained(SumNTKFL(loss="mse")).posterior()


def test_the_verb(tmp_path: Path) -> None:
    config = RunConfig(
        rounds=1,
        clients_per_round=5,
        data={"dataset": "digits", "partition": "iid", "clients": 5, "standardize": True},
        model={"name": "mlp", "hidden": [30]},
        method={"name": "sum-ridge"},
    )
    execute(config, out=tmp_path / "run")
    said = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    found = json.loads((tmp_path / "run" / "uncertainty.json").read_text())
    assert found["samples"] == 355
    assert found["calibration_error"] < found["plain_calibration_error"]
    # The class of the largest output is what training measures; the posterior's likeliest class is another's business.
    assert found["plain_accuracy"] == ntkfl.Run.load(tmp_path / "run").history[-1]["test_accuracy"]
    assert "measured on 355 samples: the run's test set" in said.output
    assert f"{found['calibration_error']:.4f}" in said.output
    data = tmp_path / "own.npz"
    import numpy as np

    x, y = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=5), seed=0).test
    np.savez(data, x=x.numpy(), y=y.numpy())
    out = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run"), "--data", str(data), "--json"])
    assert out.exit_code == 0, out.output
    assert json.loads(out.output) == pytest.approx(found, rel=1e-4)  # the same samples, standardised as in the run
    out = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run"), "--calibrate", str(data)])
    assert out.exit_code == 0, out.output
    assert "temperature" in out.output
    half = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run"), "--calibrate", "test"])
    assert "measured on 178 samples: the other half of the run's test set" in half.output
    assert "fitted on 177 samples: half of the run's test set" in half.output
    execute(config.model_copy(update={"method": {"name": "fedavg", "local_steps": 1}}), out=tmp_path / "other")
    refused = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "other")])
    assert refused.exit_code != 0


@pytest.mark.parametrize("method", ["sum-ridge", "sum-ntk-fl"])
def test_of_a_table_samples_that_trained_are_refused(tmp_path: Path, method: str) -> None:
    """The same accuracy as training's, averaged weights or not; the run's file holds what it was trained on."""
    x, y = logistic(300, 1)
    rows = [",".join([*(f"{v:.4f}" for v in row), "abc"[c]]) for row, c in zip(x.tolist(), y.tolist(), strict=True)]
    for name, part in (("mine", rows[:200]), ("other", rows[200:])):
        header = ",".join([*(f"f{i}" for i in range(F)), "kind", "site"])
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *(f"{r},s{i % 3}" for i, r in enumerate(part))]))
    data = {"dataset": str(tmp_path / "mine.csv"), "label_column": "kind", "client_column": "site"}
    model = {"hidden": [6]} if method == "sum-ntk-fl" else {"name": "random-features", "options": {"features": 9}}
    execute(RunConfig(data=data, rounds=3, model=model, method={"name": method}), out=tmp_path / "run")
    said = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    found = json.loads((tmp_path / "run" / "uncertainty.json").read_text())
    assert found["plain_accuracy"] == ntkfl.Run.load(tmp_path / "run").history[-1]["test_accuracy"]
    for option in ("--data", "--calibrate"):
        refused = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run"), option, str(tmp_path / "mine.csv")])
        assert "is what the run was trained on" in str(refused.exception)
        other = CliRunner().invoke(app, ["uncertainty", str(tmp_path / "run"), option, str(tmp_path / "other.csv")])
        assert other.exit_code == 0, other.output  # columns and classes as the run's
        assert f"100 samples: {tmp_path / 'other.csv'}" in other.output
