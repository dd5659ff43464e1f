"""Shuffled rounds: the same training, whoever sends bad rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import Announced, BatchKey, seal_rows, unpack_rows
from ntkfl.errors import TooFew
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.config import Byzantine
from ntkfl.federation.shuffled import RowSchema, seal_reply
from ntkfl.federation.transport import Traffic
from ntkfl.methods import METHODS, NTKFL, ClientRound, Method, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.shuffler.store import BatchStore
from ntkfl.wire import Message
from tests.federation.rounds import play_round, receive, server_of

SAID = Announced.of(BatchKey(1, 0), b"announced")
DESCENT: dict[str, Any] = {"scheme": "descent", "steps": (5, 20), "lr": 0.01}
WHERE = ("federation", "run", SAID)


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)


def trained(digits: ntkfl.data.Federated, method: Method, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    model = ntkfl.models.mlp(method.projected_dim or 64, 16, 10).double()
    return ntkfl.train(model, digits, method, rounds=2, clients_per_round=4, **options)


def weights(run: ntkfl.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ntk-fl", DESCENT),
        ("ntk-fl", DESCENT | {"kernel": "trace"}),
        ("ntk-fl", DESCENT | {"sparsity": 0.9}),
        ("ntk-fl", DESCENT | {"subsample_rate": 0.5, "projected_dim": 20}),
        ("ntk-fl", {}),
        ("fedavg", {"local_steps": 3}),
        ("fedavg", {"local_steps": 3, "projected_dim": 20}),
        ("scaffold", {"local_steps": 3}),
        ("fedcom", {"local_steps": 3}),
        ("sum-ntk-fl", {}),
        ("centralized", {"local_steps": 3}),
    ],
)
def test_shuffling_changes_nothing_but_who_is_seen(
    name: str, options: dict[str, Any], digits: ntkfl.data.Federated
) -> None:
    plain = trained(digits, METHODS[name](**options))
    mixed = trained(digits, METHODS[name](**options, shuffle=True))
    # The flow's step control begins from a fixed vector, which rows in another order meet elsewhere.
    within = 1e-5 if (name, options) == ("ntk-fl", {}) else 1e-10
    assert (weights(plain) - weights(mixed)).abs().max() < within
    assert mixed.history[-1]["dropped_rows"] == 0
    assert mixed.history[-1]["uplink_bytes"] > plain.history[-1]["uplink_bytes"]  # seals and frames are counted
    again = trained(digits, METHODS[name](**options, shuffle=True))
    assert torch.equal(weights(again), weights(mixed))  # whatever order the shuffler gave


def make(n: int = 6, **options: Any) -> tuple[NTKFL, Task, Message]:
    torch.manual_seed(0)
    method = NTKFL(shuffle=True, **options)
    task = Task(ntkfl.models.mlp(5, 4, 3), 3, "ce")
    client = ClientRound(0, torch.randn(n, 5), torch.arange(n) % 3, Randomness.simulated(0))
    reply = method.answer(task, Message("weights", 1, {"weights": task.like}), [client])[0]
    return method, task, reply


def test_a_row_is_a_sample() -> None:
    method, _, reply = make()
    rows = method.split(reply)
    assert len(rows) == 6
    assert len({len(row.encode()) for row in rows}) == 1
    (joined,) = method.join(rows)
    assert joined.encode() == reply.encode()
    for name, array in rows[2].arrays.items():
        if name not in ("jacobian",) and not name.endswith("spans"):
            assert torch.equal(array, reply.arrays[name][2:3])


def changed(row: Message, **arrays: torch.Tensor) -> Message:
    return dataclasses.replace(row, arrays={**row.arrays, **arrays})


@pytest.mark.parametrize("options", [{}, {"sparsity": 0.5}, {"sparsity": 0.5, "values": "8bit"}, {"codec": "dense"}])
def test_bad_rows_are_dropped_and_counted(options: dict[str, Any]) -> None:
    """Every way a client can corrupt its own row costs that row, and no other."""
    method, task, reply = make(8, **options)
    opener = SealingKey.generate()
    good = method.split(reply)
    template = RowSchema.of(method, reply)
    first = good[0]
    bad = [
        changed(first, outputs=torch.full((1, 3), float("nan"))),
        changed(first, outputs=torch.full((1, 3), float("inf"))),
        changed(first, outputs=torch.zeros(1, 4)),
        changed(first, labels=torch.tensor([3], dtype=torch.uint8)),
        changed(first, jacobian=torch.tensor([3, 40])),
        dataclasses.replace(first, round=2),
        dataclasses.replace(first, kind="losses"),
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
    received = receive(method, task, [*sealed, *other_round, *other_reader], template, opener, *WHERE)
    assert received.rows == 8
    assert received.dropped == len(bad) + 6
    (joined,) = received.replies
    expected = sorted(row.encode() for row in good)
    assert [row.encode() for row in method.split(joined)] == expected


def test_what_a_client_sends() -> None:
    method, task, reply = make()
    opener = SealingKey.generate()
    body = seal_reply(method, reply, 9, opener.public, *WHERE)
    said, rows = unpack_rows(body)
    assert said == SAID
    assert len(rows) == 9  # three of them padding
    assert {len(row) for row in rows} == {RowSchema.of(method, reply).sealed_bytes}
    assert len(rows[0]) == len(method.split(reply)[0].encode()) + SEAL_BYTES
    received = receive(method, task, rows, RowSchema.of(method, reply), opener, *WHERE)
    assert (received.rows, received.dropped) == (6, 0)


@pytest.mark.parametrize("options", [{}, {"sparsity": 0.5, "values": "8bit"}, {"codec": "dense"}])
@pytest.mark.parametrize("factor", [1e4, 1e12, 1e30])
def test_extreme_rows_are_dropped_before_they_drown_the_rest(options: dict[str, Any], factor: float) -> None:
    method, task, reply = make(12, **options)
    opener, rows = SealingKey.generate(), method.split(reply)
    scaled = [
        changed(rows[0], **{name: rows[0].arrays[name] * factor})
        for name in rows[0].arrays
        if rows[0].arrays[name].is_floating_point() and float(rows[0].arrays[name].abs().max()) > 0
    ]
    sealed = seal_rows([row.encode() for row in (*rows, *scaled)], opener.public, *WHERE)
    received = receive(method, task, sealed, RowSchema.of(method, reply), opener, *WHERE)
    assert received.rows == 12
    assert received.dropped == len(scaled) > 0


def test_a_row_that_comes_twice_counts_once() -> None:
    method, task, reply = make()
    opener = SealingKey.generate()
    _, rows = unpack_rows(seal_reply(method, reply, 6, opener.public, *WHERE))
    received = receive(method, task, [*rows, *rows], RowSchema.of(method, reply), opener, *WHERE)
    assert (received.rows, received.dropped) == (6, 6)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fedavg", {"samples": torch.tensor(0, dtype=torch.int32)}),
        ("fednova", {"steps": torch.tensor(0, dtype=torch.int32)}),
        ("qsgd", {"norms": torch.tensor([-1.0])}),
    ],
)
def test_updates_that_a_round_could_not_use_are_dropped(name: str, bad: dict[str, torch.Tensor]) -> None:
    method, task = METHODS[name](shuffle=True, local_steps=1), Task(ntkfl.models.mlp(5, 4, 3), 3, "ce")
    clients = [ClientRound(i, torch.randn(6, 5), torch.arange(6) % 3, Randomness.simulated(i)) for i in range(3)]
    replies = method.answer(task, Message("weights", 1, {"weights": task.like}), clients)
    opener = SealingKey.generate()
    rows = [*replies[1:], changed(replies[0], **bad)]
    sealed = seal_rows([row.encode() for row in rows], opener.public, *WHERE)
    received = receive(method, task, sealed, RowSchema.of(method, replies[0]), opener, *WHERE)
    assert (received.rows, received.dropped) == (2, 1)


def scaled_labels(clients: int, ids: set[int]) -> tuple[Task, Method, list[ClientRound], ByzantineClients]:
    """Labels ten times what they are have another type than labels: such rows have another length."""
    torch.manual_seed(0)
    method = METHODS["cp-ntk-fl"](steps=(50,))  # one candidate: whose losses count for it changes nothing
    task = Task(ntkfl.models.mlp(5, 4, 3).double(), 3, "ce")
    people = [
        ClientRound(i, torch.randn(4 + i, 5).double(), torch.arange(4 + i) % 3, Randomness.simulated(i))
        for i in range(clients)
    ]
    return task, method, people, ByzantineClients(Byzantine(kind="scaled-labels", scale=10.0), frozenset(ids))


@pytest.mark.parametrize("ids", [{0}, {3}, {0, 1}])
def test_whose_rows_the_shuffler_refuses_is_as_if_absent(ids: set[int]) -> None:
    """Also where corrupted rows are as common as true ones, and come first."""
    task, method, people, byzantine = scaled_labels(4, ids)
    start = method.start(task, task.like)
    outcome, traffic = play_round(task, method, start, 1, people, respond=byzantine.answer)
    assert traffic.rejected == {"malformed": sum(len(people[i]) for i in ids)}
    honest = [person for person in people if person.id not in ids]
    alone, none = play_round(task, method, start, 1, honest)
    assert torch.equal(outcome.state["weights"], alone.state["weights"])
    assert not none.rejected
    assert not torch.equal(outcome.state["weights"], start["weights"])


def test_one_honest_client_is_no_crowd() -> None:
    task, method, people, byzantine = scaled_labels(3, {0, 2})
    with pytest.raises(TooFew, match=r"1 clients' rows were taken, too few .* 10 rows were malformed"):
        play_round(task, method, method.start(task, task.like), 1, people, respond=byzantine.answer)


def test_rows_sealed_twice_are_counted() -> None:
    """A client that seals one row a hundred times gives one sample a hundred samples' weight."""
    method, task, reply = make()
    opener, rows = SealingKey.generate(), [row.encode() for row in method.split(reply)]
    sealed = seal_rows([*rows, *[rows[0]] * 99], opener.public, *WHERE)
    received = receive(method, task, [*sealed, sealed[0]], RowSchema.of(method, reply), opener, *WHERE)
    kept = sorted([*rows, *[rows[0]] * 99])
    assert received.rejected == {"copied": 1}  # a seal that comes twice is copied in any case
    assert (received.rows, received.repeated) == (len(kept), 99)
    (joined,) = received.replies
    assert [row.encode() for row in method.split(joined)] == kept


