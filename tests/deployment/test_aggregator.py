"""The aggregator's rounds with a shuffler in this process: what it asks for, opens, leaves out and records."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ntkfl.crypto.hpke import SealingKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row, unpack_rows
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.errors import ConfigError, Refused, RunFolderError, TrustError
from ntkfl.federation.evaluation import score_rows
from ntkfl.federation.server import remarks
from ntkfl.federation.server_state import draw_cohort
from ntkfl.federation.shuffled import seal_messages, seal_reply
from ntkfl.methods import ClientRound
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.announcement import Announcement
from ntkfl.services.shuffler.batch import Status
from ntkfl.services.shuffler.presence import Presence
from ntkfl.services.shuffler.schemas import Clients
from ntkfl.services.shuffler.store import Shuffler

NAMES = ["client-0", "client-1", "client-2"]
SETTINGS = {
    "inputs": [5], "outputs": 3, "precision": "float64", "rounds": 1, "clients": 3, "clients_per_round": 3,
    "evaluators": 0, "model": {"hidden": [4]},
    "method": {"name": "ntk-fl", "shuffle": True},
}  # fmt: skip


class Here:
    """The shuffler itself instead of a way to it: who is asked answers as soon as an announcement is published."""

    def __init__(self, aggregator: Aggregator, names: list[str] = NAMES, leaves: str = "", silent: str = "") -> None:
        """`leaves`: the client that answers a round's first exchange and no other; `silent`: one that never answers."""
        self.own, self.names, self.leaves, self.silent = aggregator.transport, names, leaves, silent
        ticks = itertools.count(step=1000)  # every deadline has passed when it is looked at
        presence = Presence(cohort=aggregator.settings.clients_per_round)
        self.shuffler = Shuffler(clock=lambda: float(next(ticks)), presence=presence)
        self.recorded: list[tuple[Announced, list[bytes]]] = []
        torch.manual_seed(0)
        self.people = [
            ClientRound(i, torch.randn(6, 5).double(), torch.arange(6) % 3, Randomness.simulated(i))
            for i in range(len(names))
        ]

    def clients(self, role: str) -> list[str]:
        return self.names if role == "client" else []

    def presence(self, role: str) -> Clients:
        """As the shuffler's application answers."""
        there, lapsed = self.clients(role), sorted(self.shuffler.presence.lapsed())
        named = self.shuffler.presence.may_be_named(len(there))
        return Clients(clients=there, lapsed=lapsed if named else [])

    def newest(self) -> BatchKey | None:
        return self.shuffler.latest()[1]

    def publish(self, signed: bytes) -> None:
        said = Announcement.check(signed, self.own.signer.public, self.own.federation, self.own.run)
        self.shuffler.publish(signed, said.key, said.batch)
        if said.batch is not None:
            assert said.announced is not None
            for name in said.batch.cohort:
                if name != self.silent and (said.key.exchange == 0 or name != self.leaves):
                    rows = self.rows(said, self.people[self.names.index(name)])
                    self.shuffler.submit(name, said.announced, rows)

    def rows(self, said: Announcement, client: ClientRound) -> list[bytes]:
        own = self.own
        assert said.message is not None
        assert said.announced is not None
        assert said.sealing_key is not None
        assert said.batch is not None
        where = (said.sealing_key, own.federation, own.run, said.announced)
        if said.kind == "evaluate":
            scores = score_rows(own.task, said.message, client.x, client.y)
            return unpack_rows(seal_messages(scores, said.batch.max_rows, *where))[1]
        (reply,) = own.method.answer(own.task, said.message, [client])
        if self.names == NAMES and client.id == 1 and reply.kind == "upload":
            reply.arrays["outputs"][4] = float("nan")
        return unpack_rows(seal_reply(own.method, reply, said.batch.max_rows, *where))[1]

    def status(self, key: BatchKey) -> Status:
        return self.shuffler.status(key)

    def release(self, announced: Announced) -> list[bytes]:
        rows = self.shuffler.release(announced.key)
        self.recorded.append((announced, rows))
        return rows

    def forget(self, key: BatchKey) -> None:
        self.shuffler.forget(key)

    def cancel(self, key: BatchKey) -> None:
        self.shuffler.cancel(key)


def made(folder: Path, **settings: Any) -> Path:
    (folder / "run.toml").write_text(tomli_w.dumps(SETTINGS | settings))
    counts = {"clients": int(settings.get("clients", 3)), "evaluators": int(settings.get("evaluators", 0))}
    init(folder / "demo", folder / "run.toml", DemoSetup(**counts))
    return folder / "demo" / "aggregator"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path)


def test_a_sealed_row_that_is_not_finite_is_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    aggregator = Aggregator(folder, tmp_path / "run")
    before = aggregator.server.state.state["weights"].clone()
    aggregator.transport.shuffler = Here(aggregator)  # type: ignore[assignment]
    (record,) = aggregator.run().history
    assert record["rejected"] == {"not finite": 1}
    assert record["dropped_rows"] == 1
    assert record["samples"] == record["evaluated_samples"] - 1 == 17
    assert remarks(record) == ["rejected: 1 not finite"]
    weights = aggregator.server.state.state["weights"]
    assert bool(weights.isfinite().all())
    assert not torch.equal(weights, before)


