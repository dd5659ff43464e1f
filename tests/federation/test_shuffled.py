"""Shuffled rounds: who sends bad rows loses them, and nobody's number of rows tells who it is."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

import ntkfl
from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import Announced, BatchKey, seal_rows, unpack_rows
from ntkfl.errors import TooFew
from ntkfl.federation.client import Answer, honest
from ntkfl.federation.shuffled import RowSchema, open_rows, seal_reply
from ntkfl.federation.transport import Traffic
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import METHODS, NTKFL, ClientRound, Method, Privacy, Task
from ntkfl.methods.replies import Reply
from ntkfl.services.store import BatchStore
from ntkfl.wire import Message
from tests.federation.rounds import CODECS, changed, lying, play_round, server_of, small_client, small_task

SAID = Announced.of(BatchKey(1, 0), b"announced")
WHERE = ("federation", "run", SAID)


class Received(NamedTuple):
    """What the server has of an exchange's sealed rows once it has opened and validated them."""

    replies: list[Reply]
    rows: int
    rejected: Counter[str]
    repeated: int


def receive(task: Task, sealed: Sequence[bytes], schema: RowSchema, opener: SealingKey) -> Received:
    traffic = Traffic()
    replies = filter_replies(schema.reply, task, open_rows(sealed, schema, opener, *WHERE, traffic), traffic)
    return Received(replies, sum(map(len, replies)), traffic.rejected, traffic.repeated)


def make(n: int = 6, options: Any = None, privacy: Any = None) -> tuple[Task, Reply]:
    """A client's reply to the first weights, of n rows."""
    method = NTKFL(**(options or {}))
    task = small_task(method, Privacy(shuffle=True, **(privacy or {})))
    return task, method.answer(task, Message("weights", 1, {"weights": task.like}), small_client(0, n))


def encoded(rows: Sequence[Reply]) -> list[bytes]:
    return [row.message(1).encode() for row in rows]


@pytest.mark.parametrize(("options", "privacy"), CODECS)
def test_bad_rows_are_dropped_and_counted(options: Any, privacy: Any) -> None:
    """Every way a client can corrupt its own row costs that row, and no other."""
    task, reply = make(8, options, privacy)
    opener, good = SealingKey.generate(), [row.message(1) for row in reply.split()]
    first = good[0]
    bad = [
        changed(first, outputs=torch.full((1, 3), float("nan"))),
        changed(first, outputs=torch.full((1, 3), float("inf"))),
        changed(first, outputs=torch.zeros(1, 4)),
        changed(first, labels=torch.tensor([3], dtype=torch.uint8)),
        changed(first, jacobian=torch.tensor([3, 40])),
        dataclasses.replace(first, round=2),
        dataclasses.replace(first, kind="sums"),
        dataclasses.replace(first, arrays={"outputs": first.arrays["outputs"]}),
    ]
    for name in first.arrays:
        if name.endswith((".values", ".a", ".g")) and first.arrays[name].is_floating_point():
            bad.append(changed(first, **{name: torch.full_like(first.arrays[name], float("nan"))}))
        if name.endswith(".spans"):
            bad.append(changed(first, **{name: first.arrays[name].flip(0)}))
        if name.endswith(".positions"):
            bad.append(changed(first, **{name: torch.full_like(first.arrays[name], 255)}))
    sealed = seal_rows([row.encode() for row in (*bad[:3], *good, *bad[3:])], opener.public, *WHERE)
    sealed += [bytes(len(sealed[0])), sealed[0][:-1], b""]
    other_round = seal_rows([first.encode()], opener.public, *WHERE[:2], Announced(BatchKey(2, 0), SAID.digest))
    other_round += seal_rows([first.encode()], opener.public, *WHERE[:2], Announced.of(SAID.key, b"other weights"))
    other_reader = seal_rows([first.encode()], SealingKey.generate().public, *WHERE)
    received = receive(task, [*sealed, *other_round, *other_reader], RowSchema.of(reply, 1), opener)
    assert received.rows == 8
    assert received.rejected.total() == len(bad) + 6
    (joined,) = received.replies
    assert encoded(joined.split()) == sorted(row.encode() for row in good)


