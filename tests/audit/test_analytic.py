"""The closed form gives inputs back: exactly where all was sent, in part, and with bounds that hold, otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.audit.analytic import gaussian_prior, invert, lift, linear_layers
from ntkfl.audit.capture import capture
from ntkfl.audit.finding import relative_error
from ntkfl.audit.rows import attack, rows_of
from ntkfl.audit.study import study
from ntkfl.privacy.projection import RunSecret, make_projection
from ntkfl.privacy.sparsify import sparsify
from ntkfl.tangent.blocks import DenseBlock
from ntkfl.tangent.jacobian import Jacobian
from tests.audit.fixtures import config


def _inputs(n: int = 6, d: int = 30) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1))


def _model(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return ntkfl.models.mlp(*sizes)


@pytest.mark.parametrize("sizes", [(30, 20, 5), (30, 12, 8, 5), (30, 5)], ids=str)
def test_dense_jacobians_with_bias_give_the_input_exactly(sizes: tuple[int, ...]) -> None:
    x, model = _inputs(), _model(*sizes)
    found = invert(model, ntkfl.jacobian(model, x, form="dense"))
    assert found is not None
    assert float(relative_error(x, found.x).max()) < 1e-5
    assert bool(found.known.all())
    assert float(found.bound.max()) == 0


@pytest.mark.parametrize(
    ("form", "privacy"),
    [("dense", {}), ("factored", {}), ("auto", {"projected_dim": 24, "shuffle": True, "sparsity": 0.7})],
)
def test_on_the_wire_rows_give_the_inputs(form: str, privacy: dict[str, Any]) -> None:
    """Of sparse ones the coordinates that an entry tells."""
    caught = capture(config({"name": "ntk-fl", "form": form}, privacy={"subsample_rate": 0.1} | privacy), 1)
    found, truth = invert(caught.task.at(caught.weights), rows_of(caught).J), caught.aligned()[0].flatten(1)
    assert found is not None
    if "sparsity" in privacy:
        assert 0.2 < float(found.known.double().mean()) < 1
        torch.testing.assert_close(found.x[found.known], truth[found.known], rtol=1e-3, atol=1e-4)
    else:
        assert float(relative_error(truth, found.x).max()) < 1e-5


@pytest.mark.parametrize("sizes", [(30, 20, 5), (30, 12, 8, 5)], ids=str)
def test_what_sparsified_rows_tell_is_exact_and_the_rest_is_within_its_bound(sizes: tuple[int, ...]) -> None:
    x, model = _inputs(), _model(*sizes)
    found = invert(model, sparsify(ntkfl.jacobian(model, x), 0.85))
    assert found is not None
    assert 0.2 < float(found.known.double().mean()) < 1
    torch.testing.assert_close(found.x[found.known], x[found.known], rtol=1e-3, atol=1e-4)
    hidden = ~found.known
    if len(sizes) == 3:  # g is had from the weights, so the bound is certain
        assert bool((x.abs() <= found.bound[:, None] * 1.001)[hidden].all())
        assert float((found.x - x)[hidden].norm()) < float(x[hidden].norm())  # the equations tell something more


def test_without_any_bias_a_row_is_read_by_the_public_weights() -> None:
    x, model = _inputs(), _model(30, 20, 5)
    J = ntkfl.jacobian(model, x).dense()
    J[:, :, linear_layers(model)[0].bias] = 0  # as if none had been among the largest
    found = invert(model, Jacobian([DenseBlock(J, (slice(0, J.shape[2]),))], 5, J.shape[2]))
    assert found is not None
    assert float(relative_error(x, found.x).max()) < 1e-5


@pytest.mark.parametrize(
    ("form", "model", "read"),
    [
        ("factored", "shared_first", True),
        ("dense", "shared_first", False),
        ("factored", "convolution", True),
        ("dense", "convolution", False),
        ("auto", "convolution", False),
    ],
)
def test_other_first_layers_give_inputs_in_factors_and_nothing_otherwise(form: str, model: str, read: bool) -> None:
    """Of a first layer that is used twice, and of one that comes dense while the second comes in factors."""
    method = {"name": "ntk-fl", "form": form}
    caught = capture(config(method, model={"name": f"{__name__}:{model}"}, privacy={"subsample_rate": 0.05}))
    errors = [f.mean for f in attack(caught) if (f.attack, f.measure) == ("analytic inversion", "relative error")]
    assert bool(errors) is read
    assert all(error < 1e-6 for error in errors)


def shared_first(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    shared = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(64, outputs))


def convolution(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, outputs))


@pytest.mark.parametrize("method", ["ntk-fl", "sum-ntk-fl", "fedavg"])
def test_behind_a_frozen_backbone_features_are_read_and_no_pictures(method: str) -> None:
    found = study(capture(config({"name": method}, model={"backbone": f"{__name__}:backbone"}))).findings
    assert {f.recovers for f in found} >= {"labels", "who was trained on"}
    assert not [f for f in found if "SSIM" in f.measure]


def backbone() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU())


def test_of_a_first_layer_that_sees_positions_sums_tell_class_counts_alone() -> None:
    heard = capture(config({"name": "sum-ntk-fl"}, model={"name": f"{__name__}:positions"}))
    assert {f.attack for f in study(heard).findings if "sums" in f.attack} == {"class counts, sums"}


def positions(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, outputs))


def test_who_has_the_projection_gets_nearer_than_the_mean() -> None:
    mixing = torch.randn(8, 36, generator=torch.Generator().manual_seed(3))
    public, x = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) @ mixing for n in (400, 20))
    projection = make_projection(RunSecret.simulated(0), (36,), 16, "gaussian")
    lifted = lift(projection(x), projection, public)
    assert float(relative_error(x, lifted).max()) < 0.1  # eight degrees of freedom, sixteen numbers
    blind = relative_error(x, gaussian_prior(public)[0].to(x).expand_as(x))
    assert float(blind.min()) > 0.5
