"""Sums of curvature against brute force: dense JᵀHJ where A ⊗ G is exact, hooks and autograd where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ntkfl.errors import ConfigError
from ntkfl.tangent import Flow, Sums, curvature, curvature_sums, plan_jacobian
from ntkfl.tangent.curvature import step_curvature
from ntkfl.tangent.losses import AnyLoss, find_loss, targets
from ntkfl.tangent.sums import SKETCH, Factor, Shaped, probe_matrix, sketch_rank
from tests.tangent.networks import build, mlp
from tests.tangent.test_jacobian import autograd
from tests.tangent.test_layers import Net


def sums(model: nn.Module, x: Tensor, Y: Tensor, loss: AnyLoss = "ce", **options: object) -> Sums:
    return curvature_sums(model, x, Y, loss, plan_jacobian(model, x), **options)  # type: ignore[arg-type]


def made_up(model: nn.Module, x: Tensor, loss: str = "ce") -> Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        f = model(x)
    Y = torch.randn(f.shape, generator=generator, dtype=torch.float64)
    return Y.softmax(1) if loss == "ce" else Y


def gauss_newton(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    """(1/N) Σ J_iᵀ H_i J_i from dense autograd and the loss's second derivatives, [d, d]."""
    J = autograd(model, x)
    with torch.no_grad():
        f = model(x)
    Y = made_up(model, x, loss)

    def one(f: Tensor, y: Tensor) -> Tensor:
        return -(y * f.log_softmax(0)).sum() if loss == "ce" else 0.5 * (f - y).square().mean()

    H = torch.stack([torch.func.hessian(one)(a, b) for a, b in zip(f, Y, strict=True)])
    return torch.einsum("njd,njk,nke->de", J, H, J) / len(x)


def matrix(factor: Factor | None, groups: int) -> Tensor:
    if factor is None:
        return torch.ones(groups, 1, 1, dtype=torch.float64)
    return torch.diag_embed(factor.values) if factor.form else factor.square()


def blocks(found: Sums, shaped: Shaped) -> list[tuple[Tensor, Tensor]]:
    """Of each group of a layer its columns, and A ⊗ G there."""
    d, N = found.arrays["gradient"].numel(), found.arrays["samples"]
    groups, n, _ = shaped.shape
    columns = shaped.layer.matrices(torch.arange(d), groups, n)
    A, G = matrix(shaped.inputs, groups) / N, matrix(shaped.outputs, groups)
    if shaped.outputs is not None:
        G = G / N
    if shaped.shared:
        G = G / G.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)
    return [(columns[i].reshape(-1), torch.kron(G[i], A[i])) for i in range(groups)]


