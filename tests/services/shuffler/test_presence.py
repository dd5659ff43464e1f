"""Clients that do not answer: when they are no longer waited for, and that nothing else changes by that."""

from __future__ import annotations

from pathlib import Path

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.services.shuffler.store import Shuffler
from tests.deployment.federation import Deployment
from tests.services.shuffler.batches import DIGEST, NAMES, Clock, batch, rows_of, said, submit_all

THREE = NAMES[:3]


def missed(shuffler: Shuffler, clock: Clock, round: int) -> None:
    """A round whose deadline passes without the answer of the last client."""
    key = BatchKey(round, 0)
    shuffler.open(batch(key, seconds=10.0), DIGEST)
    submit_all(shuffler, key, THREE)
    clock.now += 11
    assert shuffler.release(key)


def test_the_third_round_does_not_wait_for_a_client_that_missed_two() -> None:
    clock = Clock()
    shuffler = Shuffler(clock=clock)
    missed(shuffler, clock, 1)
    shuffler.open(batch(BatchKey(2, 0), seconds=10.0), DIGEST)
    submit_all(shuffler, BatchKey(2, 0), THREE)
    assert shuffler.status(BatchKey(2, 0)).state == "open"  # one draw may be missed
    clock.now += 11
    shuffler.release(BatchKey(2, 0))
    key = BatchKey(3, 0)
    shuffler.open(batch(key, seconds=10.0), DIGEST)
    submit_all(shuffler, key, THREE[:2])
    assert shuffler.status(key).state == "open"  # the others are waited for as ever
    submit_all(shuffler, key, THREE[2:])
    status = shuffler.status(key)
    assert (status.state, status.clients, status.seconds) == ("ready", 3, 10.0)
    shuffler.presence.called(NAMES[3])
    assert shuffler.status(key).state == "open"  # it is there again, and its answer may come
    shuffler.submit(NAMES[3], said(key), rows_of(NAMES[3]))
    assert len(shuffler.release(key)) == 8


def test_the_floor_and_later_exchanges_are_as_they_were() -> None:
    clock = Clock()
    shuffler = Shuffler(clock=clock)
    missed(shuffler, clock, 1)
    missed(shuffler, clock, 2)
    key = BatchKey(3, 0)
    shuffler.open(batch(key, min_clients=4, seconds=10.0), DIGEST)
    submit_all(shuffler, key, THREE)
    assert shuffler.status(key).state == "open"  # three are no four, lapsed or not
    clock.now += 11
    assert shuffler.status(key).state == "open"
    shuffler.cancel(key)
    first, second = BatchKey(4, 0), BatchKey(4, 1)
    shuffler.open(batch(first, seconds=10.0), DIGEST)
    submit_all(shuffler, first, NAMES)
    shuffler.release(first)
    for _ in range(2):  # made to look lapsed in the middle of a round
        shuffler.presence.missed(first.number + 1, [NAMES[0]])
        shuffler.presence.missed(first.number + 2, [NAMES[0]])
    assert NAMES[0] in shuffler.presence.lapsed()
    shuffler.open(batch(second, seconds=10.0), DIGEST)
    submit_all(shuffler, second, NAMES[1:])
    assert shuffler.status(second).state == "open"  # released with exactly the clients of the first, or not at all


def test_every_signed_request_is_a_call(tmp_path: Path) -> None:
    """Over HTTP: who has lapsed has not any more after one question, and a stranger's does not count. Names are told
    where the contract's two of a round are a choice, whatever cohorts the aggregator announces.
    """
    deployment = Deployment(tmp_path)
    with deployment.start():
        clients, aggregator = {name: deployment.client(name) for name in ("ada", "bob", "cyd")}, deployment.aggregator()
        for name in ("ada", "bob"):
            clients[name].ask("POST", "/hello")
        for cohort in (("ada", "bob"), ("ada", "bob"), ("ada", "dan")):
            asked = deployment.batch(*cohort)
            assert aggregator.publish(asked).status_code == 200
            assert clients["ada"].submit(asked.key).status_code == 200
            assert aggregator.on(asked.key, "POST", "/cancel").status_code == 200
        there = {"clients": ["ada", "bob"], "away": 1, "lapsed": []}
        assert aggregator.ask("GET", "/clients").json() == there  # all are asked: no name is told
        clients["cyd"].ask("POST", "/hello")
        there = {"clients": ["ada", "bob", "cyd"], "away": 1, "lapsed": ["bob"]}
        assert aggregator.ask("GET", "/clients").json() == there
        assert aggregator.ask("GET", "/clients?role=evaluator").json() == {"clients": [], "away": 0, "lapsed": []}
        assert clients["bob"].ask("GET", "/announcement?after=0", headers={}).status_code == 401
        assert aggregator.ask("GET", "/clients").json() == there
        assert clients["bob"].ask("GET", "/announcement?after=0").status_code == 200
        assert aggregator.ask("GET", "/clients").json() == there | {"away": 0, "lapsed": []}
        deployment.hang_up()
