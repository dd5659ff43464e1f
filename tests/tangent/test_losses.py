"""Losses of the user's own: derivatives against autograd and closed forms, and training with them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, NumericalError
from ntkfl.tangent.losses import CrossEntropy, Loss, MeanSquared, check_loss, find_loss, loss_name, per_sample
from tests.tangent.evolutions import problem, rk4


@dataclass(frozen=True)
class Huber(Loss):
    """Squares up to `delta`, absolute values beyond; derivatives are left to autograd."""

    delta: float = 1.0

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return nn.functional.huber_loss(f, Y, reduction="none", delta=self.delta).mean(-1)


class Averaged(Loss):
    """What a loss must not be: one number for all samples."""

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return (f - Y).square().mean()


def logistic(f: Tensor, Y: Tensor) -> Tensor:
    """One-against-all: Σ_j log(1 + e^{f_j}) − Y_j f_j."""
    return (nn.functional.softplus(f) - Y * f).sum(-1)


def made_up(N: int = 6, d2: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(N, d2, generator=generator, dtype=torch.float64)
    return f, torch.randn(N, d2, generator=generator, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize("loss", [CrossEntropy(), MeanSquared(), Huber(0.7), logistic])
def test_derivatives_agree_with_autograd(loss: Loss) -> None:
    f, Y = made_up()
    v = torch.linspace(-1, 1, f.numel(), dtype=torch.float64).view_as(f)
    criterion = find_loss(loss)
    gradient = torch.stack([torch.func.grad(criterion.value)(a, b) for a, b in zip(f, Y, strict=True)])
    H = torch.stack([torch.func.hessian(criterion.value)(a, b) for a, b in zip(f, Y, strict=True)])
    assert torch.allclose(criterion.residual(f, Y), -gradient, atol=1e-12)
    assert torch.allclose(criterion.curvature_product(f, Y, v), (H @ v.unsqueeze(-1)).squeeze(-1), atol=1e-12)
    R = criterion.hessian_root(f, Y)
    assert torch.allclose(R @ R.mT, H, atol=1e-12)


@pytest.mark.parametrize("loss", [Huber(0.3), logistic])
def test_the_flow_follows_the_loss(loss: Loss) -> None:
    """R(t) of `evolve` against fine Runge–Kutta steps of f' = (η/N) Θ r(f) in float64."""
    _, _, J, f0, _ = problem("deep tanh")
    Y = made_up(7)[1]
    _, R = rk4(J, f0, Y, 0.5, 30.0, loss, "full")
    evolution = ntkfl.evolve(J, f0, Y, 0.5, [30.0], loss, rtol=1e-6)
    assert torch.allclose(evolution.residuals[0], R, rtol=1e-3, atol=1e-4 * float(R.abs().max()))


@pytest.mark.parametrize(("kernel", "scheme"), [("full", "flow"), ("trace", "paper")])
def test_a_loss_of_pytorch_is_taken_per_sample_or_refused(kernel: str, scheme: str) -> None:
    """With reduction="none" it moves outputs as `ce` does; its mean would move them an N-th as far."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.float64)
    J, f0, y = ntkfl.jacobian(model, x), model(x).detach(), torch.arange(7) % 3
    expected = ntkfl.evolve(J, f0, y, 0.5, [20], "ce", kernel, scheme)
    ours = ntkfl.evolve(J, f0, y, 0.5, [20], nn.CrossEntropyLoss(reduction="none"), kernel, scheme)
    assert (ours.outputs - expected.outputs).norm() < 1e-3 * (expected.outputs - f0).norm()
    with pytest.raises(ConfigError, match='reduction="none"'):
        ntkfl.evolve(J, f0, y, 0.5, [20], nn.functional.cross_entropy, kernel, scheme)


def test_what_is_no_loss_is_refused() -> None:
    for wrong, why in [
        ("cee", "unknown loss 'cee': did you mean 'ce'"),
        (Huber, r"an instance, such as Huber\(\)"),
        ("python:Huber", "given as a Python object"),
    ]:
        with pytest.raises(ConfigError, match=why):
            check_loss(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=why):
            ntkfl.methods.FedAvg(loss=wrong)
    f, Y = made_up()
    with pytest.raises(ConfigError, match=r"one per sample, \[6\]"):
        per_sample(nn.MSELoss(reduction="none"), f, Y)
    for reduced in (nn.functional.cross_entropy, nn.MSELoss(), Averaged()):  # a mean over samples, not one for each
        for first_use, arguments in {"residual": (), "curvature_product": (f,), "hessian_root": ()}.items():
            with pytest.raises(ConfigError, match=r"of shape \[\] .* one per sample, \[6\] \(reduction=\"none\""):
                getattr(find_loss(reduced), first_use)(f, Y, *arguments)
    with pytest.raises(NumericalError, match="not convex"):
        find_loss(lambda f, Y: -(f - Y).square().sum(-1)).hessian_root(f, Y)
    with pytest.raises(NotImplementedError, match="must define value"):
        Loss().value(f, Y)


def test_a_loss_by_name_is_imported_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(
        "import ntkfl\n"
        "class Absolute(ntkfl.Loss):\n    def value(self, f, Y):\n        return (f - Y).abs().sum(-1)\n"
        "def squares(f, Y):\n    return (f - Y).square().sum(-1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    method = ntkfl.methods.FedAvg(loss="own_losses:Absolute")
    assert "own_losses" not in sys.modules  # settings that came from elsewhere are read without running their code
    assert method.model_dump(mode="json")["loss"] == loss_name("own_losses:Absolute") == "own_losses:Absolute"
    f, Y = made_up()
    assert torch.equal(find_loss("own_losses:Absolute").residual(f, Y), (Y - f).sign())
    assert not find_loss("own_losses:Absolute").curvature_product(f, Y, f).any()  # linear almost everywhere
    assert torch.equal(per_sample("own_losses:squares", f, Y), (f - Y).square().sum(-1))
    with pytest.raises(ConfigError, match=r"has no function.* 'nothing'"):
        find_loss("own_losses:nothing")
    monkeypatch.delitem(sys.modules, "own_losses")