def test_samples_that_a_dead_network_cannot_tell_apart_all_count() -> None:
    """Honest rows may be equal: where no hidden unit is on, a sparsified row holds the label and nothing of the input.
    Dropping them would take most of a small network's samples.
    """
    task = Task(ntkfl.models.mlp(5, 4, 3), 3, "ce")
    with torch.no_grad():
        dead = torch.cat([torch.full((24,), -1.0), task.like[24:]])
    people = [ClientRound(i, torch.rand(6, 5), torch.zeros(6).long(), Randomness.simulated(i)) for i in range(2)]
    method = NTKFL(shuffle=True, sparsity=0.5, steps=(5.0,))
    transport, traffic = server_of(task, method, people).transport, Traffic()
    transport.begin(1, [0, 1])
    (reply,) = transport.exchange(Message("weights", 1, {"weights": dead}), [0, 1], traffic)
    assert (len(method.split(reply)), traffic.dropped, traffic.repeated) == (12, 0, 11)


def test_no_array_is_made_of_a_row_that_does_not_look_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the right size, filled with empty arrays, took 290 times as long to decode as honest ones."""
    method, task, reply = make()
    opener, template = SealingKey.generate(), RowSchema.of(method, reply)
    good = [row.encode() for row in method.split(reply)]
    empty = {f"{i:02x}": torch.zeros(0, dtype=torch.uint8) for i in range(20)}
    rest = len(good[0]) - len(Message("upload", 1, empty | {"rest": empty["00"]}).encode())
    hollow = Message("upload", 1, empty | {"rest": torch.zeros(rest, dtype=torch.uint8)}).encode()
    assert len(hollow) == len(good[0])
    made, real = [], Message.decode

    def decode(plain: bytes) -> Message:
        made.append(plain)
        return real(plain)

    monkeypatch.setattr(Message, "decode", decode)
    sealed = seal_rows([*good, *[hollow] * 20], opener.public, *WHERE)
    received = receive(method, task, sealed, template, opener, *WHERE)
    assert received.rows == len(made) == 6
    assert received.rejected.keys() <= {"copied", "malformed"}
    assert received.dropped == 20


def test_every_client_sends_equally_many_rows_whatever_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples as many as the largest has, of losses one; so no number of rows tells clients apart."""
    task, method, people, _ = scaled_labels(4, set())
    sent: list[int] = []
    submit = BatchStore.submit

    def listening(self: BatchStore, client: str, announced: Announced, rows: Any) -> None:
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
    many = torch.arange(1000)

    def flood(own: Method, task: Task, message: Message, clients: Any) -> list[Message]:
        first = clients[0]
        rows = many % len(first)
        swollen = dataclasses.replace(first, x=first.x[rows], y=(first.y[rows] + 1) % 3)
        return own.answer(task, message, [swollen, *clients[1:]])

    outcome, traffic = play_round(task, method, method.start(task, task.like), 1, people, respond=flood)
    assert traffic.rejected == {"malformed": 1000}
    assert outcome.diagnostics["samples"] == 5 + 6 + 7
