"""The Python interface as the design states it, line by line: what people have written against it keeps running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.data.catalog import locate

KERNELS = """
J = ntkfl.jacobian(model, x, form="auto")
J.shape; J.dense(); J.kernel(); J.jvp(delta); J.vjp(R); J[index]; ntkfl.concatenate([J1, J2])
e = ntkfl.evolve(J, f0, y, lr=0.01, steps=range(100, 2001, 100), loss="ce", kernel="full", scheme="flow")
e.steps; e.outputs; e.residuals; e.delta(i)
"""
LOADED = 'fed = ntkfl.data.load("fashion-mnist").partition(ntkfl.data.Dirichlet(clients=300, alpha=0.1), seed=0)'
OWN = "fed = ntkfl.data.from_clients([(x1, y1), (x2, y2)], test=(xt, yt))"
TRAINED = """
run = ntkfl.train(
    ntkfl.models.mlp(784, 100, 10), fed, ntkfl.methods.SumNTKFL(), rounds=10, clients_per_round=20, seed=0, out=path
)
run.history; run.model; ntkfl.Run.load(path); run.evaluate(x, y)
"""


def small() -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, y = ntkfl.models.mlp(5, 4, 3), torch.randn(6, 5), torch.arange(6) % 3
    with torch.no_grad():
        f0 = model(x)
    J = ntkfl.jacobian(model, x)
    given = {
        "delta": torch.randn(J.shape[2]),
        "R": torch.randn(6, 3),
        "index": [0, 2],
        "J1": J[:2],
        "J2": J[2:],
        "i": 3,
    }
    return {"ntkfl": ntkfl, "model": model, "x": x, "y": y, "f0": f0, **given}


@pytest.mark.parametrize("form", ["auto", "dense", "factored"])
def test_kernels(form: str) -> None:
    names = small()
    exec(KERNELS.replace('"auto"', f'"{form}"'), names)
    J, e = names["J"], names["e"]
    assert J.shape == (6, 3, 39)
    assert J.dense().shape == J.shape
    assert e.steps == tuple(range(100, 2001, 100))
    assert e.outputs.shape == e.residuals.shape == (20, 6, 3)
    assert e.delta(3).shape == (39,)


def test_products_and_placing_of_a_jacobian() -> None:
    """J @ v is J δ, and `to` changes the type of all that is stored, against the dense tensor."""
    names = small()
    J, v = ntkfl.jacobian(names["model"], names["x"], form="factored"), names["delta"]
    dense = J.dense()
    assert torch.allclose(J @ v, dense @ v, rtol=1e-4, atol=1e-5)
    twice = torch.stack([v, -2 * v])
    assert torch.allclose(J @ twice, torch.einsum("ncd,sd->snc", dense, twice), rtol=1e-4, atol=1e-5)
    exact = J.to(torch.float64)
    assert (exact.dtype, J.dtype) == (torch.float64, torch.float32)
    assert torch.allclose(exact @ v.double(), exact.dense() @ v.double(), rtol=1e-12, atol=1e-13)
    assert J.to("cpu").device.type == "cpu"
    assert J.to("cpu", torch.float64).dtype == torch.float64


def trained(text: str, names: dict[str, Any], path: Path) -> ntkfl.Run:
    names |= {"ntkfl": ntkfl, "path": path}
    exec(text, names)
    run: ntkfl.Run = names["run"]
    assert len(run.history) >= 1
    assert ntkfl.Run.load(path).history == run.history
    return run


def test_training_on_clients_of_ones_own(tmp_path: Path) -> None:
    """The same lines with two small clients in the place of three hundred."""
    x, y = torch.randn(60, 784), torch.arange(60) % 10
    data = {"x1": x[:30], "y1": y[:30], "x2": x[30:].numpy(), "y2": y[30:].numpy(), "xt": x, "yt": y, "x": x, "y": y}
    lines = OWN + TRAINED.replace("rounds=10, clients_per_round=20", "rounds=2, clients_per_round=2")
    run = trained(lines, data, tmp_path / "run")
    assert run.evaluate(x, y).accuracy == run.history[-1]["test_accuracy"]


@pytest.mark.long
def test_training_as_written(tmp_path: Path) -> None:
    if locate("fashion-mnist") is None:
        pytest.skip("fashion-mnist is not on this machine")
    names: dict[str, Any] = {}
    names["x"], names["y"] = ntkfl.data.load("fashion-mnist").test_rows.take()
    run = trained(LOADED + TRAINED, names, tmp_path / "run")
    assert run.evaluate(names["x"], names["y"]).accuracy == run.history[-1]["test_accuracy"]
    assert run.history[-1]["test_accuracy"] > 0.8
