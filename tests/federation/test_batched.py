"""What a server with an accelerator does with all uploads at once is what it does with one after the other: on the CPU,
where both are exact enough to be compared, and on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.config import Byzantine
from ntkfl.federation.local import through_bytes
from ntkfl.federation.simulation import Simulation
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from ntkfl.wire.together import decode_together, encode_together

Change = Callable[[Message], Message]


def changed(reply: Message, **arrays: Tensor) -> Message:
    return dataclasses.replace(reply, arrays=dict(reply.arrays) | arrays)


def not_finite(reply: Message) -> Message:
    outputs = reply.arrays["outputs"].clone()
    outputs[1] = float("nan")
    return changed(reply, outputs=outputs)


def extreme(reply: Message) -> Message:
    g = reply.arrays["0.g"].clone()
    g[2] *= 1e4
    return changed(reply, **{"0.g": g})


def fewer_labels(reply: Message) -> Message:
    return changed(reply, labels=reply.arrays["labels"][:-1])


def no_class(reply: Message) -> Message:
    return changed(reply, labels=torch.full_like(reply.arrays["labels"], 200))


CHANGES: list[Change] = [lambda reply: reply, not_finite, extreme, fewer_labels, no_class]


@pytest.fixture(params=[False, True], ids=["one by one", "all at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("ntkfl.methods.ntk_upload.batched", lambda task: request.param)
    return bool(request.param)


def uploads(method: NTKFL) -> tuple[Task, list[Message]]:
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(5, 4, 3).double(), 3, "ce")
    clients = [
        ClientRound(i, torch.randn(4 + i, 5).double(), torch.arange(4 + i) % 3, Randomness.simulated(i))
        for i in range(5)
    ]
    sent = method.answer(task, Message("weights", 1, {"weights": task.like}), clients)
    return task, [Message.decode(reply.encode()) for reply in sent]


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_rows_are_left_out_for_the_same_reasons(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rows of those that are left are put together alike."""
    found = []
    for at_once in (False, True):
        monkeypatch.setattr("ntkfl.methods.ntk_upload.batched", lambda task, value=at_once: value)
        method = NTKFL(row_clip=None)
        task, replies = uploads(method)
        replies[3] = change(replies[3])
        filtered = filter_replies(method, task, replies)
        rows = method.gather(task, task.like, list(filtered.replies), 1)
        found.append((filtered.rejected, filtered.rows, filtered.touched, rows))
    (*told, one), (*also, other) = found
    assert told == also
    assert torch.equal(one.J.dense(), other.J.dense())
    assert torch.equal(one.f0, other.f0)
    assert torch.equal(one.y, other.y)
    assert torch.equal(one.senders, other.senders)
    assert one.notes == other.notes


def test_all_uploads_are_read_at_once_and_never_again(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = NTKFL()
    task, replies = uploads(method)
    filtered = filter_replies(method, task, replies)
    alike = [reply.read["rows"].outputs.untyped_storage().data_ptr() for reply in filtered.replies]
    assert len(set(alike)) == (1 if at_once else 5)
    monkeypatch.setattr(NTKFL, "read_rows", None if at_once else NTKFL.read_rows)  # not called
    assert len(method.gather(task, task.like, list(filtered.replies), 1).y) == 4 + 5 + 6 + 7 + 8


def test_rows_that_were_made_up_and_rows_too_many_are_left_out(at_once: bool) -> None:
    """One client turns its Jacobian, another has three times the rows of the others."""
    method = NTKFL(drop_opposed=False)
    task, replies = uploads(method)
    replies[0] = changed(replies[0], **{"0.g": -replies[0].arrays["0.g"]})
    many = {
        n: a if n == "jacobian" or n.endswith("spans") else a.repeat_interleave(3, 0)
        for n, a in replies[4].arrays.items()
    }
    replies[4] = changed(replies[4], **many)
    rows = method.gather(task, task.like, list(filter_replies(method, task, replies).replies), 1)
    assert rows.notes["made_up_rows"] == 4
    assert rows.notes["surplus_rows"] == 24 - 9  # one and a half times the median client's six
    assert torch.bincount(rows.senders).tolist() == [0, 5, 6, 7, 9]


def together(answers: list[Message]) -> list[tuple[Message, int]]:
    """The way through bytes of answers on a GPU."""
    payloads = encode_together(answers)
    return list(zip(decode_together(payloads), map(len, payloads), strict=True))


def test_rounds_end_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among clients some of which cheat: three rounds with as many bytes sent, and weights equal to nine digits, as a
    processor may round products of many samples otherwise. Samples gathered, uploads computed, sent and read one by
    one, and all at once.
    """
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=12, alpha=0.5), seed=0)
    ends = []
    for at_once in (False, True):
        for module in ("methods.ntk_upload", "federation.local"):
            monkeypatch.setattr(f"ntkfl.{module}.batched", lambda task, value=at_once: value)
        if at_once:
            monkeypatch.setattr("ntkfl.federation.local.through_bytes", together)
        torch.manual_seed(0)
        model = ntkfl.models.mlp(64, 10, 10).double()
        byzantine = Byzantine(fraction=0.25, kind="sign-flip")
        simulation = Simulation(model, data, NTKFL(), clients_per_round=8, byzantine=byzantine)
        assert isinstance(simulation.clients.respond.__self__, ByzantineClients)  # type: ignore[attr-defined]
        ends.append(simulation.run(3, callbacks=[]))
    one, other = ends
    assert [r["uplink_bytes"] for r in one.history] == [r["uplink_bytes"] for r in other.history]
    assert [r.get("made_up_rows") for r in one.history] == [r.get("made_up_rows") for r in other.history]
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("numbers", [10, 600_000], ids=["small", "large"])
def test_answers_pass_through_bytes_in_their_order_and_are_let_go(numbers: int) -> None:
    kept = [Message("upload", 1, {"outputs": torch.full((numbers,), float(i))}) for i in range(8)]
    answers = list(kept)
    sent = through_bytes(answers)
    assert not answers
    assert [size for _, size in sent] == [len(message.encode()) for message in kept]
    for (reply, _), message in zip(sent, kept, strict=True):
        assert torch.equal(reply.arrays["outputs"], message.arrays["outputs"])
    bad = Message("upload", 1, {"outputs": torch.zeros(numbers, dtype=torch.complex64)})
    with pytest.raises(MessageError, match="do not carry"):
        through_bytes([kept[0], bad, *kept])
