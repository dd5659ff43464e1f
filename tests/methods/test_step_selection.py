"""The choice of t by reported losses: what a mean and a trimmed mean make of them."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError
from ntkfl.methods.robust import trimmed_mean
from ntkfl.methods.step_selection import check_scores, choose
from ntkfl.wire import Message


def reports(*losses: list[float]) -> list[Message]:
    one = torch.tensor(1, dtype=torch.int32)
    return [Message("losses", 1, {"sums": torch.tensor(row).double(), "samples": one}) for row in losses]


def test_a_byzantine_client_has_a_veto_in_a_mean_and_none_in_a_trimmed_one() -> None:
    said = reports([3.0, 1.0, 2.0], [3.0, 1.0, 2.5], [4.0, 1.5, 2.0], [2.0, 1.0, 2.0], [1e30, 1e30, 0.0])
    assert choose(said, 3, False, 0.0)[0] == 2
    best, loss = choose(said, 3, False, 0.2)
    assert best == 1
    assert loss == pytest.approx((1.0 + 1.0 + 1.5) / 3)  # without the least and the greatest
    rows = [Message("losses", 1, {"losses": torch.stack([m.arrays["sums"] for m in said])})]
    assert choose(rows, 3, True, 0.0)[0] == 2
    assert choose(rows, 3, True, 0.2) == (best, loss)


@pytest.mark.parametrize("favourite", [0, 4])
def test_byzantine_clients_cannot_name_the_candidate_by_the_level_of_their_losses(favourite: int) -> None:
    """Clients whose losses lie far apart, and who lose the same by each candidate: a trimmed mean of the losses as they
    are is led astray by eight Byzantine clients of twenty, or four, and one of what they lose is not.
    """
    levels, shape = torch.linspace(0.0, 2.0, 12).double(), torch.tensor([0.1, 0.05, 0.0, 0.05, 0.1]).double()
    honest = levels.unsqueeze(1) + 0.01 + shape
    false = torch.full((8, 5), 1e30).double()
    false[:, favourite] = 0
    said = reports(*honest.tolist(), *false.tolist())
    assert int(trimmed_mean(torch.cat([honest, false]), 0.4).argmin()) == favourite
    assert choose(said, 5, False, 0.4)[0] == 2


def test_a_client_that_claims_many_samples_counts_once_where_losses_are_trimmed() -> None:
    said = reports([3.0, 1.0], [3.0, 1.0], [3.0, 1.0])
    many = torch.tensor(1_000_000, dtype=torch.int32)
    byzantine = Message("losses", 1, {"sums": torch.tensor([0.0, 9e6]).double(), "samples": many})
    assert choose([*said, byzantine], 2, False, 0.0)[0] == 0
    assert choose([*said, byzantine], 2, False, 0.25)[0] == 1


@pytest.mark.parametrize("samples", [0, -1, 2**31, 1e30])
def test_losses_of_no_samples_or_too_many_are_refused(samples: float) -> None:
    """A count may come as any type: one beyond int64 must not end the round with an error of its own."""
    reply = Message("losses", 1, {"sums": torch.tensor([1.0, 2.0]).double(), "samples": torch.tensor(samples)})
    with pytest.raises(MessageError, match="samples"):
        check_scores(reply, False)
    with pytest.raises(MessageError, match="samples"):
        choose([reply], 2, False, 0.0)
