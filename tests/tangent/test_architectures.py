"""A table of architectures: every product, every form, against plain autograd in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from tests.tangent import architectures, networks
from tests.tangent.architectures import ARCHITECTURES
from tests.tangent.networks import NETWORKS
from tests.tangent.test_jacobian import autograd

EXACT = 1e-9
UNKNOWN = {  # those with a parameter that only a dense block can hold
    "circular convolution",
    "LSTM with projection",
    "cells by hand",
    "tied embedding",
    "transformer block",
    "cross-attention",
    "cross-attention of other widths",
    "cross-attention with extra keys",
    "functional use of a filter",
    "tied weight",
    "functional use",
    "batch merged",
    "unknown layer",
}
ALL = [*ARCHITECTURES, *NETWORKS]


@cache
def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs, and [N, d2, d] by one plain backward pass per sample and output."""
    model, x = (networks if name in NETWORKS else architectures).build(name)
    return model, x, autograd(model, x)


def forms(name: str) -> list[str]:
    return ["auto"] if name in UNKNOWN else ["auto", "factored"]


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in ALL for form in forms(name)])
def test_every_product_equals_autograd(name: str, form: str) -> None:
    model, x, truth = case(name)
    N, d2, d = truth.shape
    J = ntkfl.jacobian(model, x, form=form, chunk=2)
    assert J.shape == truth.shape
    H = torch.einsum("ajd,bjd->ab", truth, truth) / d2
    torch.manual_seed(3)
    delta, R = torch.randn(2, 1, d, dtype=torch.float64), torch.randn(2, 1, N, d2, dtype=torch.float64)
    index = [4, 0, 0, -2]
    whole = ntkfl.concatenate([J[:2], J[[2]], J[3:]])
    for ours, expected in [
        (J.dense(), truth),
        (J.kernel(), H),
        (J.jvp(delta), torch.einsum("njd,abd->abnj", truth, delta)),
        (J.jvp(delta[0, 0]), torch.einsum("njd,d->nj", truth, delta[0, 0])),
        (J.vjp(R), torch.einsum("njd,abnj->abd", truth, R)),
        (J.vjp(R[0, 0]), torch.einsum("njd,nj->d", truth, R[0, 0])),
        (J.product(R[0, 0]), torch.einsum("njd,mkd,mk->nj", truth, truth, R[0, 0])),
        (whole.product(R[0, 0]), torch.einsum("njd,mkd,mk->nj", truth, truth, R[0, 0])),
        (whole.vjp(R[1, 0]), torch.einsum("njd,nj->d", truth, R[1, 0])),
        (whole.jvp(delta[1, 0]), torch.einsum("njd,d->nj", truth, delta[1, 0])),
        (J[:0].product(R[0, 0, :0]), truth[:0, :, 0]),
        (J[index].dense(), truth[index]),
        (J[index].vjp(R[0, 0, :4]), torch.einsum("njd,nj->d", truth[index], R[0, 0, :4])),
        (J[1:].jvp(delta[0, 0]), torch.einsum("njd,d->nj", truth[1:], delta[0, 0])),
        (J[:0].jvp(delta[0, 0]), truth[:0, :, 0]),
        (J[index].gram(J), H[index]),
        (whole.kernel(), H),
        (whole.dense(), truth),
        (ntkfl.concatenate([J, ntkfl.jacobian(model, x[:2], form="dense")]).kernel()[N:, :N], H[:2]),
    ]:
        assert ours.shape == expected.shape
        assert not ours.numel() or (ours - expected).abs().max() <= EXACT * max(1.0, float(expected.abs().max()))
    assert J.dtype == torch.float64
    times = torch.zeros(d, dtype=torch.int64)  # every parameter that is used is in one block
    for block in J.blocks:
        for start, stop in block.layout[1]:
            times[start:stop] += 1
    assert int(times.max()) == 1
    assert not truth[..., times == 0].any()


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_factored_names_what_it_does_not_know(name: str) -> None:
    model, x, _ = case(name)
    with pytest.raises(ntkfl.errors.ModelError, match="no factored form is known for"):
        ntkfl.jacobian(model, x, form="factored")