def test_what_a_client_sends() -> None:
    task, reply = make()
    opener, schema = SealingKey.generate(), RowSchema.of(reply, 1)
    said, rows = unpack_rows(seal_reply(reply, 1, 9, opener.public, *WHERE))
    assert said == SAID
    assert len(rows) == 9  # three of them padding
    assert {len(row) for row in rows} == {schema.sealed_bytes}
    assert len(rows[0]) == len(encoded(reply.split())[0]) + SEAL_BYTES
    received = receive(task, rows, schema, opener)
    assert (received.rows, received.rejected.total()) == (6, 0)


@pytest.mark.parametrize(("options", "privacy"), CODECS)
@pytest.mark.parametrize("factor", [1e4, 1e12, 1e30])
def test_extreme_rows_are_dropped_before_they_drown_the_rest(options: Any, privacy: Any, factor: float) -> None:
    task, reply = make(12, options, privacy)
    opener, rows = SealingKey.generate(), [row.message(1) for row in reply.split()]
    scaled = [
        changed(rows[0], **{name: rows[0].arrays[name] * factor})
        for name in rows[0].arrays
        if rows[0].arrays[name].is_floating_point() and float(rows[0].arrays[name].abs().max()) > 0
    ]
    sealed = seal_rows([row.encode() for row in (*rows, *scaled)], opener.public, *WHERE)
    received = receive(task, sealed, RowSchema.of(reply, 1), opener)
    assert received.rows == 12
    assert received.rejected.total() == len(scaled) > 0


def scaled_labels(clients: int, ids: set[int]) -> tuple[Task, Method, list[ClientRound], Answer]:
    """Labels ten times what they are have another type than labels: such rows have another length."""
    method = METHODS["cp-ntk-fl"](steps=(50,))  # one candidate: whose losses count for it changes nothing
    task = small_task(method, Privacy(projected_dim=5))
    people = [small_client(i, 4 + i) for i in range(clients)]
    return task, method, people, lying(ids, lambda name, array: 10.0 * array if name == "labels" else array)


@pytest.mark.parametrize("ids", [{0}, {3}, {0, 1}])
def test_whose_rows_the_shuffler_refuses_is_as_if_absent(ids: set[int]) -> None:
    """Also where corrupted rows are as common as true ones, and come first."""
    task, method, people, respond = scaled_labels(4, ids)
    start = method.start(task, task.like)
    outcome, traffic = play_round(task, method, start, 1, people, respond=respond)
    assert traffic.rejected == {"malformed": sum(len(people[i]) for i in ids)}
    alone, none = play_round(task, method, start, 1, [person for person in people if person.id not in ids])
    assert torch.equal(outcome.state["weights"], alone.state["weights"])
    assert not none.rejected
    assert not torch.equal(outcome.state["weights"], start["weights"])


def test_one_honest_client_is_no_crowd() -> None:
    task, method, people, respond = scaled_labels(3, {0, 2})
    with pytest.raises(TooFew, match=r"could take rows of 1 of \d clients; 10 rows were malformed \("):
        play_round(task, method, method.start(task, task.like), 1, people, respond=respond)


def test_copies_are_dropped_and_rows_sealed_twice_are_counted() -> None:
    """A client that seals one row a hundred times gives one sample a hundred samples' weight: nothing tells it from
    honest records that repeat. A seal that comes twice is copied in any case.
    """
    task, reply = make()
    opener, rows = SealingKey.generate(), encoded(reply.split())
    sealed = seal_rows([*rows, *[rows[0]] * 99], opener.public, *WHERE)
    received = receive(task, [*sealed, *sealed[:4]], RowSchema.of(reply, 1), opener)
    assert received.rejected == {"copied": 4}
    assert (received.rows, received.repeated) == (105, 99)
    (joined,) = received.replies
    assert encoded(joined.split()) == sorted([*rows, *[rows[0]] * 99])


