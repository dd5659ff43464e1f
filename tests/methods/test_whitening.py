"""Whitening from few directions: what it is, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError
from ntkfl.methods import PrivateSums
from ntkfl.methods.whitening import REST, WHITENING, directions, read_whitening, scaled_triangle, whitening_arrays
from ntkfl.wire import Message
from tests.methods.rounds import play, small_clients, small_task

NAME, DAMPING = "0-35+35-42", 0.05


def symmetric() -> torch.Tensor:
    """A [6, 6] of eigenvalues that differ by a factor of about 10,000."""
    rows = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = (rows * torch.logspace(-1, 0, 6, dtype=torch.float64)).T @ rows
    return A @ A.T


def test_triangles_keep_the_norm() -> None:
    A = symmetric()
    assert float(scaled_triangle(A).norm()) == pytest.approx(float(A.norm()))


@pytest.mark.parametrize("rank", [1, 3, 5, 50])
def test_strong_directions_are_whitened_and_the_others_by_their_mean(rank: int) -> None:
    A = symmetric()
    arrays = whitening_arrays(NAME, *directions(scaled_triangle(A), DAMPING, rank))
    (P,) = read_whitening(arrays, small_task().like, DAMPING).values()
    values, vectors = torch.linalg.eigh(A)
    values = values / values.mean()
    kept = min(rank, 5)
    values[: 6 - kept] = values[: 6 - kept].mean()
    expected = vectors @ torch.diag((values + DAMPING).rsqrt()) @ vectors.T
    assert torch.allclose(P, expected, atol=1e-9)
    assert arrays[WHITENING + NAME].shape == (6, kept)


def test_noise_that_makes_eigenvalues_negative_does_no_harm() -> None:
    A = symmetric() - 2 * torch.eye(6, dtype=torch.float64) * symmetric().trace() / 6
    read_whitening(whitening_arrays(NAME, *directions(scaled_triangle(A), DAMPING, 3)), small_task().like, DAMPING)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda V, rest: (V, 1e-6 * rest),
        lambda V, rest: (V, 1e6 * rest),
        lambda V, rest: (V, -rest),
        lambda V, rest: (3 * V, rest),
        lambda V, rest: (V * float("nan"), rest),
        lambda V, rest: (V[:4], rest),
        lambda V, rest: (V.flatten(), rest),
        lambda V, rest: (V, torch.cat([rest, rest])),
        lambda V, rest: (V, None),
    ],
)
def test_whitening_that_no_moments_give_is_refused(spoil: object) -> None:
    """Of a badly conditioned one, rounding would give one sample more than its clip."""
    task, clients, method = small_task(), small_clients(30, 40), PrivateSums(epsilon=None)
    outcome, _ = play(method, task, clients)
    V, rest = outcome.state[WHITENING + NAME], outcome.state[REST + NAME]
    method.answer(task, Message("weights", 2, {"weights": task.like} | whitening_arrays(NAME, V, rest)), clients)
    V, rest = spoil(V, rest)  # type: ignore[operator]
    arrays = {"weights": task.like, WHITENING + NAME: V} | ({} if rest is None else {REST + NAME: rest})
    with pytest.raises(MessageError):
        method.answer(task, Message("weights", 2, arrays), clients)
