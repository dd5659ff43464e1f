"""The flow in a GPU's own kernels: the products, slopes and steps of plain PyTorch in float64.

Without a GPU the kernels are interpreted, where Triton is installed: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ntkfl.tangent import evolve, jacobian
from ntkfl.tangent import layered as module
from ntkfl.tangent.chebyshev import Stepper
from ntkfl.tangent.layered import LayeredFlow, layered_flow, layers_of
from ntkfl.tangent.losses import CrossEntropy

CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
runs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs Triton and a GPU"
)
EPS = torch.finfo(torch.float32).eps


class Called:
    """In place of a graph, where there is no GPU: what would be replayed is called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def network(hidden: int = 12, bias: bool = True, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden, bias=bias), nn.ReLU(), nn.Linear(hidden, outputs, bias=bias))


def problem(rows: int, **sizes: bool | int) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = network(**sizes)  # type: ignore[arg-type]
    x, y = torch.randn(rows, 20), torch.randint(model[-1].out_features, (rows,))
    return (model.cuda(), x.cuda(), y.cuda()) if CUDA else (model, x, y)


def flow_of(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> LayeredFlow:
    """One made by hand, as a CPU gets none."""
    J = jacobian(model, x)
    layers = layers_of(J)
    assert layers is not None
    inputs, units = [layer.a.shape[1] for layer in layers], [layer.M.shape[1] for layer in layers]
    own = LayeredFlow(-(-len(x) // 576) * 576, J.shape[1], inputs, units, x.device)
    f0, Y = model(x).detach(), nn.functional.one_hot(y, J.shape[1]).float()
    own.load(layers, f0, Y, rate)
    return own


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(module, "capture", lambda device, *work: [Called(piece) for piece in work])


def exact(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> tuple[Callable[[Tensor], Tensor], Stepper]:
    """v ↦ (η/N) Θ v and the flow, in float64."""
    twin = type(model)(*model).double()
    J, f0 = jacobian(twin, x.double()).dense().flatten(0, 1), twin(x.double()).detach()
    model.float()
    Y = nn.functional.one_hot(y, f0.shape[1]).double()

    def product(v: Tensor) -> Tensor:
        return rate * (J @ (J.T @ v.flatten())).view_as(v)

    return product, Stepper(lambda R: Y - (f0 + product(R)).softmax(1))


@runs_kernels
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(576, {}), (100, {}), (333, {"bias": False}), (200, {"outputs": 17, "hidden": 30})],
    ids=["all rows", "few rows", "no bias", "many outputs"],
)
def test_products_slopes_and_steps_are_those_of_float64(rows: int, sizes: dict[str, bool | int]) -> None:
    model, x, y = problem(rows, **sizes)
    rate = 0.01
    product, plain = exact(model, x, y, rate)
    own = flow_of(model, x, y, rate)
    v = torch.randn(rows, model[-1].out_features, dtype=torch.float64, device=x.device)
    wanted = product(v)
    # Three parts of 11 bits in place of 24, sums of at most 600 terms, and a few roundings around them.
    assert (own.product(v).double() - wanted).norm() <= 64 * EPS * wanted.norm()
    state, h = 0.1 * v, 0.05
    p = (model(x).double() + product(state)).softmax(1)
    curved = p * (wanted - (p * wanted).sum(1, keepdim=True))
    assert (own.stiffness(state)(v) - curved).norm() <= 64 * EPS * wanted.norm() * (1 + wanted.abs().max())
    slope = plain.evaluate(state)
    assert (own.evaluate(state) - slope).abs().max() <= 64 * EPS * (1 + wanted.abs().max())
    for stages in (2, 3, 6):
        made = own.attempt(state, slope, h, stages)
        again = own.step(state, slope, h, stages)
        expected = plain.attempt(state, slope, h, stages)
        bound = 64 * EPS * h * stages * float(expected.slope.norm())
        assert (made.state - expected.state).norm() <= bound
        assert torch.equal(again, made.state)
        assert (made.slope - expected.slope).norm() <= 64 * EPS * float(expected.slope.norm()) + bound
        assert list(made[3:]) == pytest.approx(expected[3:], rel=1e-4)
        assert made.error == pytest.approx(expected.error, rel=1e-2, abs=2 * bound)
        state, slope = made.state, made.slope  # where the stepper left them
    assert own.evaluations == 1 + sum(2 * stages - 1 for stages in (2, 3, 6))


@runs_kernels
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_states_of_any_size_and_rows_of_many_sizes(size: float) -> None:
    """Numbers are scaled before they are cut into halves, which hold 2^-24 to 2^16."""
    model, x, y = problem(100)
    x = x * torch.logspace(-2, 2, 20, device=x.device)  # inputs over four decades
    product, plain = exact(model, x, y, 0.01)
    own = flow_of(model, x, y, 0.01)
    v = size * torch.randn(100, 3, dtype=torch.float64, device=x.device)
    v[17] *= 1e4
    wanted = product(v)
    assert (own.product(v).double() - wanted).norm() <= 64 * EPS * wanted.norm()
    h = 1e-9 * size
    made, expected = (flow.attempt(v, plain.evaluate(v), h, 3) for flow in (own, plain))
    assert (made.state - expected.state).norm() <= 64 * EPS * h * 3 * float(expected.slope.norm()) + 1e-15 * v.norm()
    assert list(made[3:]) == pytest.approx(expected[3:], rel=1e-4)


@runs_kernels
def test_tables_of_more_stages_than_there_is_room_for_are_written_anew() -> None:
    model, x, y = problem(100)
    own = flow_of(model, x, y, 0.01)
    v = torch.randn(100, 3, dtype=torch.float64, device=x.device)
    first = own.attempt(v, v, 0.1, 3)
    for stages in range(4, 100):
        own._start(stages)
    assert own.attempt(v, v, 0.1, 3)[2:] == first[2:]


@runs_kernels
def test_sums_of_many_positive_numbers_keep_their_precision() -> None:
    """Tensor cores cut off what they add up to, by up to a rounding each time and always downwards: after 16 numbers of
    half precision, of which 64 are summed there, and after 8 of 128 in the product with M. All sums there were off by
    44 roundings; by pieces it is 4 for each large product and 16 for the small one at most.
    """
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)), 4032 if CUDA else 576
    for parameter in model.parameters():
        parameter.data.abs_()
    x, y = torch.rand(rows, 784), torch.randint(10, (rows,))
    model, x, y = (model.cuda(), x.cuda(), y.cuda()) if CUDA else (model, x, y)
    own, v = flow_of(model, x, y, 0.01), torch.rand(rows, 10, dtype=torch.float64, device=x.device)
    wanted = 0.01 * jacobian(model, x).double().product(v)
    assert (own.product(v).double() - wanted).norm() <= 24 * EPS * wanted.norm()


