"""What people have written with Jacobians and their evolution keeps running, name by name."""

from __future__ import annotations

from typing import Any

import torch

import ntkfl

KERNELS = """
J = ntkfl.jacobian(model, x, form="auto")
J.shape; J.dense(); J.kernel(); J.jvp(delta); J.vjp(R); J[index]; ntkfl.concatenate([J[:2], J[2:]])
e = ntkfl.evolve(J, f0, y, lr=0.01, steps=range(100, 2001, 100), loss="ce", kernel="full", scheme="flow")
e.steps; e.outputs; e.residuals; e.delta(i)
"""


def test_kernels() -> None:
    model, x, y = ntkfl.models.mlp(5, 4, 3), torch.randn(6, 5), torch.arange(6) % 3
    delta, R = torch.randn(2, 39), torch.randn(6, 3)
    given = {"model": model, "x": x, "y": y, "f0": model(x).detach(), "delta": delta, "R": R, "index": [0, 2], "i": 3}
    names: dict[str, Any] = {"ntkfl": ntkfl} | given
    exec(KERNELS, names)
    J, e = names["J"], names["e"]
    assert J.shape == J.dense().shape == (6, 3, 39)
    assert torch.allclose(J @ delta, torch.einsum("ncd,sd->snc", J.dense(), delta), rtol=1e-4, atol=1e-5)
    assert e.steps == tuple(range(100, 2001, 100))
    assert e.outputs.shape == e.residuals.shape == (20, 6, 3)
    assert e.delta(3).shape == (39,)
