"""The aggregator's rounds with a shuffler in this process: what it asks for, opens, leaves out and records."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
import torch

from ntkfl.engine.crowd import send, send_rows
from ntkfl.engine.services.aggregator import Aggregator
from ntkfl.engine.services.announcement import Announcement
from ntkfl.engine.services.evaluation import score_rows
from ntkfl.engine.services.trial import Trial, init
from ntkfl.errors import ConfigError
from ntkfl.methods import Client
from ntkfl.privacy.batches import Status
from ntkfl.privacy.rows import BatchKey, unpack_rows
from ntkfl.privacy.shuffling import Shuffler

NAMES = ["client-0", "client-1", "client-2"]
SETTINGS = {
    "inputs": [5], "outputs": 3, "precision": "float64", "rounds": 1, "clients": 3, "clients_per_round": 3,
    "evaluators": 0, "model": {"hidden": [4]}, "method": {"name": "ntk-fl", "shuffle": True, "steps": [50.0]},
}  # fmt: skip


class Here:
    """The shuffler itself instead of a way to it: who is asked answers as soon as an announcement is published."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.own, self.shuffler = aggregator, Shuffler()
        torch.manual_seed(0)
        self.people = [Client(i, torch.randn(6, 5).double(), torch.arange(6) % 3, seed=i) for i in range(3)]

    def clients(self, role: str) -> list[str]:
        return NAMES if role == "client" else []

    def newest(self) -> BatchKey | None:
        return self.shuffler.latest()[1]

    def publish(self, signed: bytes) -> None:
        pins = self.own.pins
        said = Announcement.check(signed, self.own.signer.public, pins.federation, pins.run)
        self.shuffler.publish(signed, said.batch)
        if said.batch is not None:
            for name in said.batch.cohort:
                self.shuffler.submit(name, said.key, self.rows(said, self.people[NAMES.index(name)]))

    def rows(self, said: Announcement, client: Client) -> list[bytes]:
        own, where = self.own, (self.own.pins.federation, self.own.pins.run, said.key)
        assert said.message is not None
        assert said.batch is not None
        if said.kind == "evaluate":
            scores = score_rows(own.task, said.message, client.x, client.y)
            return unpack_rows(send_rows(scores, said.batch.max_rows, own.opener.public, *where))[1]
        (reply,) = own.method.answer(own.task, said.message, [client])
        if client.id == 1 and reply.kind == "upload":
            reply.arrays["outputs"][4] = float("nan")
        return unpack_rows(send(own.method, reply, said.batch.max_rows, own.opener.public, *where))[1]

    def status(self, key: BatchKey) -> Status:
        return self.shuffler.status(key)

    def release(self, key: BatchKey) -> list[bytes]:
        return self.shuffler.release(key)

    def forget(self, key: BatchKey) -> None:
        self.shuffler.forget(key)

    def cancel(self, key: BatchKey) -> None:
        self.shuffler.cancel(key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(SETTINGS))
    init(tmp_path / "trial", tmp_path / "run.toml", Trial(clients=3, evaluators=0))
    return tmp_path / "trial" / "aggregator"


def test_a_sealed_row_that_is_not_finite_is_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    aggregator = Aggregator(folder, tmp_path / "run", said.append)
    before = aggregator.learner.state["weights"].clone()
    aggregator.shuffler = Here(aggregator)  # type: ignore[assignment]
    (record,) = aggregator.run()
    assert record["rejected"] == {"not finite": 1}
    assert record["dropped_rows"] == 1
    assert record["samples"] == record["evaluated_samples"] - 1 == 17
    assert "round 1: rejected: 1 not finite" in said
    weights = aggregator.learner.state["weights"]
    assert bool(weights.isfinite().all())
    assert not torch.equal(weights, before)


def test_its_tls_key_is_for_its_owner(folder: Path, tmp_path: Path) -> None:
    (folder / "tls-key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match=r"tls-key\.pem holds a secret and others can read it: chmod 600"):
        Aggregator(folder, tmp_path / "run")
