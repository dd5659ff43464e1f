"""What every method promises, over every transport: one suite, and no method has a copy of it.

Trains and resumes to the bit; replies survive their bytes and validation; a client's corrupted reply costs that client;
shuffled and masked rounds end where plain ones end; `blank` tells the form of a reply before anybody answers.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import Method, SumNTKFL, Task
from ntkfl.methods.base import adds_noise, privacy_of
from ntkfl.methods.replies import Reply
from ntkfl.privacy.settings import Privacy
from ntkfl.wire import Message
from tests.federation.rounds import play_round, sifted, small_client, small_task
from tests.methods.known import METHODS

QUICK: dict[str, Any] = {"local_steps": 3, "steps": (50.0, 400.0)}
# What each method is tested under beside plain replies; the exact reasons of refusals are in test_settle.py.
SHUFFLED = [name for name in METHODS if name not in ("data-share", "private-ridge")]
SUMMED = ["sum-ntk-fl", "fedavg", "fedprox", "fedadam", "fednova"]


def made(name: str, **options: Any) -> Method:
    kind = METHODS[name]
    return kind(**({option: value for option, value in QUICK.items() if option in kind.model_fields} | options))


def quiet(name: str, **settings: Any) -> Privacy:
    """Plain replies, without noise, unless settings say otherwise."""
    own = {"epsilon": None, "budget_rounds": 20} if adds_noise(METHODS[name]) else {}
    if name == "cp-ntk-fl":
        own = {"projected_dim": None, "shuffle": False}
    return Privacy(**(own | settings))


def trained(fed: ntkfl.data.Federated, name: str, privacy: Privacy, rounds: int = 2, **options: Any) -> ntkfl.Run:
    method = made(name, **options.pop("options", {}))
    fed = dataclasses.replace(fed, shared=fed.client(0)) if hasattr(method, "shared_fraction") else fed
    torch.manual_seed(0)
    inputs = privacy_of(method, privacy).projected_dim or 64
    model = ntkfl.models.mlp(inputs, 16, 10).double()
    how = {"clients_per_round": 4, "callbacks": [], "privacy": privacy} | options
    return ntkfl.train(model, fed, method, rounds=rounds, **how)


def weights(run: ntkfl.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_trains_and_resumes_to_the_bit(name: str, digits: ntkfl.data.Federated, tmp_path: Path) -> None:
    """Whatever server and clients keep between rounds survives a checkpoint."""
    privacy = quiet(name)
    whole = trained(digits, name, privacy, 4, out=tmp_path / "whole")
    assert all(math.isfinite(r["test_loss"]) and r["uplink_bytes"] > 0 for r in whole.history)
    trained(digits, name, privacy, 2, out=tmp_path / "parts")
    parts = trained(digits, name, privacy, 4, out=tmp_path / "parts", resume=True)
    assert parts.history == whole.history
    for file in ("history.jsonl", "model.safetensors", "checkpoint/state.safetensors"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


class Conversation:
    """A round of five small clients: the question of each exchange, and what clients reply, as messages."""

    def __init__(self, name: str, privacy: Privacy | None = None) -> None:
        self.method = made(name)
        self.task: Task = small_task(self.method, privacy or quiet(name))
        self.clients = [small_client(i, 6 + i) for i in range(5)]
        self.exchanges: list[tuple[Message, list[Message]]] = []
        if hasattr(self.method, "shared_fraction"):
            self.task.shared = self.clients[0].x, self.clients[0].y
        state = self.method.start(self.task, self.task.like)
        generator = self.method.round(self.task, state, 1, range(5))
        question = next(generator)
        while True:
            each = {i: question if isinstance(question, Message) else question[i] for i in range(5)}
            messages = [self.method.answer(self.task, each[c.id], c).message(1) for c in self.clients]
            self.exchanges.append((each[0], messages))
            kind = self.kind(each[0])
            try:
                question = generator.send([kind.parse(Message.decode(m.encode()), self.task) for m in messages])
            except StopIteration:
                return

    def kind(self, question: Message) -> type[Reply]:
        return self.method.replies[question.kind]


@pytest.mark.parametrize("name", METHODS)
def test_honest_replies_survive_their_bytes_pass_and_have_the_form_of_a_blank_one(name: str) -> None:
    talk = Conversation(name)
    for question, messages in talk.exchanges:
        kept = sifted(talk.kind(question), talk.task, messages)
        assert not kept.rejected, kept.reasons
        assert sum(map(len, kept.replies)) == sum(len(talk.kind(question)(m.arrays)) for m in messages)
        for reply, message in zip(kept.replies, messages, strict=True):
            again = Message.decode(message.encode())
            assert reply.message(1).encode() == message.encode() == again.encode()
            assert again.halves == message.halves
        # Headers, and so sizes of sealed rows, are known from method, task and question alone.
        kind = talk.kind(question)
        blank = kind.blank(talk.method, talk.task, question).split()[0].message(1)
        for message in messages:
            assert kind(message.arrays, message.halves).split()[0].message(1).header() == blank.header()


BROKEN = {
    "without an array": lambda name, a: None,
    "of another shape": lambda name, a: torch.cat([a.reshape(-1), a.new_zeros(3)]),
    "not finite": lambda name, a: torch.full_like(a, math.nan) if a.is_floating_point() else None,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_reply_costs_its_client_and_is_counted_with_its_reason(name: str, how: str) -> None:
    """Array by array: none of them may spoil a round, whoever changed it."""
    talk = Conversation(name)
    for question, messages in talk.exchanges:
        for array in messages[1].arrays:
            arrays = {n: BROKEN[how](n, a) if n == array else a for n, a in messages[1].arrays.items()}
            bad = dataclasses.replace(messages[1], arrays={n: a for n, a in arrays.items() if a is not None}, halves=())
            kept = sifted(talk.kind(question), talk.task, [messages[0], bad, *messages[2:]])
            assert set(kept.rejected) <= {"not finite", "malformed", "extreme"}
            assert kept.reasons.keys() == kept.rejected.keys()
            assert all(kept.reasons.values())
            assert [r.message(1).encode() for r in kept.replies] == [
                m.encode() for i, m in enumerate(messages) if i != 1
            ]


@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffling_changes_nothing_but_who_is_seen(name: str, digits: ntkfl.data.Federated) -> None:
    options = {"keep_shares": False} if name == "sum-ridge" else {}
    plain, mixed, again = (
        trained(digits, name, quiet(name, shuffle=shuffle), options=options) for shuffle in (False, True, True)
    )
    # The flow's step control begins from a fixed vector, which rows in another order meet elsewhere.
    assert (weights(plain) - weights(mixed)).abs().max() < (1e-5 if "ntk-fl" in name else 1e-10)
    assert mixed.history[-1]["dropped_rows"] == 0
    assert mixed.history[-1]["uplink_bytes"] > plain.history[-1]["uplink_bytes"]  # seals and frames are counted
    assert torch.equal(weights(again), weights(mixed))  # whatever order the shuffler gave


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("options", [{}, {"loss": "mse"}, {"weighting": "samples"}])
def test_masked_training_is_plain_training(
    name: str, options: dict[str, Any], digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds end within the rounding, and the accuracy within one of the 355 test samples."""
    monkeypatch.setattr(SumNTKFL, "step_limit", 0.0)  # which masks leave nothing to compare for
    if not options.keys() <= METHODS[name].model_fields.keys():
        pytest.skip("not an option of this method")
    exact = {"values": "float32"} if "values" in METHODS[name].model_fields else {}
    one, two = (
        trained(digits, name, quiet(name, secure_sum=masked, sum_samples=200), 3, options=options | exact)
        for masked in (False, True)
    )
    assert 0 < float((weights(one) - weights(two)).norm() / weights(one).norm()) < 1e-3
    assert [record["summed_clients"] for record in two.history] == [4, 4, 4]
    assert [record["bounded_clients"] for record in two.history] == [0, 0, 0]
    for before, after in zip(one.history, two.history, strict=True):
        assert abs(before["test_accuracy"] - after["test_accuracy"]) < 1.5 / 355
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-3)


