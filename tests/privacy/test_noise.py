"""Clipping and noise: their distributions, and what is sent of noised updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ntkfl.models
from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound, FedAvg, Method, Scaffold, Task
from ntkfl.methods.ntk_fl import NTKFL
from ntkfl.privacy.noise import clip_rows, grain, noisy_rows
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message


def _draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _client(n: int = 12, seed: int = 3) -> ClientRound:
    draws = _draws(7)
    x, y = 4 * torch.randn(n, 6, generator=draws), torch.randint(3, (n,), generator=draws)
    return ClientRound(0, x, y, Randomness.simulated(seed))


def _task() -> Task:
    return Task(ntkfl.models.mlp(6, 5, 3), 3, "ce")


@settings(deadline=None, max_examples=30)
@given(st.floats(0.1, 10), st.integers(0, 100))
def test_clipping_bounds_the_norm_and_leaves_short_rows_alone(bound: float, seed: int) -> None:
    rows = 3 * torch.randn(8, 2, 3, generator=_draws(seed))
    clipped = clip_rows(rows, bound)
    norms, before = clipped.flatten(1).norm(dim=1), rows.flatten(1).norm(dim=1)
    assert bool((norms <= bound * (1 + 1e-5)).all())
    torch.testing.assert_close(clipped[before <= bound], rows[before <= bound])
    torch.testing.assert_close(torch.cosine_similarity(clipped.flatten(1), rows.flatten(1)), torch.ones(8))
    assert clip_rows(torch.zeros(1, 3), bound).tolist() == [[0, 0, 0]]


def test_noise_has_the_size_it_says() -> None:
    x = torch.ones(400, 50)
    own = Randomness.simulated(0)
    noisy = noisy_rows(x, 2.0, 0.5, own)
    assert float((noisy - clip_rows(x, 2.0)).std()) == pytest.approx(1.0, rel=0.02)
    assert torch.equal(noisy, noisy_rows(x, 2.0, 0.5, own))
    assert torch.equal(noisy_rows(x, 2.0, 0.0, own), clip_rows(x, 2.0))
    with pytest.raises(ConfigError, match="tokens"):
        noisy_rows(torch.ones(2, 3, dtype=torch.int64), 1.0, 1.0, own)


def test_an_update_is_clipped_and_noised_and_nothing_else_is_told() -> None:
    task, client = _task(), _client()
    question = Message("weights", 1, {"weights": task.like})
    clipped = FedAvg(clip=0.01, lr=1.0).answer(task, question, [client])[0]
    assert float((clipped.arrays["weights"] - task.like).norm()) == pytest.approx(0.01, rel=1e-3)
    method = FedAvg(clip=0.01, noise=50.0, lr=1.0)
    replies = [method.answer(task, question, [_client(seed=s)])[0] for s in range(40)]
    moved = torch.stack([r.arrays["weights"] - task.like for r in replies])
    assert float(moved.std()) == pytest.approx(0.5, rel=0.05)
    assert {name for reply in replies for name in reply.arrays} == {"weights", "samples"}
    assert all(int(reply.arrays["samples"]) == 1 for reply in replies)
    round = method.round(task, {"weights": task.like}, 1, [0, 1])
    next(round)
    with pytest.raises(StopIteration) as end:
        round.send(replies)
    assert end.value.value.train_loss is None


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (FedAvg, {"noise": 1.0}, "give clip too"),
        (FedAvg, {"noise": 1.0, "clip": 1.0, "weighting": "samples"}, "count equally"),
        (Scaffold, {"clip": 1.0}, "unknown option 'clip'"),
        (FedAvg, {"clip": -1.0}, "clip"),
        (NTKFL, {"clip": 1.0}, "unknown option 'clip'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(kind: type[Method], options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        kind(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("clip", "noise"), [(1.0, 0.1), (3.7, 1.3), (1.0, 24.0)])
def test_the_last_bits_of_a_noisy_number_say_nothing_of_what_it_hides(
    dtype: torch.dtype, clip: float, noise: float
) -> None:
    """Mironov's attack: floating-point noise reaches other numbers from 0 than from 1/3, so that one number tells which
    of the two it hides. Here both reach multiples of the grain and nothing else, and all of those near their middle.
    """
    step = grain(noise * clip)
    assert noise * clip / 512 < step <= noise * clip / 256
    for value in (0.0, clip / 3):
        rows = torch.full((20_000, 1), value, dtype=dtype)
        noisy = noisy_rows(rows, clip, noise, Randomness.simulated(5)).double()
        multiples = noisy / step
        assert torch.equal(multiples, multiples.round())
        assert float((noisy - value).std()) == pytest.approx(noise * clip, rel=0.03)
        near = multiples[((noisy - value).abs() < 0.1 * noise * clip)]
        # Each of them is expected 15 times at least: one that is missing has a chance of 1e-4 in all.
        assert len(near.unique()) >= int(0.2 * noise * clip / step)


def test_two_questions_of_a_round_do_not_get_the_same_noise_on_two_updates() -> None:
    """Else their difference is the updates' own, in plain. A question that comes again gets the same answer."""
    task, client = _task(), _client()
    client.randomness = Randomness.fresh()
    method = FedAvg(clip=0.01, noise=50.0, lr=1.0)
    plain = FedAvg(clip=0.01, lr=1.0)
    asked = [Message("weights", 1, {"weights": w}) for w in (task.like, 0.5 * task.like)]
    (one,), (other,), (again,) = (method.answer(task, question, [client]) for question in (*asked, asked[0]))
    assert one.encode() == again.encode()
    noises = []
    for reply, question in ((one, asked[0]), (other, asked[1])):
        (true,) = plain.answer(task, question, [client])
        noises.append((reply.arrays["weights"] - true.arrays["weights"]).double())
    size = float(noises[0].norm())
    assert size == pytest.approx(0.5 * task.like.numel() ** 0.5, rel=0.3)
    assert float((noises[0] - noises[1]).norm()) > 0.5 * size
