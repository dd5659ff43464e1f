"""Aggregators that cheat, with real clients, a real key server and a real shuffler: whose rows they can tell apart.

Such an aggregator has the true one's keys and certificate. Questions reach clients through the shuffler, or straight
through Flower's grid, which it controls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.errors import NTKFLError, Refused
from ntkfl.federation.evaluation import question
from ntkfl.federation.transport import Traffic
from ntkfl.flower.apps import client_app
from ntkfl.flower.shuffled import FlowerShufflerTransport
from ntkfl.services.announcement import EVALUATION, Announcement
from ntkfl.wire import Message
from ntkfl.wire.span import pack_span
from tests.deployment.roles import Roles
from tests.flower.local_grid import LocalGrid
from tests.own_data import read_client

COUNT = 4
NODES = {f"client-{i}": 1000 + i for i in range(COUNT)}
COHORT = tuple(NODES)[:3]
SETTINGS: dict[str, Any] = {"clients_per_round": 3, "rounds": 20, "round_seconds": 1.0, "patience": 1.0, "seed": 7}


class Cheat(FlowerShufflerTransport):
    """Asks whatever it likes of whomever it likes."""

    def weights(self) -> Message:
        """The question of a round's first exchange."""
        message = next(self.method.round(self.task, self.method.start(self.task, self.task.like), 1, range(3)))
        assert isinstance(message, Message)
        return message

    def ask(self, key: BatchKey, cohort: tuple[str, ...] = COHORT, message: Message | None = None) -> Announcement:
        message = self.weights() if message is None else message
        self._names = list(cohort)
        batch = self.batch(key, range(len(cohort)), self.schema(message))
        return Announcement("exchange", key, batch, message, self.opener.public)

    def signed(self, said: Announcement) -> bytes:
        return said.sign(self.signer, self.federation, self.run)

    def carried(self, each: dict[str, bytes]) -> set[str]:
        """Each client its own announcement, past the shuffler; names of those that handed in a receipt."""
        return set(self.carry(each, Traffic()))

    def published(self, said: Announcement) -> bool:
        """Whether the shuffler takes it."""
        try:
            self.shuffler.publish(self.signed(said))
        except Refused:
            return False
        return True


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Roles, list[ShuffledClient]]]:
    with Roles(tmp_path_factory.mktemp("attacks"), clients=COUNT, evaluators=1, **SETTINGS) as roles:
        roles.key_server()
        roles.shuffler()
        yield roles, [participant(roles, f"client-{i}") for i in range(COUNT)]


def participant(roles: Roles, name: str, data: str = "") -> ShuffledClient:
    own = ShuffledClient(
        roles.folder / "clients" / name, *read_client(roles.data / f"{data or name}.npz"), say=lambda line: None
    )
    own.hello()
    return own


@pytest.fixture
def cheat(world: tuple[Roles, list[ShuffledClient]], tmp_path: Path) -> Cheat:
    roles, clients = world
    grid = LocalGrid({NODES[client.name]: client_app(client) for client in clients})
    reach = partial(Cheat, grid, NODES)
    transport = Aggregator(roles.folder / "aggregator", tmp_path / "run", lambda line: None, reach=reach).transport
    assert isinstance(transport, Cheat)
    return transport


def next_round(cheat: Cheat) -> int:
    newest = cheat.shuffler.newest()
    return 1 if newest is None else newest.round + 1


def tagged(said: Announcement, value: float) -> Announcement:
    """The same question about other weights: rows of whoever answers it can be told from all others."""
    assert said.message is not None
    weights = said.message.arrays["weights"] + value
    return replace(said, message=replace(said.message, arrays={"weights": weights}))


def test_different_weights_for_each_client_release_no_row(cheat: Cheat) -> None:
    """One announcement lies at the shuffler, and each client is given another one through Flower."""
    honest = cheat.ask(BatchKey(next_round(cheat), 0))
    assert cheat.published(honest)
    receipts = cheat.carried({name: cheat.signed(tagged(honest, 1.0 + i)) for i, name in enumerate(COHORT)})
    assert receipts == set()
    assert cheat.shuffler.status(honest.key).clients == 0
    # Nor does the shuffler relay a second one, whether or not clients have answered the first.
    assert not cheat.published(tagged(honest, 1.0))


