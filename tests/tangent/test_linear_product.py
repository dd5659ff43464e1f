"""The kernel product of a linear layer in each of its forms: all are J Jᵀ R of the dense Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.linear_product import common_factor, linear_product, sensitivities

EPS = torch.finfo(torch.float32).eps


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden_layer(activation: type[nn.Module], layers: int = 1) -> BlockJacobian:
    torch.manual_seed(1)
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(9, 9), activation())]
    J = ntkfl.jacobian(nn.Sequential(nn.Linear(6, 9), activation(), *hidden, nn.Linear(9, 4)), drawn(30, 6))
    assert isinstance(J, BlockJacobian)
    return J


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_the_layer_before_the_last_has_the_last_ones_weights_as_common_factor(activation: type[nn.Module]) -> None:
    """Also where rows were scaled, as clipping does: one more rounding of each number."""
    J = hidden_layer(activation).scaled(0.1 + torch.rand(30, generator=torch.Generator().manual_seed(2)))
    g = J.blocks[0].tensors()[1]
    found = common_factor(g)
    assert found is not None
    M, s = found
    made = M.double() * s.double().unsqueeze(1)
    assert bool(((made - g.double()).abs() <= 8 * EPS * g.double().abs()).all())
    assert s.shape == (30, 9)


def test_one_number_that_is_not_the_products_and_the_form_is_not_taken() -> None:
    """A Byzantine client's row, say: its own numbers count, not those of a form that it does not have."""
    g = hidden_layer(nn.ReLU).blocks[0].tensors()[1].clone()
    row, unit = (g[:, 0] != 0).nonzero()[5].tolist()
    g[row, 2, unit] *= 1 + 20 * EPS
    assert common_factor(g) is None
    X = drawn(30, 9)
    exact = torch.einsum("nq,npq->np", X.double(), g.double())
    bound = 9 * EPS * torch.einsum("nq,npq->np", X.double().abs(), g.double().abs())
    assert bool(((sensitivities(g)[1](X) - exact).abs() <= bound).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["general", "common", "identity"])
@pytest.mark.parametrize("rows", [9, 40])
def test_every_form_is_the_dense_product(rows: int, form: str, bias: bool) -> None:
    """9 rows of 6 inputs go by pairs of rows, 40 through the weights.

    The bound: each result is a sum of rows·(inputs + 1) + 2·outputs products, in any order.
    """
    a, R = drawn(rows, 6), drawn(rows, 4, seed=1)
    g = {
        "general": drawn(rows, 4, 5, seed=2),
        "common": drawn(4, 5, seed=2) * drawn(rows, 1, 5, seed=3),
        "identity": torch.eye(4).expand(rows, 4, 4).contiguous(),
    }[form]
    if form == "common":
        assert common_factor(g) is not None
    made = linear_product(a, g, bias)(R)
    Z = torch.cat([a, torch.ones(rows, int(bias))], 1).double()
    J = torch.einsum("ncj,ni->ncji", g.double(), Z).flatten(0, 1).flatten(1)
    exact = (J @ (J.T @ R.double().flatten())).view(rows, 4)
    sizes = (J.abs() @ (J.abs().T @ R.double().abs().flatten())).view(rows, 4)
    assert bool(((made - exact).abs() <= (rows + 7 + 2 * 5 + 16) * EPS * sizes).all())
