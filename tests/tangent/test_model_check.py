"""Models and inputs without a sample-wise Jacobian are refused in words; what only looks so is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ntkfl
from ntkfl.errors import ModelError, NumericalError
from tests.tangent.test_jacobian import EXACT, autograd


class By(nn.Module):
    """A linear layer [4 -> 4], and what is made of its output."""

    def __init__(self, then: Callable[[Tensor], Any], before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.a, self.then, self.before = nn.Linear(4, 4), then, before

    def forward(self, x: Tensor) -> Any:
        return self.then(self.a(self.before(x)))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()


@pytest.mark.parametrize(
    "then",
    [lambda out: out.sum(1), lambda out: out.view(-1, 2, 2), lambda out: (out, None), lambda out: {"logits": out}],
)
def test_output_that_is_not_a_matrix(then: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ModelError, match=r"must map N samples to \[N, d2\]; two samples gave"):
        ntkfl.jacobian(By(then), torch.randn(3, 4))


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("equal", [False, True])
def test_samples_that_influence_each_other(form: str, equal: bool) -> None:
    """Also where the first two are equal, which such a model may treat as it treats one of them alone."""
    x = torch.randn(5, 4)
    if equal:
        x[1:3] = x[0]
    with pytest.raises(ModelError, match="depends on the other samples"):
        ntkfl.jacobian(By(torch.tanh, lambda x: x / x.norm(dim=0, keepdim=True) * len(x) ** 0.5), x, form=form)


def test_outputs_that_are_random() -> None:
    with pytest.raises(ModelError, match="different outputs for the same x"):
        ntkfl.jacobian(By(lambda out: nn.functional.dropout(out, 0.5)), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x[0], r"first dimension of x counts samples.* x\[:1\]"),
        (lambda x: x.long(), r"the model fails on samples x \[N, 4\] of torch.int64 .*torch.float64 on cpu"),
        (lambda x: x.float(), "the model fails on samples"),
        (lambda x: x[:0], "at least one sample"),
        (lambda x: x.numpy(), "one tensor of samples.*, got ndarray"),
        (lambda x: [x, x], "got list: wrap a model of several inputs"),
    ],
)
def test_inputs_that_do_not_fit(change: Callable[[Tensor], Any], why: str) -> None:
    x, model = torch.randn(5, 4, dtype=torch.float64), small()
    with pytest.raises(ModelError, match=why):
        ntkfl.jacobian(model, change(x))
    with pytest.raises(ModelError, match=r"must be an nn\.Module, got method"):
        ntkfl.jacobian(model.forward, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("row", [2, 6])
def test_the_first_row_that_is_not_finite_is_named(form: str, row: int) -> None:
    x = torch.randn(9, 4, dtype=torch.float64)
    x[row:] = float("nan")
    with pytest.raises(NumericalError, match=rf"first in row {row}\b"):
        ntkfl.jacobian(small(), x, form=form)


def test_inference_mode() -> None:
    model = small()
    with torch.inference_mode():
        x = torch.randn(3, 4, dtype=torch.float64)
        with pytest.raises(ModelError, match="inference_mode"):
            ntkfl.jacobian(model, x)
    assert (ntkfl.jacobian(model, x).dense() - autograd(model, x.clone())).abs().max() < EXACT


def test_autocast_is_off_inside() -> None:
    model, x = small().float(), torch.randn(5, 4)
    expected = ntkfl.jacobian(model, x).dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ntkfl.jacobian(model, x).dense(), expected)


def test_layers_that_are_run_again_in_the_backward_pass() -> None:
    """A factored form would miss them; their derivatives are the same."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model = By(lambda out: checkpoint(inner, out, use_reentrant=False)).double()
    model.inner = inner
    x = torch.randn(3, 4, dtype=torch.float64)
    assert (ntkfl.jacobian(model, x).dense() - autograd(model, x)).abs().max() < EXACT


def test_embeddings_that_shorten_their_vectors_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 2))
    before = model[0].weight.detach().clone()
    ntkfl.jacobian(model, torch.randint(5, (3, 2)))
    assert torch.equal(model[0].weight, before)
