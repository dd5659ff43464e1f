"""Whatever weights are announced, a record adds no more than its clip to what a private method sends.

Weights are searched at random, layer by layer: pairs and neighbours that cancel up to 2^-4 to 2^-24 of themselves,
sizes from 1e-45 to 1e30, constant and zero layers. On weights that are not finite every client says the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ntkfl_experiments import networks
from torch import Tensor, nn

from ntkfl import models
from ntkfl.errors import MessageError
from ntkfl.methods import METHODS, ClientRound, Method, Task
from ntkfl.methods.base import adds_noise
from ntkfl.methods.sums.noisy_sums import NoisySums
from ntkfl.methods.sums.private_sums import directions, whitening_arrays
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_noise import integer_change
from ntkfl.tangent import plan_jacobian
from ntkfl.tangent.clipping import clipped_gradient
from ntkfl.tangent.parameters import flatten, load_flat, trainable
from ntkfl.tangent.sums import Layer
from ntkfl.wire import Message
from tests.methods.private import private_task

OUTPUTS, VOCABULARY = 10, 9
Build = Callable[[], nn.Module]


def of_tokens(network: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), network)


NETWORKS: dict[str, tuple[Build, tuple[int, ...], int]] = {  # with how many weights to try
    "mlp": (lambda: models.mlp(64, 12, 8, OUTPUTS), (8, 8), 60),
    "cnn": (lambda: models.cnn((1, 16, 16), OUTPUTS, (4, 8), 16), (1, 16, 16), 40),
    "resnet": (lambda: models.resnet((1, 8, 8), OUTPUTS, (4, 8)), (1, 8, 8), 8),
    "gru": (lambda: networks.gru((6, 5), OUTPUTS, 8), (6, 5), 40),
    "gru of tokens": (lambda: of_tokens(networks.gru((6, 8), OUTPUTS, 8)), (6,), 40),
    "transformer": (lambda: networks.transformer((6, 5), OUTPUTS, 8, 2), (6, 5), 15),
    "transformer of tokens": (lambda: of_tokens(networks.transformer((6, 8), OUTPUTS, 8, 2)), (6,), 15),
}


def hostile(model: nn.Module, tries: int) -> Iterator[Tensor]:
    """Weights [d]: each parameter in a way of its own."""
    draws, start = torch.Generator().manual_seed(0), flatten(model)
    sizes = [p.numel() for p in trainable(model).values()]

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=draws))

    for _ in range(tries):
        w = start.clone()
        for v in w.split(sizes):
            way, M = int(between(0, 8)), 10 ** between(0, 12)
            beside = -M * (1 + 2.0 ** -int(between(4, 25)))
            if way == 1:
                v.mul_(10 ** between(-30, 30))
            elif way == 2:
                v.zero_()
            elif way in (3, 4):  # pairs, alone or among others
                v.mul_(way == 4)
                chosen = torch.randperm(len(v), generator=draws)[: 2 * int(between(1, 20))]
                v[chosen[0::2]], v[chosen[1::2]] = M, beside
            elif way == 5:
                v.fill_(M)
                v[1::2] = beside
            elif way == 6:
                v.fill_(between(-1, 1) * 10 ** between(-3, 3))
            elif way == 7:
                v.mul_(1e-42)  # denormal
        yield w


def records(shape: tuple[int, ...], tokens: bool) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    y = torch.arange(5)
    if tokens:
        return torch.randint(VOCABULARY, (5, *shape), generator=draws), y
    x = torch.randn(5, *shape, generator=draws)
    x[1], x[2] = 1.0, 0.0  # equal positions, where weights can let them cancel
    x[3] *= 1e20
    return x, y


@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_adds_at_most_a_clip(name: str) -> None:
    build, shape, tries = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    x, y = records(shape, "tokens" in name)
    Y, plan, moved = torch.eye(OUTPUTS)[y], plan_jacobian(model, x), 0

    def summed(rows: list[int]) -> Tensor:
        return clipped_gradient(model, x[rows], Y[rows], "ce", plan, 0.5, {})

    for w in hostile(model, tries):
        load_flat(model, w)
        whole, less = summed([0, 1, 2, 3, 4]), summed([0, 1, 2, 3])
        alone = summed([1])
        assert max(float(own.norm()) for own in (whole - less, alone, summed([2]))) <= 0.5 * 1.001
        assert float((whole - summed([0, 3, 2, 3, 4])).norm()) <= 2 * 0.5 * 1.001  # another record in its place
        moved += float(alone.norm()) > 0.4
    assert moved > tries / 10  # else nothing was tried


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_alone_a_record_may_be_taken_from_the_middle(name: str) -> None:
    """Those behind it move up. In a batch they may be rounded in another way then; alone they are not."""
    build, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    x, y = records(shape, tokens=False)
    Y, plan = torch.eye(OUTPUTS)[y], plan_jacobian(model, x)

    def summed(rows: list[int]) -> Tensor:
        return clipped_gradient(model, x[rows], Y[rows], "ce", plan, 0.5, {}, alone=True)

    for w in hostile(model, 6):
        load_flat(model, w)
        whole, own = summed([0, 1, 2, 3, 4]), [summed([i]) for i in range(5)]
        assert float((whole - summed([0, 2, 3, 4])).norm()) <= 0.5 * 1.001
        # Each adds what it adds by itself: float64 sums of five numbers apart.
        torch.testing.assert_close(whole, sum(own, torch.zeros_like(whole)), rtol=0, atol=1e-14)


METHODS_AND_NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {  # of which network
    "records": ("private-sums", "cnn", {"clip": 0.5}),
    "records, whitened": ("private-sums", "mlp", {"clip": 0.5}),
    "records of tokens": ("private-sums", "transformer of tokens", {"clip": 0.5}),
    "heads": ("private-ridge", "cnn", {}),
}


def test_all_private_methods_are_here() -> None:
    noisy = {name for name, kind in METHODS.items() if issubclass(kind, NoisySums)}
    assert noisy == {name for name, *_ in METHODS_AND_NETWORKS.values()}
    assert noisy == {name for name, kind in METHODS.items() if adds_noise(kind)}


@pytest.mark.parametrize("case", METHODS_AND_NETWORKS)
def test_integers_change_by_no_more_than_the_noise_is_for(case: str) -> None:
    name, network, options = METHODS_AND_NETWORKS[case]
    build, shape, _ = NETWORKS[network]
    torch.manual_seed(0)
    method = METHODS[name](**options)
    assert isinstance(method, NoisySums)
    task = private_task(method, Task(build(), OUTPUTS, "ce"), epsilon=None)
    x, y = records(shape, "tokens" in network)
    whitening: dict[str, Tensor] = {}
    if case == "records, whitened":
        layer = Layer((0, 64 * 12), (64 * 12, 65 * 12), False)
        rows = torch.cat([x.flatten(1)[:3], torch.ones(3, 1)], dim=1)
        moments = (rows.T @ rows)[tuple(torch.triu_indices(65, 65))]
        whitening = whitening_arrays(layer.name, *directions(moments, 0.05, 50))
    for w in hostile(task.model, 20):
        asked = Message("weights", 1, {"weights": w} | (whitening or asks(name)))
        whole = sent(method, task, asked, x, y)
        less = sent(method, task, asked, x[:4], y[:4])
        for part in whole:
            difference, numbers = float((whole[part] - less[part]).norm()), len(whole[part])
            bound = integer_change([numbers], grains=method.grains, rounding=method.rounding)
            assert difference <= bound or part == "samples"
    for bad in (math.nan, math.inf):
        asked = Message("weights", 1, {"weights": torch.full_like(task.like, bad)})
        for some in (x, x[:4]):
            with pytest.raises(MessageError, match="not finite"):
                sent(method, task, asked, some, y[: len(some)])


def asks(name: str) -> dict[str, Tensor]:
    return {"asks": torch.tensor(1, dtype=torch.uint8)} if name == "private-sums" else {}


def sent(method: Method, task: Task, asked: Message, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    reply = method.answer(task, asked, ClientRound(0, x, y, Randomness(bytes(32))))
    return {name: array.double() for name, array in reply.arrays.items()}
