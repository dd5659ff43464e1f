"""float32 against float64 on kernels conditioned as badly as those of real rounds and worse; and what comes beyond."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments import networks
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import NumericalError
from ntkfl.privacy.sparsify import sparsify
from ntkfl.tangent.blocks import DenseBlock
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.solvers import Statistics, integrate

STEPS = (10.0, 100.0, 1000.0, 4000.0)  # flow times 0.1 to 40


def spread_out(
    condition: float, largest: float, N: int = 24, d2: int = 3, d: int = 160
) -> tuple[Jacobian, Tensor, Tensor]:
    """J in float64 with N·d2 singular values whose squares run geometrically from `largest`·2N down by `condition`."""
    draws = torch.Generator().manual_seed(0)
    n = N * d2
    left = torch.linalg.qr(torch.randn(n, n, generator=draws, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(d, n, generator=draws, dtype=torch.float64)).Q
    values = (2 * N * largest * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n).double()).sqrt()
    rows = (left * values) @ right.T
    f0 = torch.randn(N, d2, generator=draws, dtype=torch.float64)
    return Jacobian([DenseBlock(rows.view(N, d2, d), (slice(0, d),))], d2, d), f0, torch.arange(N) % d2


def single(J: Jacobian) -> Jacobian:
    return Jacobian([b.with_tensors(tuple(t.float() for t in b.tensors())) for b in J.blocks], *J.shape[1:])


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e10, 1e14])
@pytest.mark.parametrize("largest", [4.0, 500.0, 7000.0])
def test_float32_follows_float64_at_the_condition_numbers_of_real_rounds(
    loss: str, condition: float, largest: float
) -> None:
    """The largest eigenvalue over 2N runs from 4 to 7,000 in real rounds; the weight change agrees to a percent."""
    J, f0, y = spread_out(condition, largest)
    exact = ntkfl.evolve(J, f0, y, steps=STEPS, loss=loss, rtol=1e-6)
    rough = ntkfl.evolve(single(J), f0.float(), y, steps=STEPS, loss=loss, rtol=1e-3)
    assert rough.steps == STEPS
    for i in range(len(STEPS)):
        assert (rough.delta(i).double() - exact.delta(i)).norm() < 1e-2 * exact.delta(i).norm()


def test_products_that_overflow_are_made_in_float64_and_that_is_said() -> None:
    """Rows of 1e20 have a kernel of 1e40, beyond float32; their flow is over in an instant, and others' is not."""
    J, f0, y = spread_out(1e2, 1.0)
    factors = torch.ones(24)
    factors[5] = 1e20
    e = ntkfl.evolve(single(J).scaled(factors), f0.float(), y, steps=[1e-30, 1e-29])
    assert "products in float64" in e.statistics.fallback
    assert e.statistics.fallback.endswith("of 1e-29")
    assert bool(e.deltas().isfinite().all())


def test_a_flow_too_dear_to_finish_gives_the_candidates_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.tangent.solvers.MOST_PRODUCTS", 300)
    J, f0, y = spread_out(1e4, 7000.0)
    whole = ntkfl.evolve(J, f0, y, steps=[1e-3, 1e-2])
    assert not whole.statistics.fallback
    e = ntkfl.evolve(J, f0, y, steps=[1e-3, 1e-2, 1e9])
    assert e.steps == (1e-3, 1e-2)
    assert e.statistics.fallback.startswith("2 of 3 candidates: ")
    assert "products with the kernel reached only time" in e.statistics.fallback
    assert len(e.deltas()) == 2
    assert (e.delta(1) - whole.delta(1)).norm() < 1e-2 * whole.delta(1).norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_rows_that_no_precision_can_help_are_an_error_in_words(value: float) -> None:
    J, f0, y = spread_out(1e2, 1.0)
    block = J.blocks[0]
    values = block.tensors()[0].clone()
    values[3] = value
    bad = Jacobian([block.with_tensors((values,))], *J.shape[1:])
    with pytest.raises(NumericalError, match="look for extreme rows in the Jacobian"):
        ntkfl.evolve(single(bad), f0.float(), y, steps=STEPS)


def test_an_error_that_cannot_be_held_stops_with_what_was_reached() -> None:
    """y' = 1/(1 − y) in disguise: a field that blows up at time 1, past the first output."""

    def field(y: Tensor) -> Tensor:
        return (1 + y).square()

    stats = Statistics()
    states = list(integrate(field, torch.zeros(1).double(), [0.5, 2.0], lambda y: lambda v: v, 1e-4, stats))
    assert len(states) == 1
    assert float(states[0]) == pytest.approx(1.0, abs=1e-2)  # 1/(1 − t) − 1
    assert stats.stopped


def test_norms_scaling_and_precision_of_every_form() -> None:
    torch.manual_seed(0)
    model, x = ntkfl.models.mlp(6, 5, 3), torch.randn(7, 6)
    factored, dense = ntkfl.jacobian(model, x), ntkfl.jacobian(model, x, "dense")
    factors = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0, -1.0])
    for J in (factored, dense, sparsify(factored, 0.5)):
        rows = J.dense().double()
        assert torch.allclose(J.norms(), rows.flatten(1).norm(dim=1), rtol=1e-5)
        assert torch.allclose(J.scaled(factors).dense().double(), rows * factors[:, None, None], rtol=1e-5, atol=1e-9)
        assert J.double().dtype == torch.float64
        assert torch.equal(J.double().dense().float(), J.dense())


@pytest.mark.parametrize("name", ["cnn", "gru", "transformer"])
def test_norms_of_layers_with_positions_are_within_a_factor(name: str) -> None:
    """Not exact there, and for rows of one network near enough to compare them with one another."""
    torch.manual_seed(0)
    if name == "cnn":
        model, x = ntkfl.models.cnn((1, 12, 12), 3), torch.randn(6, 1, 12, 12)
    else:
        model = nn.Sequential(nn.Embedding(11, 16), getattr(networks, name)((8, 16), 3))
        x = torch.randint(0, 11, (6, 8))
    J = ntkfl.jacobian(model, x)
    ratio = J.norms() / J.dense().double().flatten(1).norm(dim=1)
    assert float(ratio.max() / ratio.min()) < 4
