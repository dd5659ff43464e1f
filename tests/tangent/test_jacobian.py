"""Every form against plain autograd, and the algebra of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, ModelError
from ntkfl.privacy.sparsify import sparsify
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.parameters import evaluating, flatten, trainable, unflatten, with_values
from tests.tangent.networks import Tied, Twice, build, mlp

EXACT = 1e-10


def autograd(model: nn.Module, x: Tensor) -> Tensor:
    """[N, d2, d] by one plain backward pass per sample and output, without torch.func or hooks."""
    parameters = list(trainable(model).values())
    rows = []
    with evaluating(model):
        for sample in x:
            f = model(sample.unsqueeze(0)).squeeze(0)
            for output in f:
                g = torch.autograd.grad(output, parameters, retain_graph=True, materialize_grads=True)
                rows.append(torch.cat([p.reshape(-1) for p in g]))
    return torch.stack(rows).view(len(x), -1, rows[0].numel())


def test_paper_network_is_four_hundred_times_smaller_than_dense() -> None:
    J = ntkfl.jacobian(ntkfl.models.mlp(784, 100, 10), torch.randn(3, 784))
    assert J.shape == (3, 10, 79_510)
    numbers = J.nbytes / 4 / 3
    assert numbers == 784 + 100 * 10 + 100 + 10 * 10
    assert 795_100 / numbers > 400


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_vjp_of_the_residual_is_minus_the_gradient(loss: str) -> None:
    model, x = build("relu")
    y = torch.tensor([0, 1, 2, 2, 1, 0, 1])
    w = flatten(model).requires_grad_()
    f = with_values(model, unflatten(model, w))(x)
    Y = torch.nn.functional.one_hot(y, 3).double()
    L = torch.nn.functional.cross_entropy(f, y) if loss == "ce" else 0.5 * ((f - Y) ** 2).mean()
    (gradient,) = torch.autograd.grad(L, w)
    r = Y - f.detach().softmax(1) if loss == "ce" else (Y - f.detach()) / 3
    assert (ntkfl.jacobian(model, x).vjp(r) / len(x) + gradient).abs().max() < 1e-12
    found = ntkfl.tangent.losses.find_loss(loss).residual(f.detach(), Y)
    assert (found - r).abs().max() < 1e-15  # softmax by hand: rounding


def test_the_model_is_left_as_it_was() -> None:
    model, x = build("dropout, training mode")
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    ntkfl.jacobian(model, x)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    for shared in (Tied().double(), Twice().double()):  # one tensor, or one module, under two names
        shared.again = shared.a
        parameters = [id(p) for p in shared.parameters()]
        ntkfl.jacobian(shared, x)
        assert [id(p) for p in shared.parameters()] == parameters


class TestRows:
    def test_unlike_forms_become_dense(self) -> None:
        model, x = build("unknown layer")
        whole = ntkfl.jacobian(model, x)
        parts = [
            ntkfl.jacobian(model, part, form=form)
            for part, form in zip(x.split([2, 2, 3]), ["dense", "auto", "dense"], strict=True)
        ]
        J = ntkfl.concatenate(parts)
        delta, R = torch.randn(J.shape[2], dtype=torch.float64), torch.randn(J.shape[:2], dtype=torch.float64)
        for ours, truth in [
            (J.dense(), whole.dense()),
            (J.kernel(), whole.kernel()),
            (J.jvp(delta), whole.jvp(delta)),
            (J.vjp(R), whole.vjp(R)),
            (whole.gram(J), whole.kernel()),
            (J[[6, 0, 3, 2, 2]].dense(), whole.dense()[[6, 0, 3, 2, 2]]),
            (J[[]].dense(), whole.dense()[:0]),
            (ntkfl.concatenate([J, whole]).kernel()[:7, 7:], whole.kernel()),
        ]:
            assert ours.shape == truth.shape
            assert not ours.numel() or (ours - truth).abs().max() < EXACT

    def test_different_networks_are_refused(self) -> None:
        a = ntkfl.jacobian(mlp(4, 3), torch.randn(2, 4).double())
        with pytest.raises(ModelError, match="different networks"):
            ntkfl.concatenate([a, ntkfl.jacobian(mlp(4, 2), torch.randn(2, 4).double())])
        with pytest.raises(ModelError, match="different kinds"):
            ntkfl.concatenate([a, ntkfl.jacobian(mlp(4, 3).float(), torch.randn(2, 4))])
        with pytest.raises(ntkfl.NTKFLError, match="empty"):
            ntkfl.concatenate([])


@pytest.mark.parametrize("form", ["factored", "dense", "sparse", "tokens"])
class TestConveniences:
    def jacobian(self, form: str) -> ntkfl.Jacobian:
        model, x = build("deep tanh")
        if form == "sparse":
            return sparsify(ntkfl.jacobian(model, x), 0.5)
        if form == "tokens":
            return ntkfl.jacobian(
                nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3)).double(),
                torch.arange(21).view(7, 3) % 9,
            )
        return ntkfl.jacobian(model, x, form)

    def test_to_another_type_and_device(self, form: str) -> None:
        J = self.jacobian(form)
        single = J.to(torch.float32)
        assert (single.dtype, single.shape, type(single)) == (torch.float32, J.shape, type(J))
        assert (single.dense().double() - J.dense()).abs().max() <= 4 * 2**-24 * J.dense().abs().max()  # two factors
        assert torch.equal(J.to("cpu").dense(), J.dense())
        assert torch.equal(single.to("cpu", torch.float64).dense(), single.double().dense())

        with pytest.raises(ModelError, match="derivatives have a floating type"):
            J.to(torch.int64)


class TestRefusals:
    def test_unknown_form(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'factored'"):
            ntkfl.jacobian(mlp(4, 3), torch.randn(2, 4).double(), form="factord")

    def test_nothing_to_train(self) -> None:
        with pytest.raises(ModelError, match="no trainable parameter"):
            ntkfl.jacobian(mlp(4, 3).requires_grad_(False), torch.randn(2, 4).double())

    def test_wrong_shapes(self) -> None:
        J = ntkfl.jacobian(mlp(4, 3), torch.randn(2, 4).double())
        with pytest.raises(ModelError, match="delta must end in shape"):
            J.jvp(torch.randn(3))
        with pytest.raises(ModelError, match="cotangent must end in shape"):
            J.vjp(torch.randn(3, 3))
        for what, product in {"delta": J.jvp, "the cotangent": J.vjp}.items():
            with pytest.raises(ModelError, match=f"^{what} must be a tensor, got an object of type list$"):
                product([0.0, 1.0])  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=r"^J must be a Jacobian of ntkfl.jacobian, got a tensor$"):
            J.gram(J.dense())  # type: ignore[arg-type]

    @pytest.mark.parametrize("index", [(0, 1), (slice(None), 0), (), None, ...])
    def test_indices_are_of_rows_alone(self, index: object) -> None:
        """(0, 1) would pick one output's derivatives of a tensor [N, d2, d]."""
        model, x = build("deep tanh")
        J = ntkfl.jacobian(model, x)
        with pytest.raises(ModelError, match=r"a Jacobian is indexed by rows only: use J\[\[0, 1\]\]"):
            J[index]  # type: ignore[index]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_gram_matrices_of_many_samples_are_those_of_all_derivatives(activation: type[nn.Module]) -> None:
    """Of one network, between two, of rows that were scaled, and of rows of two networks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 6), activation(), nn.Linear(6, 3)).double()
    x = torch.randn(600, 5, dtype=torch.float64)
    J, first = ntkfl.jacobian(model, x), ntkfl.jacobian(model, x[:300])
    with torch.no_grad():
        model[4].weight.mul_(torch.randn(3, 6))
    other = ntkfl.jacobian(model, x[200:])
    mixed = ntkfl.concatenate([first, other])
    scaled = J.scaled(torch.rand(600, dtype=torch.float64) + 0.1)
    for left, right in [(J, J), (J, other), (first, other), (scaled, scaled), (scaled, J), (mixed, mixed), (mixed, J)]:
        dense = left.dense().flatten(1) @ right.dense().flatten(1).T / 3
        assert (left.gram(right) - dense).abs().max() < 1e-11 * dense.abs().max()
    assert torch.equal(J.kernel(), J.kernel().T)


@pytest.mark.parametrize("form", ["auto", "dense", "sparse"])
def test_kernels_of_half_types_overflow_only_where_their_values_do(form: str) -> None:
    """Sums over ten outputs, and Gram matrices of inputs, leave float16's range (65,504); the kernel does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 50), nn.ReLU(), nn.Linear(50, 10))
    x = 20 * torch.randn(30, 400)
    J: Jacobian = ntkfl.jacobian(model, x, "dense" if form == "dense" else "auto")
    if form == "sparse":
        J = sparsify(J, 0.5)
    half = J.to(torch.float16)
    expected = half.double().kernel()
    assert 65_504 / 2 < expected.diagonal().max() < 65_504  # twice the largest overflows as well
    H = half.kernel()
    assert H.dtype == torch.float16
    near = 2**-10 * expected.max()  # the rounding of the result, and float32's of sums
    assert (H.double() - expected).abs().max() <= near
    assert (half.gram(half[:3]).double() - expected[:, :3]).abs().max() <= near
