"""The aggregator's rounds of secure sums with a shuffler in this process: dropouts, clients that spoil, the quorum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import Announced, BatchKey, unpack_rows
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.federation.evaluation import counts, counts_summand
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.methods import ClientRound
from ntkfl.services.announcement import EVALUATION, Announcement
from tests.deployment.test_aggregator import Here, made
from tests.federation.rounds import play_round

FEDAVG: dict[str, Any] = {"name": "fedavg", "secure_sum": True, "local_steps": 2, "weighting": "samples"}


class Masking(Here):
    """Clients that mask; at the keys in `spoiled`, one of them sends noise, at those in `absent` it sends nothing."""

    spoiled: frozenset[BatchKey] = frozenset()
    absent: frozenset[BatchKey] = frozenset()

    def publish(self, signed: bytes) -> None:
        own = self.own
        said = Announcement.check(signed, own.signer.public, own.federation, own.run)
        self.shuffler.publish(signed, said.key, said.batch)
        for name in () if said.batch is None else said.batch.cohort:
            client = self.people[self.names.index(name)]
            if said.key not in self.absent or client.id:
                body = self.masked(said, client)
                assert said.announced is not None
                self.shuffler.submit(name, said.announced, unpack_rows(body[SEED_BYTES:])[1], body[:SEED_BYTES])

    def masked(self, said: Announcement, client: ClientRound) -> bytes:
        own = self.own
        assert said.message is not None
        assert said.announced is not None
        assert said.sealing_key is not None
        if said.kind == "evaluate":
            reply = counts(own.task, said.message, client.x, client.y)
            summand = counts_summand(reply, own.method.sum_samples)
        else:
            (reply,) = own.method.answer(own.task, said.message, [client])
            summand = own.method.summand(own.task, said.message, reply)
        words = SumSchema.of(reply.kind, summand, 3).encode(summand, client.randomness)
        if said.key in self.spoiled and client.id == 0:
            words = words + np.uint32(1 << 31)
        return mask_reply(words, said.sealing_key, own.federation, own.run, said.announced)

    def masks(self, announced: Announced, numbers: int) -> bytes:
        return self.shuffler.masks(announced.key)


def run(folder: Path, tmp_path: Path, **keys: frozenset[BatchKey]) -> tuple[Aggregator, list[str], Masking]:
    said: list[str] = []
    aggregator = Aggregator(folder, tmp_path / "run", said.append)
    here = Masking(aggregator)
    for name, value in keys.items():
        setattr(here, name, value)
    aggregator.transport.shuffler = here  # type: ignore[assignment]
    return aggregator, said, here


def test_rounds_of_sums_are_rounds_of_their_replies(tmp_path: Path) -> None:
    """FedAvg with these clients, without rounding: the weights agree to it."""
    folder = made(tmp_path, rounds=2, method=FEDAVG)
    aggregator, _, here = run(folder, tmp_path)
    state, server = aggregator.server.state.state, aggregator.server
    history = aggregator.run().history
    assert [(r["summed_clients"], r["bounded_clients"], r["dropped_rows"]) for r in history] == [(3, 0, 0)] * 2
    assert [record["evaluated_samples"] for record in history] == [18, 18]
    for number in (1, 2):
        state = play_round(server.task, server.method, state, number, here.people)[0].state
    scale = 2.0**23 * 6 / 1000  # of 10 and three clients at least; each counts for 6 of 1,000 samples
    assert float((server.state.state["weights"] - state["weights"]).abs().max()) < 2 * 3 / scale


def test_who_is_absent_is_wholly_out(tmp_path: Path) -> None:
    folder = made(tmp_path, method=FEDAVG, round_seconds=1.0)
    aggregator, _, here = run(folder, tmp_path, absent=frozenset({BatchKey(1, 0), BatchKey(1, EVALUATION)}))
    state, server = aggregator.server.state.state, aggregator.server
    (record,) = aggregator.run().history
    assert (record["summed_clients"], record["evaluated_samples"]) == (2, 12)
    expected = play_round(server.task, server.method, state, 1, here.people[1:])[0].state["weights"]
    assert torch.allclose(server.state.state["weights"], expected, atol=1e-4)


def test_a_spoiled_sum_costs_the_round_and_not_the_run(tmp_path: Path) -> None:
    """The total is beyond what clients can make: it is tried again under the next number of the protocol."""
    folder = made(tmp_path, method=FEDAVG, retries=1)
    aggregator, said, _ = run(folder, tmp_path, spoiled=frozenset({BatchKey(1, 0)}))
    (record,) = aggregator.run().history
    assert (record["attempt"], record["protocol_round"]) == (1, 2)
    assert "one of them did not keep to its own" in said[1]
