"""A network with its linearisation: features against autograd, and which of the two a batch goes through."""

from __future__ import annotations

import torch
from ntkfl_experiments.rivals.models import Convexified
from torch import nn

from ntkfl.tangent.parameters import call_with, flatten, unflatten


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_features_are_derivatives_of_one_output_with_another_last_layer() -> None:
    model, x = Convexified(network(), 3), torch.randn(5, 4).double()
    single = nn.Sequential(*network()[:2], nn.Linear(6, 1)).double()
    with torch.no_grad():
        single[2].weight[0] = model.readout
        single[2].bias[0] = 0.0
    rows = []
    for one in x:
        single.zero_grad()
        single(one.unsqueeze(0)).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in single.parameters()]))
    torch.testing.assert_close(model.features(x), torch.stack(rows))
    assert float(model.readout.abs().max()) <= 6**-0.5


def test_a_layer_held_twice_stays_what_it_is() -> None:
    twice = nn.Linear(4, 4)
    network = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(4, 3)).double()
    before, x = [id(p) for p in network.parameters()], torch.randn(5, 4).double()
    features = Convexified(network, 3).features(x)
    assert [id(p) for p in network.parameters()] == before
    assert features.shape == (5, 20 + 5)  # the layer once, and the first output of the last


def test_a_random_part_of_many_features() -> None:
    x, whole = torch.randn(5, 4).double(), Convexified(network(), 3)
    few, again = (Convexified(network(), 3, features=10) for _ in range(2))
    other = Convexified(network(), 3, features=10, seed=1)
    assert torch.equal(few.coordinates, again.coordinates)
    assert not torch.equal(few.coordinates, other.coordinates)
    place = {int(c): i for i, c in enumerate(whole.coordinates)}
    kept = whole.features(x)[:, [place[int(c)] for c in few.coordinates]]
    torch.testing.assert_close(few.features(x), kept)


def test_the_network_answers_until_the_linear_model_has_been_trained() -> None:
    plain, x = network(), torch.randn(5, 4).double()
    model = Convexified(network(), 3)
    torch.testing.assert_close(model(x), plain(x))
    theta = torch.randn_like(model.theta)
    flat = torch.cat([theta.reshape(-1), flatten(plain)])
    torch.testing.assert_close(call_with(model, unflatten(model, flat), x), model.features(x) @ theta)
    with torch.no_grad():
        model.theta.copy_(theta)
    torch.testing.assert_close(model(x), model.features(x) @ theta)