ONE_POSITION: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layers": (lambda: mlp(4, 6, 5, 3), (4,)),
    "without biases": (lambda: mlp(4, 6, 3, bias=False), (4,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(5, 3)), (2, 3, 3)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)), (4, 3)),
    "depthwise": (lambda: nn.Sequential(nn.Conv1d(4, 4, 2, groups=4), nn.Flatten(), nn.Linear(4, 3)), (4, 2)),
    "normalisation": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    "recurrent, one step": (
        lambda: Net(lambda m, x: m.out(m.a(x.unsqueeze(0))[0][0]), a=nn.GRU(4, 3), out=nn.Linear(3, 2)),
        (4,),
    ),
    "attention, one position": (
        lambda: Net(lambda m, x: m.a(*[x.unsqueeze(1)] * 3)[0][:, 0], a=nn.MultiheadAttention(4, 2, batch_first=True)),
        (4,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_POSITION)
@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_exact_for_one_sample_and_one_position(name: str, loss: str) -> None:
    make, shape = ONE_POSITION[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(1, *shape, dtype=torch.float64)
    found, C = sums(model, x, made_up(model, x, loss), loss), gauss_newton(model, x, loss)
    seen = 0
    for shaped in found.layers():
        for columns, kronecker in blocks(found, shaped):
            assert torch.allclose(kronecker, C[columns][:, columns], rtol=1e-9, atol=1e-12)
            seen += len(columns)
    assert seen == len(C)
    check_step(found, C)


def check_step(found: Sums, C: Tensor) -> None:
    """The end of the flow is −(2C + 0.1)⁻¹ g within each group: every layout's way into the eigenbasis and back."""
    change, g = Flow(found).change(None, 2.0, 0.1), found.arrays["gradient"] / found.arrays["samples"]
    for shaped in found.layers():
        for columns, _ in blocks(found, shaped):
            damped = 2 * C[columns][:, columns] + 0.1 * torch.eye(len(columns)).double()
            assert torch.allclose(change[columns], -torch.linalg.solve(damped, g[columns]), rtol=1e-8, atol=1e-10)


def test_exact_for_one_token() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.tensor([[5]])
    found, C = sums(model, x, made_up(model, x)), gauss_newton(model, x, "ce")
    for shaped in found.layers():
        ((columns, kronecker),) = blocks(found, shaped)
        assert torch.allclose(kronecker, C[columns][:, columns], rtol=1e-9, atol=1e-12)
    assert found.layers()[0].constant
    check_step(found, C)


def test_exact_for_a_last_layer_with_mse_and_for_channels_of_a_normalisation() -> None:
    """H is the same for all samples, so that A ⊗ G is no approximation; a channel's own block is none either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(9, 2, 4, dtype=torch.float64)
    found, C = sums(model, x, made_up(model, x, "mse"), "mse"), gauss_newton(model, x, "mse")
    for shaped in found.layers()[1:]:
        for columns, kronecker in blocks(found, shaped):
            assert torch.allclose(kronecker, C[columns][:, columns], rtol=1e-9, atol=1e-12)


def test_diagonal_of_the_rest_and_sketches_of_large_factors() -> None:
    model, x = build("unknown layer")
    Y, C = made_up(model, x), gauss_newton(model, x, "ce")
    found = sums(model, x, Y)
    covered = torch.cat([columns for shaped in found.layers() for columns, _ in blocks(found, shaped)])
    rest = torch.tensor(sorted(set(range(len(C))) - set(covered.tolist())))
    assert len(rest) == 2 * 3 * 2 + 3
    assert torch.allclose(found.arrays["rest"] / len(x), C.diagonal()[rest], rtol=1e-9, atol=1e-12)
    small = sums(model, x, Y, largest=5)
    for whole, cut in zip(found.layers(), small.layers(), strict=True):
        for full, part in ((whole.inputs, cut.inputs), (whole.outputs, cut.outputs)):
            assert full is not None
            assert part is not None
            assert part.size == full.size
            assert part.form == (SKETCH if full.size > 5 else "")
            expected = sketch(full.square()) if part.form else full.values
            assert torch.allclose(part.values, expected, rtol=1e-12, atol=1e-14)


def sketch(square: Tensor) -> Tensor:
    """What is sent in place of [groups, n, n]: A Ω, and behind it the diagonal."""
    n = square.shape[1]
    probed = square @ probe_matrix(n, sketch_rank(n))
    return torch.cat([probed, square.diagonal(dim1=1, dim2=2).unsqueeze(2)], dim=2)


SHARED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)),
        (2, 5, 5),
    ),
    "groups, no bias": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
        (4, 5),
    ),
    "sequence": (
        lambda: Net(lambda m, x: m.out(torch.tanh(m.a(x)).mean(1)), a=nn.Linear(3, 5), out=nn.Linear(5, 2)),
        (4, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_weights_that_positions_share_by_brute_force(name: str, loss: str) -> None:
    """A and G are the partial traces of C's own block, A ⊗ G / trace has its trace, and the flow follows it."""
    make, shape = SHARED[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, *shape, dtype=torch.float64)
    found, C = sums(model, x, made_up(model, x, loss), loss), gauss_newton(model, x, loss)
    shaped = found.layers()[0]
    assert shaped.shared
    assert not found.layers()[1].shared
    groups, n, m = shaped.shape
    change, g = Flow(found).change(None, 2.0, 0.1), found.arrays["gradient"] / 6
    for i, columns in enumerate(shaped.layer.matrices(torch.arange(len(C)), groups, n)):
        block = C[columns.reshape(-1)][:, columns.reshape(-1)].view(n, m, n, m)
        A, G = matrix(shaped.inputs, groups)[i] / 6, matrix(shaped.outputs, groups)[i] / 6
        assert torch.allclose(A, torch.einsum("aiaj->ij", block), rtol=1e-9, atol=1e-12)
        assert torch.allclose(G, torch.einsum("aibi->ab", block), rtol=1e-9, atol=1e-12)
        kronecker = torch.kron(G, A) / A.trace()
        assert kronecker.trace() == pytest.approx(float(torch.einsum("aiai->", block)), rel=1e-9)
        damped = 2 * kronecker + 0.1 * torch.eye(n * m).double()
        assert torch.allclose(change[columns].view(-1), -torch.linalg.solve(damped, g[columns].view(-1)), atol=1e-9)


def test_an_average_over_positions_hides_no_curvature() -> None:
    """A linear layer averaged over T equal positions is the layer at one position: its curvature must be that one's."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).double(), torch.randn(5, 1, 3, dtype=torch.float64)
    model = Net(lambda m, x: m.a(x).mean(1), a=layer)
    changes = []
    for T in (1, 16):
        tall = x.expand(-1, T, -1).contiguous()
        changes.append(Flow(sums(model, tall, made_up(model, tall, "mse"), "mse")).change(None, 1.0, 0.0))
    assert torch.allclose(changes[0], changes[1], rtol=1e-8)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_the_curvature_that_a_step_meets(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Δᵀ C Δ of the whole C against brute force, and of the factored form against its own factors."""
    model, x = build("sequence")
    C, plan = gauss_newton(model, x, loss), plan_jacobian(model, x)
    found = sums(model, x, made_up(model, x, loss), loss)
    change, factored = Flow(found).change_and_curvature(3.0, 2.0, 0.1)
    monkeypatch.setattr(curvature, "numbers_at_once", lambda x: 2 * plan.working)  # chunks of two rows
    met = float(step_curvature(model, x, made_up(model, x, loss), change, loss, plan)) / len(x)
    assert met == pytest.approx(float(change @ C @ change), rel=1e-9)
    expected = 0.0
    for shaped in found.layers():
        for columns, kronecker in blocks(found, shaped):
            expected += float(change[columns] @ kronecker @ change[columns])
    assert factored == pytest.approx(expected, rel=1e-9)


class Sine(torch.autograd.Function):
    """Its backward pass is right, and cannot be differentiated; `said` says whether it says so."""

    said: bool

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return once_differentiable(lambda ctx, g: g * x.cos())(ctx, g) if Sine.said else g.detach() * x.cos()


@pytest.mark.parametrize("said", [True, False])
def test_the_curvature_of_a_step_through_what_has_no_second_derivative(said: bool) -> None:
    Sine.said = said
    first, second = nn.Linear(4, 5), nn.Linear(5, 3)
    model, x = Net(lambda m, x: m.b(Sine.apply(m.a(x))), a=first, b=second), torch.randn(6, 4).double()
    C, change = gauss_newton(model, x, "ce"), torch.randn(43, dtype=torch.float64)
    met = float(step_curvature(model, x, made_up(model, x), change, "ce", plan_jacobian(model, x))) / 6
    assert met == pytest.approx(float(change @ C @ change), rel=1e-9)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_roots_and_gradients(loss: str) -> None:
    model, x = build("deep tanh")
    Y = made_up(model, x, loss)
    with torch.no_grad():
        f = model(x)
    criterion = find_loss(loss)
    R = criterion.hessian_root(f, Y)
    p = f.softmax(1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1) if loss == "ce" else torch.eye(3).double() / 3
    assert torch.allclose(R @ R.mT, H.expand(7, 3, 3), atol=1e-14)
    gradient = -torch.einsum("njd,nj->d", autograd(model, x), find_loss(loss).residual(f, Y))
    assert torch.allclose(sums(model, x, Y, loss).arrays["gradient"], gradient, rtol=1e-10, atol=1e-12)

    class Scaled(type(criterion)):  # type: ignore[misc]
        def hessian_root(self, f: Tensor, Y: Tensor) -> Tensor:
            return 2 * criterion.hessian_root(f, Y)  # any H = R Rᵀ

    own = sums(model, x, Y, Scaled())
    name = own.layers()[0].layer.name + "/outputs"
    assert torch.allclose(own.arrays[name], 4 * sums(model, x, Y, loss).arrays[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["deep tanh", "tied weight", "module used twice", "sequence", "partly frozen"])
def test_however_samples_are_dealt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client, a client for each sample, one label per client, chunks of one row: the same sums."""
    model, _ = build(name)
    N = 300 if name == "deep tanh" else 20
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (N,), generator=generator)
    Y = targets(y, 3, "ce", torch.float64)
    plan = plan_jacobian(model, x)
    whole = curvature_sums(model, x, Y, "ce", plan)
    ways = [[slice(i, i + 1) for i in range(N)], [y == c for c in range(3)]]
    totals = []
    for parts in ways:
        first, *more = [curvature_sums(model, x[rows], Y[rows], "ce", plan) for rows in parts]
        for other in more:
            first = first + other
        totals.append(first)
    monkeypatch.setattr(curvature, "numbers_at_once", lambda x: 1)
    totals.append(curvature_sums(model, x, Y, "ce", plan))
    for total in totals:
        assert total.arrays.keys() == whole.arrays.keys()
        for key, array in whole.arrays.items():
            assert float((total.arrays[key] - array).norm()) <= 1e-12 * float(array.norm())


def test_inputs_that_no_weight_is_before() -> None:
    def constant(model: nn.Module, x: Tensor) -> set[int]:
        return {part.weight.start for part in plan_jacobian(model, x).parts if part.weight and part.constant}

    x = torch.randn(3, 4, dtype=torch.float64)
    model = mlp(4, 6, 5, 3)
    assert constant(model, x) == {0}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    assert constant(model, x) == {0}  # the first that trains
    twice, _ = build("module used twice")
    assert constant(twice, x) == set()  # its second input is its own output
    model = mlp(4, 6, 3)
    left_out = sums(model, x, made_up(model, x), constant=False)
    assert [shaped.inputs is None for shaped in left_out.layers()] == [True, False]


class TestMonteCarlo:
    """One draw a sample: each factor of outputs has the exact one as its mean."""

    def drawn(self, name: str, loss: str, draws: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The exact sums and `draws` of the drawn ones, [draws, ...] each."""
        torch.manual_seed(0)
        model, x = {**NETWORKS, "sequence": build("sequence")}[name]
        Y, generator = made_up(model, x, loss), torch.Generator().manual_seed(1)
        many = [sums(model, x, Y, loss, fisher="mc", generator=generator).arrays for _ in range(draws)]
        return sums(model, x, Y, loss).arrays, {key: torch.stack([one[key] for one in many]) for key in many[0]}

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    @pytest.mark.parametrize("name", ["perceptron", "sequence"])
    def test_the_mean_of_many_draws_is_the_exact_factor(self, name: str, loss: str) -> None:
        """A z-test of every number's mean; with power, for it refuses factors that are wrong by a fifth."""
        draws = 200
        exact, many = self.drawn(name, loss, draws)
        scores, wrong = [], []
        for key, values in many.items():
            spread = values.std(0)
            certain = spread <= 1e-12 * values.abs().amax()  # what no draw changes: the gradient, constant inputs
            assert (values[0] - exact[key])[certain].abs().sum() < 1e-9
            error = (spread / draws**0.5)[~certain]
            scores.append(((values.mean(0) - exact[key])[~certain] / error).flatten())
            wrong.append(((values.mean(0) - 1.2 * exact[key])[~certain] / error).flatten())
        z, z_wrong = torch.cat(scores), torch.cat(wrong)
        assert len(z) > 20
        assert z.abs().max() < 5  # of some hundred numbers, normal to good approximation
        assert z_wrong.abs().max() > 5

    def test_confident_predictions_have_no_rare_large_draws(self) -> None:
        """The mean of 400 traces is within a tenth; drawn labels, of which one in 200 counts, would be far off."""
        f = torch.tensor([[6.0, 0.0, 0.0]], dtype=torch.float64).expand(400, 3)
        loss, generator = find_loss("ce"), torch.Generator().manual_seed(0)
        exact = loss.hessian_root(f[:1], f[:1]).square().sum()
        drawn = loss.drawn_root(f, f, generator).square().sum((1, 2))
        assert abs(float(drawn.mean() / exact) - 1) < 0.1
        assert float(drawn.std() / exact) < 2

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    def test_equal_samples_add_up_to_the_exact_sum(self, loss: str) -> None:
        """Signs are rows of a Hadamard matrix, here of eight: over sixteen samples they leave no variance at all."""
        f = torch.randn(1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(16, 7)
        root, drawn = (find_loss(loss).hessian_root(f, f), find_loss(loss).drawn_root(f, f))
        assert torch.allclose((drawn @ drawn.mT).sum(0), (root @ root.mT).sum(0), rtol=1e-9, atol=1e-12)

    def test_draws_follow_their_generator(self) -> None:
        model, x = NETWORKS["perceptron"]
        Y = made_up(model, x)
        one, same, other = (
            sums(model, x, Y, fisher="mc", generator=torch.Generator().manual_seed(seed)).arrays for seed in (1, 1, 2)
        )
        assert all(torch.equal(one[key], same[key]) for key in one)
        assert any(not torch.equal(one[key], other[key]) for key in one)
        assert torch.equal(one["gradient"], other["gradient"])

    def test_a_fisher_that_is_none(self) -> None:
        model, x = NETWORKS["perceptron"]
        with pytest.raises(ConfigError, match="unknown fisher 'exakt': did you mean 'exact'"):
            sums(model, x, made_up(model, x), fisher="exakt")


NETWORKS = {"perceptron": (mlp(4, 6, 3), torch.randn(8, 4, dtype=torch.float64))}
