"""Counts of evaluations as secure sums, by any method: of evaluators, and of a shuffled round's clients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from ntkfl.crypto.hpke import SealingKey
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.data.npz import read_client
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Contract, Deployment
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import ConfigError, Refused, TrustError
from ntkfl.federation.client import SeededRandomness
from ntkfl.services.announcement import EVALUATION, Announcement, Kind
from ntkfl.services.shuffler.batch import EVALUATORS, Batch
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.wire import Message
from tests.deployment.roles import METHOD, Roles
from tests.deployment.test_aggregator import SETTINGS
from tests.deployment.test_deployment import rounds
from tests.deployment.test_secure_sum import FEDAVG, participant

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


@pytest.mark.long
def test_a_shuffled_rounds_clients_count_in_one_sum(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"evaluators": 0, "seed": 7, "rounds": 1, "clients_per_round": 4, "sum_counts": True}
    with Roles(tmp_path, **settings) as roles:
        play(roles, 0)
        (record,) = rounds(roles)
        drawn = [round(0.5 * size) for size in roles.fed.sizes]
        assert abs(int(str(record["evaluated_samples"])) - sum(min(n, roles.rows) for n in drawn)) <= len(drawn)
        assert 0 <= float(str(record["test_accuracy"])) <= 1


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


def test_a_client_has_no_part_in_the_evaluators_sum(evaluating: ShuffledClient, tmp_path: Path) -> None:
    evaluating.role, evaluating.name, key = "client", "client-0", BatchKey(1, EVALUATORS)
    said = hear(evaluating, tmp_path, "evaluate", key, Batch(key, ("client-0", "client-1"), 1, 100, 2, 60.0, 4))
    assert said is not None
    assert evaluating.answer(said) is None


def test_the_shuffler_takes_evaluators_alone_into_their_sum() -> None:
    shuffler, key = Shuffler(floor=5, clock=lambda: 0.0), BatchKey(1, EVALUATORS)  # the floor is the clients'
    for name, role in (("e-0", "evaluator"), ("e-1", "evaluator"), ("client-0", "client")):
        shuffler.present(name, role)
    for cohort, numbers in ((("e-0", "client-0"), 4), (("e-0", "e-1"), 0)):
        with pytest.raises(Refused, match="evaluators' counts"):
            shuffler.open(Batch(key, cohort, 1, 100, 2, 0.0, numbers), bytes(32))
    with pytest.raises(Refused, match="fewer than 2 clients"):
        shuffler.open(Batch(key, ("e-0", "e-1"), 1, 100, 1, 0.0, 4), bytes(32))
    shuffler.open(Batch(key, ("e-0", "e-1"), 1, 100, 2, 0.0, 4), bytes(32))
    assert shuffler.status(key).state == "open"


def test_sums_of_counts_are_the_default_where_they_hide(tmp_path: Path) -> None:
    values: dict[str, Any] = {"inputs": [4], "outputs": 2, "clients_per_round": 3, "clients": 3, "method": FEDAVG}
    path = tmp_path / "run.toml"
    for evaluators, expected in ((0, False), (1, False), (2, True)):
        path.write_text(tomli_w.dumps(values | {"evaluators": evaluators}))
        assert Deployment.read(path).sum_counts is expected
        assert Contract.of(values | {"evaluators": evaluators}).sum_counts is expected
    assert not Contract.of(values | {"evaluators": 2, "sum_counts": False}).sum_counts
    assert not Contract.of(values | {"evaluators": 2, "method": {"name": "fedavg"}}).sum_counts


def test_folders_from_before_sums_of_counts_are_taken_as_they_were(tmp_path: Path) -> None:
    method = {"name": "fedavg", "secure_sum": True}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(SETTINGS | {"evaluators": 2, "method": method}))
    init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3, evaluators=2))
    path = tmp_path / "demo" / "aggregator" / "federation.toml"
    assert "sum_counts = true" in path.read_text()
    path.write_text(path.read_text().replace("sum_counts = true\n", ""))
    assert not Aggregator(path.parent, tmp_path / "run").settings.sum_counts


def test_one_evaluator_is_no_sum(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(SETTINGS | {"evaluators": 1, "sum_counts": True}))
    with pytest.raises(ConfigError, match="a sum of counts needs 2 evaluators"):
        init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3, evaluators=1))
    init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3, evaluators=2))
    with pytest.raises(ConfigError, match="a sum of counts needs 2 evaluators"):
        Aggregator(tmp_path / "demo" / "aggregator", tmp_path / "run")
