"""Sequence models of the experiments: first weights, what a step is, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.networks import gru, transformer

from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, build_network

NETWORKS = {"gru": gru, "transformer": transformer}


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