def test_a_client_that_was_asked_otherwise_is_not_among_the_released(cheat: Cheat) -> None:
    """Two are asked alike, the third about weights of its own: rows of two are released, and none of them is its."""
    honest = cheat.ask(BatchKey(next_round(cheat), 0))
    assert cheat.published(honest)
    each = dict.fromkeys(COHORT[:2], cheat.signed(honest)) | {COHORT[2]: cheat.signed(tagged(honest, 1.0))}
    assert cheat.carried(each) == set(COHORT[:2])
    assert cheat.shuffler.status(honest.key).clients == 2


def test_an_evaluator_answers_no_second_question(cheat: Cheat, world: tuple[Roles, list[ShuffledClient]]) -> None:
    """Counts of two models on the same data say more than counts of one: there is one question per round."""
    evaluator = participant(world[0], "evaluator-0", "test")
    at = BatchKey(next_round(cheat), EVALUATION)
    asked = Announcement("evaluate", at, None, question(1, cheat.task.like), cheat.opener.public)
    assert cheat.published(asked)
    other = evaluator.heed(cheat.signed(tagged(asked, 1.0)))  # on another way than through the shuffler
    assert other is not None
    with pytest.raises(Refused, match="announced with other contents"):
        evaluator.answer(other)
    assert evaluator.heed(cheat.signed(asked)) is None  # and that was its answer of this round
    assert cheat.shuffler.reports(at) == []


def test_a_second_exchange_with_one_client_fewer_is_not_opened(cheat: Cheat) -> None:
    """Rows of the first exchange that match none of the second would be those of the client left out."""
    first = cheat.ask(BatchKey(number := next_round(cheat), 0))
    assert cheat.published(first)
    assert cheat.carried(dict.fromkeys(COHORT, cheat.signed(first))) == set(COHORT)
    assert cheat.shuffler.status(first.key).state == "ready"
    cheat.shuffler.release(announced(cheat, first))
    for cohort in (COHORT[:2], (*COHORT[:2], "client-3")):
        second = cheat.ask(BatchKey(number, 1), cohort, candidates(cheat))
        assert not cheat.published(second)
        assert cheat.carried(dict.fromkeys(COHORT[:2], cheat.signed(second))) == set()  # clients see it themselves


def test_a_second_exchange_that_one_client_never_hears_of_is_not_released(cheat: Cheat) -> None:
    first = cheat.ask(BatchKey(number := next_round(cheat), 0))
    assert cheat.published(first)
    assert cheat.carried(dict.fromkeys(COHORT, cheat.signed(first))) == set(COHORT)
    cheat.shuffler.release(announced(cheat, first))
    second = cheat.ask(BatchKey(number, 1), message=candidates(cheat))
    assert cheat.published(second)
    assert cheat.carried(dict.fromkeys(COHORT[:2], cheat.signed(second))) == set(COHORT[:2])
    while cheat.shuffler.status(second.key).seconds:  # until its deadline, which lasts a second
        time.sleep(0.05)
    with pytest.raises(Refused, match="2 clients have sent rows"):
        cheat.shuffler.release(announced(cheat, second))


def test_no_more_rounds_are_answered_than_were_agreed(cheat: Cheat, world: tuple[Roles, list[ShuffledClient]]) -> None:
    """Whatever a shuffler lets through, and after a restart too."""
    most = cheat.settings.most_rounds
    for key in (BatchKey(most + 1, 0), BatchKey(most + 40, 0)):
        signed = cheat.signed(cheat.ask(key))
        restarted = participant(world[0], COHORT[0])
        for client in (*world[1], restarted):
            with pytest.raises(NTKFLError, match="none of the 30 that the contract allows"):
                client.heed(signed)


def candidates(cheat: Cheat) -> Message:
    """The question of a second exchange: losses at some weights."""
    return Message("candidates", 1, pack_span(torch.stack([cheat.task.like] * 3)))


def announced(cheat: Cheat, said: Announcement) -> Announced:
    return Announced.of(said.key, cheat.signed(said))