@runs_kernels
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-15])
def test_layers_of_very_different_sizes_keep_their_precision(size: float) -> None:
    """Small weights without a bias: the last layer has small inputs, and the first one small sensitivities."""
    model, x, y = problem(40, bias=False)
    for parameter in model.parameters():
        parameter.data.mul_(size)
    own, v = flow_of(model, x, y, 0.01), torch.randn(40, 3, dtype=torch.float64, device=x.device)
    wanted = 0.01 * jacobian(model, x).double().product(v)
    assert (own.product(v).double() - wanted).norm() <= 64 * EPS * wanted.norm()


@runs_kernels
def test_what_was_loaded_before_leaves_nothing() -> None:
    """Of 500 rows, and then of 100 others."""
    model, x, y = problem(500)
    own = flow_of(model, x, y, 0.01)
    own.attempt(torch.zeros_like(model(x)).double(), own.evaluate(torch.zeros_like(model(x)).double()), 0.1, 4)
    x, y = x[:100].flip(0), y[:100].flip(0)
    layers = layers_of(jacobian(model, x))
    assert layers is not None
    own.load(layers, model(x).detach(), nn.functional.one_hot(y, 3).float(), 0.02)
    fresh = flow_of(model, x, y, 0.02)
    v = torch.randn(100, 3, dtype=torch.float64, device=x.device)
    assert torch.equal(own.product(v), fresh.product(v))
    one, other = (f.attempt(v, v, 0.1, 5) for f in (own, fresh))
    assert torch.equal(one.state, other.state)
    assert torch.equal(one.slope, other.slope)
    assert one[2:] == other[2:]


