"""Secure sums with two holders of masks: exactly the sum of those that reached both, and three that must collude."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ntkfl
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.mask_tickets import check_ticket, split_submission
from ntkfl.crypto.masking import Words, mask, unpack_words
from ntkfl.crypto.row_frames import open_row, unpack_rows
from ntkfl.errors import Refused, TrustError
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import FedAvg
from tests.federation.masked import KEY, NAMES, SAID, Round, played, schema_of, words_of
from tests.federation.test_secure_sum_views import CERTAIN, NUMBERS, View, compared

CLIENTS = ("ada", "bob", "cyd", "dan")
STATES = ("absent", "second holder alone", "both")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_sum_is_of_those_that_reached_both(data: st.DataObject) -> None:
    """A client that gave its second seed and died before the shuffler heard of it is wholly out."""
    least = data.draw(st.integers(2, 3))
    own = Round(schema_of(2, len(CLIENTS)), CLIENTS, least, holders=2)
    vectors: dict[str, list[int]] = {}
    for client in CLIENTS:
        how = data.draw(st.sampled_from(STATES))
        vector = [0, *(data.draw(st.integers(-(2**28), 2**28)) for _ in range(2))]
        if how != "absent":
            own.submit_to_both(client, words_of(vector), reaches_shuffler=how == "both")
        if how == "both":
            vectors[client] = vector
    if len(vectors) < least:
        with pytest.raises(Refused, match="release needs"):
            own.shuffler.release(KEY)
        with pytest.raises(Refused, match="not released yet"):
            own.shuffler.released_set(KEY)
        return
    total = own.total()
    assert total.clients == len(vectors)
    plain = [sum(column) for column in zip(*vectors.values(), strict=True)]
    assert (total.arrays["vector"].numpy() * own.schema.scales()[1:]).tolist() == plain[1:]


def test_a_client_without_a_ticket_of_its_own_is_out() -> None:
    """Who never asked the second holder, or shows another client's ticket, is not taken."""
    own = Round(schema_of(2, 2), CLIENTS[:2], holders=2)
    own.submit_to_both("ada", words_of([0, 1, 2]))
    seed, signed, framed = split_submission(memoryview(own.submitted[0]), SEED_BYTES)
    rows = unpack_rows(framed)[1]
    with pytest.raises(Refused, match="wants tickets"):
        own.shuffler.submit("bob", SAID, rows, seed)
    with pytest.raises(TrustError):
        check_ticket(signed, own.second.public, *NAMES, "bob", SAID)
    one = Round(schema_of(2, 2), CLIENTS[:2])
    with pytest.raises(Refused, match="takes no tickets"):
        one.shuffler.submit("ada", SAID, rows, seed, bytes(16))


def test_masks_of_both_leave_no_trace_in_training() -> None:
    """One holder or two: the same sums to the bit, and the bytes of the second submission are counted."""
    digits = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=6, alpha=0.5), seed=0)
    runs = []
    for holders in (1, 2):
        torch.manual_seed(0)
        model = ntkfl.models.mlp(64, 8, 10).double()
        method = FedAvg(secure_sum=True, local_steps=2, mask_holders=holders)
        runs.append(Simulation(model, digits, method, clients_per_round=3).run(2, callbacks=[]))
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    for one, two in zip(runs[0].history, runs[1].history, strict=True):
        # A ticket (16) with its signature (64), and a seed (32) in a frame (54) to the second holder.
        assert two["uplink_bytes"] - one["uplink_bytes"] == 3 * (16 + 64 + 32 + 54)


# -- Who has to collude ------------------------------------------------------------------------------------------------


def holding(*known: str) -> View:
    """What the aggregator sees together with the holders named: every vector without the masks that they know."""

    def view(own: Round) -> list[Words]:
        own.release()
        opened = {row: unpack_words(open_row(own.opener, row, *NAMES, SAID), NUMBERS) for row in own.sealed}
        seen = []
        for body, second in zip(own.submitted, own.seeds, strict=True):
            seed, _, framed = split_submission(memoryview(body), SEED_BYTES)
            words = opened[bytes(unpack_rows(framed)[1][0])] if "shuffler" in known else None
            if words is None:  # without the shuffler it does not know whose is whose
                continue
            words = words - mask(seed, SAID, NUMBERS)
            seen.append(words - mask(second, SAID, NUMBERS) if "key server" in known else words)
        if "shuffler" not in known:
            for words in opened.values():
                seen += [words - mask(second, SAID, NUMBERS) for second in own.seeds]
        differences = [one - two for one, two in combinations(seen, 2)]
        return [*seen, *differences, sum(opened.values(), np.zeros(NUMBERS, dtype=np.uint32))]

    return view


@pytest.mark.parametrize("known", [("shuffler",), ("key server",)], ids=" and ".join)
def test_one_holder_and_the_aggregator_learn_nothing_of_a_client(known: tuple[str, ...]) -> None:
    """Two worlds with equal sums and different clients look alike to them."""
    assert compared(holding(*known), lambda world: played(world, limit=2e8, holders=2)) > CERTAIN


def test_all_three_learn_everything() -> None:
    both = holding("shuffler", "key server")
    assert compared(both, lambda world: played(world, limit=2e8, holders=2)) < CERTAIN