def test_samples_that_a_dead_network_cannot_tell_apart_all_count() -> None:
    """Honest rows may be equal: where no hidden unit is on, a sparsified row holds the label and nothing of the input.
    Dropping them would take most of a small network's samples.
    """
    method = NTKFL(steps=(5.0,))
    task = small_task(method, Privacy(shuffle=True, sparsity=0.5))
    dead = torch.cat([torch.full((24,), -1.0), task.like[24:]]).double()
    people = [small_client(i, 6) for i in range(2)]
    people = [dataclasses.replace(one, x=one.x.abs(), y=torch.zeros(6).long()) for one in people]
    transport, traffic = server_of(task, method, people).transport, Traffic()
    transport.begin(1, [0, 1])
    (message,) = transport.exchange(Message("weights", 1, {"weights": dead}), [0, 1], traffic)
    assert (len(message.arrays["labels"]), traffic.rejected.total(), traffic.repeated) == (12, 0, 11)


def test_no_array_is_made_of_a_row_that_does_not_look_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the right size, filled with empty arrays, took 290 times as long to decode as honest ones."""
    task, reply = make()
    opener, schema, good = SealingKey.generate(), RowSchema.of(reply, 1), encoded(reply.split())
    empty = {f"{i:02x}": torch.zeros(0, dtype=torch.uint8) for i in range(20)}
    rest = len(good[0]) - len(Message("rows", 1, empty | {"rest": empty["00"]}).encode())
    hollow = Message("rows", 1, empty | {"rest": torch.zeros(rest, dtype=torch.uint8)}).encode()
    assert len(hollow) == len(good[0])
    made, real = [], Message.decode

    def decode(plain: bytes) -> Message:
        made.append(plain)
        return real(plain)

    monkeypatch.setattr(Message, "decode", decode)
    received = receive(task, seal_rows([*good, *[hollow] * 20], opener.public, *WHERE), schema, opener)
    assert received.rows == len(made) == 6
    assert received.rejected == {"malformed": 20}


def test_every_client_sends_equally_many_rows_whatever_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples as many as the largest has, of losses one; so no number of rows tells clients apart."""
    task, method, people, _ = scaled_labels(4, set())
    sent: list[int] = []
    submit = BatchStore.submit

    def listening(self: BatchStore, client: str, announced: Announced, rows: Any, seed: None) -> None:
        sent.append(len(rows))
        submit(self, client, announced, rows)

    monkeypatch.setattr(BatchStore, "submit", listening)
    outcome, traffic = play_round(task, method, method.start(task, task.like), 1, people)
    assert [len(person) for person in people] == [4, 5, 6, 7]
    assert sent == [7] * 4 + [1] * 4
    assert outcome.diagnostics["samples"] == 4 + 5 + 6 + 7  # padding is no sample
    assert not traffic.rejected


def test_who_sends_more_rows_than_all_others_loses_them() -> None:
    """The flood of a thousand rows: the shuffler takes none of it, and nobody else's rows are touched."""
    task, method, people, _ = scaled_labels(4, set())

    def flood(own: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        rows = torch.arange(1000 if client.id == 0 else len(client)) % len(client)
        return honest(own, task, question, dataclasses.replace(client, x=client.x[rows], y=client.y[rows]))

    outcome, traffic = play_round(task, method, method.start(task, task.like), 1, people, respond=flood)
    assert traffic.rejected == {"malformed": 1000}
    assert outcome.diagnostics["samples"] == 5 + 6 + 7


def test_paper_settings_end_alike_with_and_without_a_shuffler() -> None:
    """Projected, subsampled: to 1e-10 where, as in closed form, no step control depends on the rows' order."""
    digits = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)
    method = NTKFL(loss="mse", kernel="trace", scheme="paper", steps=(5, 20), lr=0.01)
    ends = []
    for shuffle in (False, True):
        torch.manual_seed(0)
        privacy = Privacy(subsample_rate=0.5, projected_dim=20, sparsity=0.9, shuffle=shuffle)
        model = ntkfl.models.mlp(20, 16, 10).double()
        run = ntkfl.train(model, digits, method, rounds=2, clients_per_round=4, callbacks=[], privacy=privacy)
        ends.append(torch.nn.utils.parameters_to_vector(run.model.parameters()).detach())
    assert (ends[0] - ends[1]).abs().max() < 1e-10
