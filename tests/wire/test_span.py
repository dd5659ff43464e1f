"""Vectors near a plane of few dimensions: what rounding may change, what they cost, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire import Message
from ntkfl.wire.span import DIRECTIONS, MOST_VECTORS, pack_span, unpack_span


def sent(vectors: Tensor) -> Message:
    return Message.decode(Message("candidates", 1, pack_span(vectors)).encode())


def path(count: int, d: int, dimensions: int, seed: int = 0) -> Tensor:
    """Points of a plane: random directions, each of a third of the one before."""
    draws = torch.Generator().manual_seed(seed)
    axes = torch.randn(dimensions, d, generator=draws, dtype=torch.float64)
    weights = torch.randn(count, dimensions, generator=draws, dtype=torch.float64) * 3.0 ** -torch.arange(dimensions)
    return torch.randn(d, generator=draws, dtype=torch.float64) + weights @ axes


def step_sizes(blocks: Tensor, d: int) -> Tensor:
    return blocks.double().repeat_interleave(128, dim=1)[:, :d]


@pytest.mark.parametrize(("count", "d", "dimensions"), [(15, 1001, 4), (4, 300, 3), (2, 128, 1), (19, 517, 2)])
def test_in_a_plane_only_rounding_is_lost(count: int, d: int, dimensions: int) -> None:
    """An entry of o is off by half a step at most. With the coordinates of the directions before they were rounded, so
    is an entry of b_k; those that are sent have the least error, and no larger a one.
    """
    vectors = path(count, d, dimensions)
    message = sent(vectors)
    steps = step_sizes(message.arrays["block_steps"], d)
    assert len(steps) == 1 + dimensions
    around = vectors - vectors[-1]
    axes = torch.linalg.svd(around, full_matrices=False)[2][:dimensions]
    of_directions = (around @ axes.T).abs() @ (steps[1:] / 2).norm(dim=1)
    error = (unpack_span(message, vectors[0]) - vectors).norm(dim=1)
    assert bool((error <= 1.000001 * ((steps[0] / 2).norm() + of_directions)).all())
    assert float(error.norm() / around.norm()) < 0.2


def test_beyond_four_directions_the_smallest_are_lost() -> None:
    vectors = path(15, 2000, 9)
    lost = unpack_span(sent(vectors), vectors[0]) - vectors
    values = torch.linalg.svdvals(vectors - vectors[-1])
    assert len(sent(vectors).arrays["coarse"]) == DIRECTIONS - 1
    flat = path(15, 2000, DIRECTIONS)
    rounding = (unpack_span(sent(flat), flat[0]) - flat).norm()
    assert float(values[DIRECTIONS:].norm()) <= float(lost.norm()) < float(values[DIRECTIONS:].norm() + 2 * rounding)


def test_layers_of_other_sizes_keep_their_own_precision() -> None:
    vectors = path(6, 256, 3)
    vectors[:, 128:] *= 1e-6
    got = unpack_span(sent(vectors), vectors[0])
    for part in (slice(None, 128), slice(128, None)):
        off, size = got[:, part] - vectors[:, part], vectors[:, part] - vectors[:, part].mean(0)
        assert float(off.norm() / size.norm()) < 0.3


def test_what_is_refused() -> None:
    good = dict(sent(path(6, 100, 3)).arrays)
    like = torch.zeros(100)
    for changed, why in (
        ({"fine": good["fine"].float()}, "in 8 and 4 bits"),
        ({"fine": good["fine"][:0]}, "at most 4 directions"),
        ({"coarse": good["coarse"].to(torch.int16)}, "in 8 and 4 bits"),
        ({"coarse": good["coarse"].repeat(2, 1)}, "at most 4 directions"),
        ({"coordinates": torch.zeros(0, 3)}, "a message of 0 vectors"),
        ({"coordinates": torch.zeros(MOST_VECTORS + 1, 3)}, "from 1 to 4096"),
        ({"coordinates": torch.full((6, 3), float("nan"))}, "not finite"),
        ({"block_steps": good["block_steps"][:2]}, "block_steps"),
    ):
        with pytest.raises(MessageError, match=why):
            unpack_span(Message("candidates", 1, good | changed), like)
    with pytest.raises(MessageError, match="fine"):
        unpack_span(Message("candidates", 1, good), torch.zeros(101))
    with pytest.raises(MessageError, match="from 1 to 4096"):
        pack_span(torch.zeros(0, 5))
