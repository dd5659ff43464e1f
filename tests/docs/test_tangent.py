"""The recipe of data attribution in docs/tangent.md, beyond what it asserts itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkfl

PAGE = (Path(__file__).parents[2] / "docs" / "tangent.md").read_text()


@pytest.fixture(scope="module")
def attribution() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "ntkfl": ntkfl}
    section = PAGE.partition("\n## Data attribution\n")[2].partition("\n## ")[0]
    (recipe,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    exec(compile(recipe, "tangent.md", "exec"), names)
    return names


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """∇ log(p / (1 − p)) of each sample, [N, d], by autograd in float64, where no p here is 1."""
    rows = []
    for sample, label in zip(x.double(), y, strict=True):
        log_p = model(sample.unsqueeze(0)).log_softmax(1)[0, label]
        g = torch.autograd.grad(log_p - torch.log(-torch.expm1(log_p)), list(model.parameters()))
        rows.append(torch.cat([part.reshape(-1) for part in g]))
    return torch.stack(rows)


def test_projections_are_of_the_gradients_where_p_rounds_to_one(attribution: dict[str, Any]) -> None:
    """E⟨φ_i, φ_j⟩ = ⟨g_i, g_j⟩, with a deviation of at most √(2/k) of the norms; exactly k directions."""
    net, x, y = attribution["net"], attribution["x"], attribution["y"]
    projected: Callable[..., tuple[Tensor, Tensor]] = attribution["projected"]
    certain = (net(x).softmax(1).gather(1, y[:, None]) == 1).squeeze(1)
    assert certain.any()
    g = gradients(net.double(), x, y)
    p = net(x.double()).softmax(1).gather(1, y[:, None]).squeeze(1).detach()
    net.float()
    norms = g.norm(dim=1)
    for k in (100, 1000):
        phi, unsure = projected(net, x, y, k)
        assert phi.shape == (300, k)
        error = (phi.double() @ phi.double().T - g @ g.T) / (norms[:, None] * norms)
        assert error.square().mean().sqrt() < (2 / k) ** 0.5
        assert error[certain].square().mean().sqrt() < (2 / k) ** 0.5
        # Of all lengths together, over directions: √(2 Σλ² / k) / Σλ with λ the eigenvalues of g gᵀ.
        spread = (2 / k) ** 0.5 * (g @ g.T).norm() / norms.square().sum()
        assert abs(phi.double().square().sum() / norms.square().sum() - 1) < 4 * spread
        assert torch.allclose(unsure.double(), 1 - p, rtol=1e-3, atol=1e-12)
