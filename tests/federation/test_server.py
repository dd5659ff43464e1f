"""The server: attempts, quorums, what a failed round leaves behind; with transports that fail when told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.errors import Diverged, MessageError, NumericalError, TooFew
from ntkfl.federation.evaluation import OwnTestSet
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.server import Server
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.methods import ClientRound, FedAvg, Method, Task
from ntkfl.methods.base import Outgoing
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message


class Scripted(Transport):
    """Five clients. What is in `fails` by round and attempt is raised instead of an answer."""

    def __init__(self, method: Method, task: Task, fails: dict[tuple[int, int], Exception]) -> None:
        self.method, self.task, self.fails = method, task, fails
        self.attempt: dict[int, int] = {}
        self.ended: list[bool] = []
        self.gathered = self.finished = 0
        torch.manual_seed(0)
        self.people = [
            ClientRound(i, torch.randn(8, 4), torch.arange(8) % 2, Randomness.simulated(i)) for i in range(5)
        ]

    def gather(self) -> None:
        self.gathered += 1

    def available(self, wanted: int) -> Sequence[int]:
        return range(5)

    def name(self, client: int) -> str:
        return f"client-{client}"

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self.round = round
        self.attempt[round] = self.attempt.get(round, -1) + 1

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        failure = self.fails.get((self.round, self.attempt[self.round]))
        if failure:
            raise failure
        assert isinstance(message, Message)
        return self.method.answer(self.task, message, [self.people[i] for i in cohort])

    def end(self, completed: bool) -> None:
        self.ended.append(completed)

    def finish(self) -> None:
        self.finished += 1


def server(fails: dict[tuple[int, int], Exception] | None = None, **options: Any) -> tuple[Server, Scripted, list[str]]:
    torch.manual_seed(1)
    model, method, said = torch.nn.Linear(4, 2), FedAvg(local_steps=2), list[str]()
    task = Task(model, 2, "ce")
    transport = Scripted(method, task, fails or {})
    test = OwnTestSet((torch.randn(6, 4), torch.arange(6) % 2))
    how = {"clients_per_round": 3, "seed": 0, "attempts": 3, "deployed": True} | options
    return Server(model, task, method, transport, test, say=said.append, **how), transport, said


def test_a_failed_round_is_tried_again_with_others_and_leaves_no_trace() -> None:
    own, transport, said = server({(2, 0): TooFew("too few"), (2, 1): TooFew("again too few")})
    run = own.run(None, {"rounds": 3}, resume=False)
    assert [record["attempt"] for record in run.history] == [0, 2, 0]
    assert transport.ended == [True, False, False, True, True]
    assert (transport.gathered, transport.finished) == (1, 1)
    assert said == ["round 2, attempt 1 of 3 failed: too few", "round 2, attempt 2 of 3 failed: again too few"]
    calm = server()[0]
    assert calm.run(None, {"rounds": 1}, resume=False).history == run.history[:1]


def test_after_all_attempts_the_run_stops_and_can_go_on(tmp_path: Path) -> None:
    fails: dict[tuple[int, int], Exception] = {(2, attempt): TooFew("too few") for attempt in range(3)}
    own, transport, _ = server(fails)
    with pytest.raises(TooFew, match="round 2 failed 3 times; start again to go on from the last"):
        own.run(RunFolder(tmp_path), {"rounds": 3}, resume=True)
    assert transport.finished == 0
    again, _, said = server()
    resumed = again.run(RunFolder(tmp_path), {"rounds": 3}, resume=True)
    assert said[0] == "goes on after round 1"
    assert resumed.history == server()[0].run(None, {"rounds": 3}, resume=False).history


@pytest.mark.parametrize("error", [MessageError("no reply"), NumericalError("diverged")])
def test_anonymous_rows_that_spoil_a_round_cost_one_attempt(error: Exception) -> None:
    own, transport, said = server({(1, 0): error})
    transport.anonymous = True
    (record,) = own.run(None, {"rounds": 1}, resume=False).history
    assert record["attempt"] == 1
    assert "the round cannot be built from its rows" in said[0]


def test_replies_below_the_quorum_and_replies_that_all_diverged() -> None:
    own, transport, _ = server(attempts=1)
    transport.quorum = 4
    with pytest.raises(TooFew, match="3 replies could be used, below the quorum of 4"):
        own.attempt(1, [0, 1, 2])
    transport.quorum = 1
    for person in transport.people:
        person.x.mul_(float("nan"))
    with pytest.raises((Diverged, NumericalError)):
        own.attempt(1, [0, 1, 2])
