"""The server: rounds that fail, what the record says of them; with a transport that fails when told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ntkfl.errors import Diverged, NumericalError, TooFew
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.server import Server, ServerState, remarks
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.methods.base import Outgoing
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message


class Scripted(Transport):
    """Five clients. The round `fails` is not answered; client 4 sends an update of another network."""

    def __init__(self, task: Task, fails: int | None) -> None:
        self.method, self.task, self.fails = FedAvg(local_steps=2), task, fails
        self.ended = 0
        torch.manual_seed(0)
        self.people = [
            ClientRound(i, torch.randn(8, 4), torch.arange(8) % 2, Randomness.simulated(i)) for i in range(5)
        ]

    def available(self) -> Sequence[int]:
        return range(5)

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self.round = round

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        if self.round == self.fails:
            raise TooFew("nobody answered")
        assert isinstance(question, Message)
        replies = [self.method.answer(self.task, question, self.people[i]).message(self.round) for i in cohort]
        traffic.failed["client-0"] = "asleep"
        wrong = {name: array[:3] if array.ndim else array for name, array in replies[-1].arrays.items()}
        return [*replies[:-1], Message("update", self.round, wrong)]

    def end(self) -> None:
        self.ended += 1


def server(fails: int | None = None, seed: int | None = 0) -> tuple[Server, Scripted]:
    torch.manual_seed(1)
    model, method = torch.nn.Linear(4, 2), FedAvg(local_steps=2)
    task = Task(model, 2, "ce")
    transport = Scripted(task, fails)
    test = torch.randn(6, 4), torch.arange(6) % 2
    return Server(model, task, method, transport, test, clients_per_round=3, seed=seed), transport


def test_a_round_that_fails_ends_the_run_which_can_go_on(tmp_path: Path) -> None:
    own, transport = server(fails=2)
    with pytest.raises(TooFew, match="nobody answered"):
        own.run(RunFolder(tmp_path), {"rounds": 3}, resume=True)
    assert transport.ended == 2
    again, transport = server()
    resumed = again.run(RunFolder(tmp_path), {"rounds": 3}, resume=True)
    assert resumed[1] == server()[0].run(None, {"rounds": 3}, resume=False)[1]
    assert transport.ended == 2


def test_a_round_played_again_leaves_no_trace_of_the_one_that_failed() -> None:
    own, transport = server(fails=1)
    with pytest.raises(TooFew):
        own.play(1)
    transport.fails = None
    assert own.play(1)[0] == server()[0].play(1)[0]


def test_the_record_says_who_failed_and_why_a_reply_was_rejected() -> None:
    record, _ = server(seed=None)[0].play(1)
    assert record["clients"] == [0, 1, 2, 3, 4]  # without a seed the transport says who takes part
    assert record["rejected"] == {"malformed": 1}
    asleep, rejected = remarks(record)
    assert asleep == "no answer: client-0: asleep"
    assert rejected.startswith("rejected: 1 malformed (")


def test_replies_that_all_diverged() -> None:
    own, transport = server()
    for person in transport.people:
        person.x.mul_(float("nan"))
    with pytest.raises((Diverged, NumericalError)):
        own.attempt(1, [0, 1, 2])
    assert transport.ended == 1


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("average", [0.5, 0.0])
def test_the_average_and_the_last_model_are_each_measured_with_their_own_statistics(average: float, real: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    x, y = torch.randn(50, 4).double(), torch.randn(50, 3).double() if real else torch.randint(0, 3, (50,))
    state = ServerState(Task(model, 3, "mse" if real else "ce"), FedAvg(average=average))
    own = Server(model, state.task, state.method, Scripted(state.task, None), (x, y), clients_per_round=1)
    own.state, own.task.validation = state, (x[:20], y[:20])
    state.settled = state.settled + torch.rand(len(state.flat_weights())).double()

    def by_hand(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float | None, float]:
        W, b, scale, shift, mean, var = torch.split(flat, [12, 3, 3, 3, 3, 3])
        f = (x @ W.view(3, 4).T + b - mean) / (var + 1e-5).sqrt() * scale + shift
        if real:
            return None, float(0.5 * nn.functional.mse_loss(f, y))
        return float((f.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(f, y))

    found = own._scores()
    accuracy, loss = by_hand(state.averaged, x, y)
    assert (found["test_accuracy"], found["test_loss"]) == (accuracy, pytest.approx(loss))
    assert found["last_accuracy"] == (by_hand(state.flat_weights(), x, y)[0] if average else accuracy)
    assert real or not average or found["last_accuracy"] != accuracy
    held = by_hand(state.averaged, x[:20], y[:20])
    assert (found["validation_accuracy"], found["validation_loss"]) == (held[0], pytest.approx(held[1]))