def test_a_run_that_has_ended_is_not_played_again_in_any_folder(folder: Path, tmp_path: Path) -> None:
    aggregator = Aggregator(folder, tmp_path / "run", lambda line: None)
    aggregator.transport.shuffler = Here(aggregator)  # type: ignore[assignment]
    aggregator.run()
    with pytest.raises(ConfigError, match=r"run run-0 has ended.*ntkfl keys run"):
        Aggregator(folder, tmp_path / "other")
    (folder / "ended-run-0").unlink()
    with pytest.raises(RunFolderError, match=r"holds a run that has ended.*ntkfl keys run"):
        Aggregator(folder, tmp_path / "run")


def test_after_a_round_no_key_opens_what_was_recorded(tmp_path: Path) -> None:
    """Whoever recorded the rows and later steals all that the aggregator has, or its memory, opens none of them."""
    folder = made(tmp_path, rounds=2, max_rows=6)
    aggregator = Aggregator(folder, tmp_path / "run", lambda line: None)
    here = aggregator.transport.shuffler = Here(aggregator)  # type: ignore[assignment]
    assert len(aggregator.run().history) == 2
    recorded = [(said, row) for said, rows in here.recorded for row in rows]
    assert len(recorded) == 2 * 3 * (6 + 1 + 6)  # upload, losses and evaluation of two rounds, all of them opened then
    stolen = [aggregator.transport.opener]
    for path in (*folder.rglob("*"), *(tmp_path / "run").rglob("*")):
        if path.is_file() and b"PRIVATE" in path.read_bytes():
            key = load_pem_private_key(path.read_bytes(), None)
            if isinstance(key, Ed25519PrivateKey):
                value = key.private_bytes_raw()
            else:
                value = key.private_numbers().private_value.to_bytes(32, "big")  # type: ignore[union-attr]
            stolen.append(SealingKey(X25519PrivateKey.from_private_bytes(value)))
    stolen += [found for found in gc.get_objects() if type(found) is SealingKey]
    assert len(stolen) >= 4
    for key in stolen:
        for said, row in recorded:
            with pytest.raises(TrustError):
                open_row(key, row, "demo", "run-0", said)


def test_the_record_says_how_many_were_asked_and_answered(tmp_path: Path) -> None:
    """Of a round in which one was silent: counts, since the shuffler says which rows came, and not whose."""
    aggregator = Aggregator(made(tmp_path, rounds=1, clients=4, clients_per_round=4), tmp_path / "run")
    names = [*NAMES, "client-3"]
    aggregator.transport.shuffler = Here(aggregator, names, silent="client-2")  # type: ignore[assignment]
    run = aggregator.run()
    (record,), (timing,) = run.history, run.timings
    assert (record["asked"], record["answered"]) == (4, 3)
    assert record["samples"] == 3 * 6
    assert 0 < timing["waited_seconds"] <= timing["seconds"]
    assert remarks(record, {"waited_seconds": 37.4}) == ["3 of 4 clients answered; waited 37 s for 1"]
    assert remarks(record | {"answered": 4}) == []


def test_a_client_that_has_lapsed_is_drawn_last(tmp_path: Path) -> None:
    """3 of 6 a round; client-2 never answers. It is drawn until it has missed two, and then no more."""
    names = [f"client-{i}" for i in range(6)]
    aggregator = Aggregator(made(tmp_path, rounds=9, clients=6, clients_per_round=3), tmp_path / "run")
    aggregator.transport.shuffler = Here(aggregator, names, silent="client-2")  # type: ignore[assignment]
    drawn = ["client-2" in record["clients"] for record in aggregator.run().history]
    first = [number for number, was in enumerate(drawn) if was][1] + 1  # the round after its second draw
    assert sum(drawn[:first]) == 2
    assert not any(drawn[first:])


def test_a_client_that_leaves_in_a_round_costs_the_round_and_not_the_run(tmp_path: Path) -> None:
    """Without its losses its uploads would be the ones that match none: nothing more of the round is released. The
    round is tried again under the next number, with clients that stay.
    """
    said: list[str] = []
    folder = made(tmp_path, rounds=2, clients=4, retries=1, round_seconds=1.0)
    aggregator = Aggregator(folder, tmp_path / "run", said.append)
    names = [*NAMES, "client-3"]
    leaves = names[draw_cohort(0, 4, 3, 1)[0]]  # one of the first cohort
    here = aggregator.transport.shuffler = Here(aggregator, names, leaves)  # type: ignore[assignment]
    run = aggregator.run()
    first, second = run.history
    assert [timing.get("waited_seconds", 0.0) > 0 for timing in run.timings] == [True, False]  # by the failed attempt
    assert [announced.key for announced, _ in here.recorded][:2] == [BatchKey(1, 0), BatchKey(2, 0)]
    assert "2 of the 3 that began the round answered within " in said[0]
    assert f"missing: {leaves};" in said[0]
    assert first["failed_attempts"] == [said[0].partition("failed: ")[2]]
    assert (first["asked"], first["answered"], second["answered"]) == (3, 3, 3)
    assert (first["round"], first["protocol_round"]) == (1, 2)
    assert (second["round"], second["protocol_round"]) == (2, 3)
    assert leaves not in first["clients"]
    assert leaves not in second["clients"]
    with pytest.raises(Refused, match="released, and then deleted"):
        here.shuffler.release(BatchKey(1, 0))