@runs_kernels
def test_rows_may_be_scaled() -> None:
    """As the server scales long ones down: the last layer's sensitivities are then no identity."""
    model, x, _ = problem(50)
    J = jacobian(model, x).scaled(torch.linspace(0.3, 1, 50, device=x.device))
    layers = layers_of(J)
    assert layers is not None
    own = LayeredFlow(576, 3, (20, 12), (12, 3), x.device)
    own.load(layers, model(x).detach(), torch.zeros(50, 3, device=x.device), 0.5)
    v, dense = torch.randn(50, 3, dtype=torch.float64, device=x.device), J.double().dense().flatten(0, 1)
    wanted = 0.5 * (dense @ (dense.T @ v.flatten())).view(50, 3)
    assert (own.product(v).double() - wanted).norm() <= 64 * EPS * wanted.norm()


@pytest.mark.skipif(not (CUDA and HAS_TRITON), reason="needs a GPU")
def test_an_evolution_is_that_of_the_cpu() -> None:
    model, x, y = problem(1500)
    f0 = model(x).detach()
    own = evolve(jacobian(model, x), f0, y)
    assert layered_flow(jacobian(model, x), f0, nn.functional.one_hot(y, 3).float(), 1e-3, CrossEntropy()) is not None
    model.cpu().double()
    plain = evolve(jacobian(model, x.cpu().double()), f0.cpu().double(), y.cpu())
    assert own.statistics.evaluations == pytest.approx(plain.statistics.evaluations, rel=0.1)
    for i in range(len(plain.steps)):
        assert (own.residuals[i].cpu() - plain.residuals[i]).norm() <= 1e-3 * plain.residuals[i].norm()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 2.0**-118, 2.0**-117, 1e-20, 0.7, 1.0, 1e20, 2.0**127, 3.4e38])
@pytest.mark.parametrize("bias", [False, True])
def test_the_scales_of_a_layer_are_finite_and_undo_each_other(size: float, bias: bool) -> None:
    """Scaled inputs are near 2^11 at most, and get there unless they are the smallest that float32 has."""
    a = torch.tensor([[0.25 * size, -size]])
    exponent = module._exponent(a, bias)
    scaled, back = a * torch.exp2(module._TOP - exponent), torch.exp2(exponent)
    assert torch.isfinite(scaled).all()
    assert torch.isfinite(back)
    assert torch.equal(scaled.double() * back.double(), a.double() * 2**module._TOP)
    top = max(float(scaled.abs().max()), float(bias) * 2.0 ** (module._TOP - int(exponent)))
    assert top <= 2 ** (module._TOP + 1)
    assert top >= 2 ** (module._TOP - 1) or (size < 2.0**-117 and not bias)


def test_only_linear_layers_with_a_common_factor_are_taken() -> None:
    x = torch.randn(40, 20)
    deep = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    assert layers_of(jacobian(deep, x)) is None
    assert layers_of(jacobian(nn.Sequential(nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 2, 3), nn.Flatten()), x)) is None
    layers = layers_of(jacobian(network(), x))
    assert layers is not None
    assert [tuple(layer.M.shape) for layer in layers] == [(3, 12), (3, 3)]
    assert layered_flow(jacobian(network(), x), x[:, :3], x[:, :3], 0.1, CrossEntropy()) is None  # on a CPU
