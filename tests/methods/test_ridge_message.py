"""Sums in fewer bits: what is exact stays so, what is rounded is bounded and without bias, clients count once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.methods import ClientRound, SumRidge, Task
from ntkfl.methods.ridge_message import pack_sums, take_sums
from ntkfl.methods.sum_ridge import random_signs, shares_of
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.ridge import RidgeSums, solve, total
from ntkfl.wire import Message
from tests.methods.rounds import play

F, CLASSES, N = 40, 3, 200


def samples(seed: int = 0, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """Correlated features of sizes from 0.01 to 100."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (N,), generator=generator)
    mixing = torch.randn(F, F, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    z = torch.randn(N, F, generator=generator, dtype=torch.float64) + nn.functional.one_hot(y, F)
    return (z @ mixing / F**0.5) * torch.logspace(-2, 2, F, dtype=torch.float64) + mean, y


def sums_of(x: Tensor, y: Tensor) -> RidgeSums:
    return RidgeSums.of(x, nn.functional.one_hot(y, CLASSES))


def uniform(seed: int):  # type: ignore[no-untyped-def]
    return lambda count: np.random.default_rng(seed).random(count)


def sent(sums: RidgeSums, values: str, seed: int = 0) -> tuple[RidgeSums, int]:
    """As it arrives, and its bytes."""
    payload = Message("update", 1, pack_sums(sums, torch.float64, values, uniform(seed))).encode()
    return take_sums(Message.decode(payload)), len(payload)


def covariance(sums: RidgeSums) -> Tensor:
    mean = sums.gram[-1, :-1] / sums.samples
    return sums.gram[:-1, :-1] / sums.samples - torch.outer(mean, mean)


@pytest.mark.parametrize(("values", "step"), [("float16", 2**-11), ("8bit", 1 / 127)])
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_correlations_alone_are_rounded_and_by_how_much(values: str, step: float, mean: float) -> None:
    """Whatever the features' sizes and means: of two features c_i c_j is the unit."""
    sums = sums_of(*samples(mean=mean))
    arrived, _ = sent(sums, values)
    for exact, found in ((sums.samples, arrived.samples), (sums.cross, arrived.cross), (sums.squares, arrived.squares)):
        assert torch.equal(exact, found)
    assert torch.equal(arrived.gram[-1], sums.gram[-1])
    before, after = covariance(sums), covariance(arrived)
    c = before.diagonal().sqrt()
    error = (after - before).abs() / torch.outer(c, c)
    rounding = 4 * torch.finfo(torch.float64).eps * (1 + mean**2 / float(c.min()) ** 2)
    assert float(error.diagonal().max()) <= rounding
    assert 0.01 * step < float(error.max()) <= step + rounding


def test_rounding_has_no_bias() -> None:
    """The mean of 300 roundings is within six standard errors; one rounding has a deviation of half a step at most."""
    sums = sums_of(*samples())
    found = torch.stack([covariance(sent(sums, "8bit", seed)[0]) for seed in range(300)])
    before = covariance(sums)
    c = before.diagonal().sqrt()
    spread, error = (value / torch.outer(c, c) for value in (found.std(0), (found.mean(0) - before).abs()))
    assert 0.1 / 127 < float(spread.max()) < 0.55 / 127
    assert float(error.max()) < 6 * 0.5 / 127 / 300**0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"correlations": torch.zeros(7, dtype=torch.int8)},
        {"correlations": torch.zeros(F * (F - 1) // 2, dtype=torch.int16)},
        {"scales": -torch.ones(1)},
        {"scales": torch.ones(2)},
        {"scales": torch.full((1,), float("nan"))},
        {"variances": torch.ones(F - 1)},
        {"sums": torch.full((F,), 1e200, dtype=torch.float64)},
        {"samples": torch.ones(2)},
    ],
)
def test_messages_that_do_not_fit(wrong: dict[str, Tensor]) -> None:
    arrays = pack_sums(sums_of(*samples()), torch.float64, "8bit", uniform(0))
    with pytest.raises(MessageError):
        take_sums(Message("update", 1, arrays | wrong))


def clients(count: int = 6) -> list[ClientRound]:
    return [ClientRound(i, *samples(i), Randomness.simulated(i)) for i in range(count)]


def task() -> Task:
    return Task(nn.Linear(F, CLASSES).double(), CLASSES, "mse")


def kept_total(state: dict[str, Tensor]) -> Tensor:
    i, j = torch.triu_indices(F + 1, F + 1)
    gram = torch.zeros(F + 1, F + 1, dtype=torch.float64)
    gram[i, j] = gram[j, i] = state["total/gram"]
    return gram


@pytest.mark.parametrize(("values", "step"), [("float16", 2**-11), ("8bit", 1 / 127)])
def test_a_client_that_comes_back_counts_once(values: str, step: float) -> None:
    """The same data change nothing, to the bit; more data add their own sums, rounded as any."""
    method, everybody = SumRidge(penalty=0.01, values=values), clients()
    first, _ = play(method, task(), everybody)
    second, _ = play(method, task(), everybody[1:4], first.state, 2)
    assert torch.equal(kept_total(second.state), kept_total(first.state))
    x, y = samples(50)
    everybody[2].x, everybody[2].y = torch.cat([everybody[2].x, x]), torch.cat([everybody[2].y, y])
    third, _ = play(method, task(), everybody[2:3], second.state, 3)
    assert third.diagnostics["samples"] == 7 * N
    change, own = kept_total(third.state) - kept_total(first.state), sums_of(x, y)
    c = covariance(own).diagonal().sqrt()
    assert float(((change - own.gram)[:-1, :-1] / torch.outer(c, c) / N).abs().max()) <= step + 1e-9


def test_shares_are_what_arrived() -> None:
    """The model is solved from the rounded sums that the server keeps: leaving a client out is solving without them."""
    method, everybody = SumRidge(penalty=0.01, values="8bit", keep_shares=True), clients()
    outcome, log = play(method, task(), everybody)
    arrived = [take_sums(s.message) for s in log if s.way == "up"]
    shares = shares_of(outcome.state)
    for client, one in enumerate(arrived):
        assert torch.equal(shares[client].gram, one.gram)
    W = solve(total(arrived), 0.01)
    assert torch.equal(outcome.state["weights"][: F * CLASSES].view(CLASSES, F).mT, W[:-1])


@pytest.mark.parametrize("values", ["float32", "8bit"])
def test_projected_features(values: str) -> None:
    """The layer's weights are P W, with W the solution on φ P; a triangle of 10 features travels."""
    k, everybody = 10, clients()
    outcome, log = play(SumRidge(penalty=0.01, features=k, values=values), task(), everybody)
    P = random_signs(F, k)
    assert P.shape == (F, k)
    assert torch.equal(P.abs(), torch.full_like(P, 1 / k**0.5))
    assert abs(float(P.sum())) < 5 * F**0.5
    x, y = torch.cat([c.x for c in everybody]), torch.cat([c.y for c in everybody])
    W = solve(sums_of(x @ P, y), 0.01)
    found = outcome.state["weights"][: F * CLASSES].view(CLASSES, F).mT
    error = (x @ found - x @ P @ W[:-1]).std() / (x @ P @ W[:-1]).std()
    assert float(error) < (1e-10 if values == "float32" else 0.05)
    assert max(s.size for s in log if s.way == "up") < 8 * ((k + 1) * (k + 2) // 2 + (k + 1) * CLASSES + 2) + 300
