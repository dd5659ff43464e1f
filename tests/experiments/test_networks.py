"""Sequence models of the experiments: shapes, first weights, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.networks import gru, transformer

from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, build_network

NETWORKS = {"gru": gru, "transformer": transformer}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_a_batch_to_outputs_a_sample_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]((1, 28, 28), 7).double().eval()  # float32 products differ with the size of a batch
    x = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    f = model(x)
    assert f.shape == (5, 7)
    assert torch.allclose(model(x[2:3]), f[2:3], atol=1e-12, rtol=0)
    assert bool(f.isfinite().all())
    other = NETWORKS[name]((1, 28, 28), 7).double()  # nothing that clients could differ in
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_recurrent_weights_are_orthogonal() -> None:
    model = gru((1, 8, 8), 10, width=16)
    for gate in model.recurrent.weight_hh_l0.detach().chunk(3):
        assert (gate @ gate.T - torch.eye(16)).abs().max() < 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_an_images_rows_are_its_steps(name: str) -> None:
    """A step is one row, all channels of it."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]((2, 4, 3), 8), torch.randn(1, 2, 4, 3)
    assert torch.equal(model(torch.cat([x[:, 0], x[:, 1]], dim=2)), model(x))


def test_they_are_named_as_a_users_own() -> None:
    named = ModelConfig(name="ntkfl_experiments.networks:gru", options={"width": 8})
    assert build_network(named, (4, 3), 2, seed=0)(torch.randn(5, 4, 3)).shape == (5, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gru((784,), 10), "images"),
        (lambda: transformer((1, 8, 8), 10, width=30), "multiple of its 4 heads"),
    ],
)
def test_what_cannot_be_built_is_one_line(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]