@pytest.mark.parametrize("name", SUMMED)
def test_the_reply_of_a_total_is_that_of_the_method(name: str) -> None:
    """Without masks or rounding: a round given the total's one reply ends as a round given all replies, in float64."""
    talk = Conversation(name, quiet(name, secure_sum=True))
    method, task = talk.method, talk.task
    state = method.start(task, task.like)
    ends = []
    for whole in (False, True):
        generator = method.round(task, state, 1, range(5))
        question = next(generator)
        assert isinstance(question, Message)
        clients = [small_client(i, 6 + i) for i in range(5)]
        kind = talk.kind(question)
        while True:
            replies = [method.answer(task, question, client) for client in clients]
            if whole:
                addends = [reply.addends(method, task, question) for reply in replies]
                total = {n: torch.stack([own[n].values for own in addends]).sum(0) for n in addends[0]}
                replies = [kind.from_total(method, task, question, total, len(clients))]
            try:
                question = generator.send([kind.parse(reply.message(1), task) for reply in replies])
                kind = talk.kind(question)
            except StopIteration as end:
                ends.append(end.value)
                break
    for key, tensor in ends[0].state.items():
        assert torch.allclose(tensor.double(), ends[1].state[key].double(), rtol=1e-9, atol=1e-12), key
    assert ends[0].train_loss == pytest.approx(ends[1].train_loss, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SUMMED])
def test_what_does_not_add_up_is_refused_under_masks(name: str, digits: ntkfl.data.Federated) -> None:
    if all(reply.additive for reply in METHODS[name].replies.values()):
        pytest.skip("adds up, with noise: tests/methods")
    with pytest.raises(
        ConfigError, match="needs each client's reply, and secure_sum shows only their sum: leave it out"
    ):
        Simulation(ntkfl.models.mlp(64, 10), digits, made(name), privacy=quiet(name, secure_sum=True))


@pytest.mark.parametrize("name", ["ntk-fl", "fedavg", "sum-ntk-fl"])
def test_the_bytes_recorded_are_those_of_the_messages(name: str) -> None:
    """Up each client's reply, down one question for each client, by kind."""
    talk = Conversation(name)
    _, traffic = play_round(talk.task, talk.method, talk.method.start(talk.task, talk.task.like), 1, talk.clients)
    up, down = sum(traffic.uplink.values()), sum(traffic.downlink.values())
    assert up == sum(len(m.encode()) for _, messages in talk.exchanges for m in messages)
    assert down == sum(5 * len(question.encode()) for question, _ in talk.exchanges)
    assert set(traffic.uplink) == {talk.kind(question).kind for question, _ in talk.exchanges}
