"""Counts of evaluations as secure sums, by any method: of evaluators, and of a shuffled round's clients."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tomli_w
import torch

from ntkfl.crypto.hpke import SealingKey
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import TrustError
from ntkfl.federation.client import SeededRandomness
from ntkfl.services.announcement import EVALUATION, Announcement, Kind
from ntkfl.services.shuffler.batch import EVALUATORS, Batch
from ntkfl.wire import Message
from tests.deployment.roles import METHOD, Roles
from tests.deployment.test_aggregator import SETTINGS
from tests.deployment.test_deployment import rounds
from tests.deployment.test_secure_sum import participant
from tests.own_data import read_client

pytestmark = pytest.mark.timeout(600)


def evaluator(roles: Roles, number: int) -> ShuffledClient:
    folder, draws = roles.folder / "clients" / f"evaluator-{number}", SeededRandomness(7, 90 + number)
    x, y = read_client(roles.data / "test.npz")
    own = slice(number, None, 2)
    return ShuffledClient(folder, x[own], y[own], randomness=draws, patience=30, say=lambda line: None)


def play(roles: Roles, evaluators: int) -> Aggregator:
    """All of a run, with the services as processes and the others as threads."""
    roles.key_server()
    roles.shuffler()
    said: list[str] = []
    members = [participant(roles, number) for number in range(4)] + [evaluator(roles, n) for n in range(evaluators)]
    aggregator = Aggregator(roles.folder / "aggregator", roles.out, said.append)
    for member in members:
        member.hello()
    threads = [threading.Thread(target=run, daemon=True) for run in (aggregator.run, *(m.run for m in members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return aggregator


def test_evaluators_counts_are_one_sum_and_no_report(tmp_path: Path) -> None:
    """Two evaluators with half of the test data each: the whole's accuracy, exactly; single counts go nowhere."""
    with Roles(tmp_path, evaluators=2, seed=7, rounds=1, method=METHOD, sum_counts=True) as roles:
        aggregator = play(roles, 2)
        (record,) = rounds(roles)
        x, y = read_client(roles.data / "test.npz")
        assert record["evaluated_samples"] == len(y)
        one = ShuffledClient(roles.folder / "clients" / "evaluator-0", x, y, say=lambda line: None)
        state = aggregator.server.state
        outputs = one.client.task.predict(state.average.value, one.x)
        correct = int((outputs.argmax(1) == one.y).sum())
        assert record["test_accuracy"] == correct / len(y)
        loss = float(one.client.task.losses(outputs, one.y).double().mean())
        assert record["test_loss"] == pytest.approx(loss, abs=2 / 2**6)  # 2 · 100 · 2^17 · 2^6 < 2^31
        shuffler = aggregator.transport.shuffler
        assert shuffler.reports(BatchKey(1, EVALUATION)) == shuffler.reports(BatchKey(1, EVALUATORS)) == []


# -- The contract ------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluating(tmp_path: Path) -> ShuffledClient:
    settings = SETTINGS | {"clients": 3, "evaluators": 2, "sum_counts": True}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(settings))
    federation = init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3, evaluators=2))
    own = ShuffledClient.__new__(ShuffledClient)
    own.federation, own.ledger, own.name = federation, Ledger(tmp_path, federation.run), "evaluator-0"
    own.role, own.method = "evaluator", federation.terms.build_method()
    return own


def hear(own: ShuffledClient, tmp_path: Path, kind: Kind, key: BatchKey, batch: Batch | None) -> Announcement | None:
    aggregator = Aggregator(tmp_path / "demo" / "aggregator", tmp_path / "run", lambda line: None)
    message = Message("evaluate", 1, {"weights": torch.zeros(3)})
    said = Announcement(kind, key, batch, message, SealingKey.generate().public)
    return own.heed(said.sign(aggregator.transport.signer, own.federation.federation, own.federation.run))


def test_an_evaluator_gives_its_counts_to_a_sum_alone(evaluating: ShuffledClient, tmp_path: Path) -> None:
    names = ("evaluator-0", "evaluator-1")
    with pytest.raises(TrustError, match="counts by themselves"):
        hear(evaluating, tmp_path, "evaluate", BatchKey(1, EVALUATION), None)
    key = BatchKey(1, EVALUATORS)
    with pytest.raises(TrustError, match="without masks"):
        hear(evaluating, tmp_path, "evaluate", key, Batch(key, names, 1, 100, 2, 60.0))
    with pytest.raises(TrustError, match="before others could answer"):
        hear(evaluating, tmp_path, "evaluate", key, Batch(key, names, 1, 100, 2, 0.0, 4))
    assert hear(evaluating, tmp_path, "evaluate", key, Batch(key, names, 1, 100, 2, 60.0, 4)) is not None
