"""Rows and updates that cannot be used cost themselves and nobody else, on every way to the server."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.config import Byzantine
from ntkfl.federation.simulation import Simulation
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import METHODS, NTKFL, ClientRound, Method, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.federation.rounds import play_round

METHODS_OF_UPDATES = (
    "fedavg", "fednova", "scaffold", "fedcom", "qsgd", "fedadam",
)  # fmt: skip


def federation(method: Method, clients: int = 5, rows: int = 6) -> tuple[Task, list[ClientRound], list[Message]]:
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(5, 4, 3), 3, "ce")
    people = [
        ClientRound(i, torch.randn(rows, 5), torch.arange(rows) % 3, Randomness.simulated(i)) for i in range(clients)
    ]
    asked = next(method.round(task, method.start(task, task.like), 1, range(clients)))
    assert isinstance(asked, Message)
    return task, people, method.answer(task, asked, people)


def changed(reply: Message, **arrays: torch.Tensor) -> Message:
    return dataclasses.replace(reply, arrays={**reply.arrays, **arrays})


def with_row(array: torch.Tensor, row: int, value: float) -> torch.Tensor:
    """Row `row` times `value`, or all `value` where that is not finite or the row holds integers."""
    out = array.clone()
    out[row] = out[row] * value if array.is_floating_point() and value == 1e30 else value
    return out


@pytest.mark.parametrize("name", METHODS)
def test_honest_replies_pass_as_they_are(name: str) -> None:
    method = METHODS[name](**({"shuffle": False, "projected_dim": None} if name == "cp-ntk-fl" else {}))
    if name == "centralized":
        return
    task, _, replies = federation(method)
    sifted = filter_replies(method, task, replies)
    assert all(a is b for a, b in zip(sifted.replies, replies, strict=True))
    assert not sifted.rejected


@pytest.mark.parametrize("options", [{}, {"sparsity": 0.5}, {"sparsity": 0.5, "values": "8bit"}, {"codec": "dense"}])
@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e30, "extreme")]
)
def test_a_bad_row_costs_that_row(options: dict[str, Any], value: float, why: str) -> None:
    method = NTKFL(**options)
    task, _, replies = federation(method)
    names = [n for n, a in replies[2].arrays.items() if a.is_floating_point() and not n.endswith("positions")]
    for name in names:
        bad = changed(replies[2], **{name: with_row(replies[2].arrays[name], 3, value)})
        sifted = filter_replies(method, task, [*replies[:2], bad, *replies[3:]])
        assert sifted.rejected == Counter({why: 1})
        assert (sifted.rows, sifted.touched) == (29, 1)
        good = method.join([row for i, row in enumerate(method.split(replies[2])) if i != 3])
        assert sifted.replies[2].encode() == good[0].encode()


def test_labels_that_are_no_labels_cost_their_row() -> None:
    method = NTKFL()
    task, _, replies = federation(method)
    wrong = changed(replies[0], labels=with_row(replies[0].arrays["labels"], 1, 200))
    scaled = changed(replies[1], labels=10 * torch.eye(3)[replies[1].arrays["labels"].long()])
    sifted = filter_replies(method, task, [wrong, scaled, *replies[2:]])
    assert sifted.rejected == Counter({"malformed": 1 + 6})
    assert sifted.rows == 5 + 3 * 6


def test_an_input_scaled_up_and_its_sensitivities_down_is_extreme_all_the_same() -> None:
    """The product is as large as ever, and a kernel of such factors overflows."""
    method = NTKFL()
    task, _, replies = federation(method)
    a, g = replies[0].arrays["0.a"].clone(), replies[0].arrays["0.g"].clone()
    a[0] *= 1e25
    g[0] *= 1e-25
    sifted = filter_replies(method, task, [changed(replies[0], **{"0.a": a, "0.g": g}), *replies[1:]])
    assert sifted.rejected == Counter({"extreme": 1})


@pytest.mark.parametrize("name", METHODS_OF_UPDATES)
@pytest.mark.parametrize(("value", "why"), [(float("nan"), "not finite"), (1e30, "extreme")])
def test_a_bad_update_costs_its_client(name: str, value: float, why: str) -> None:
    method = METHODS[name](local_steps=1)
    task, _, replies = federation(method)
    vectors = {"fednova": "direction", "fedcom": "norms", "qsgd": "norms", "scaffold": "control"}
    vector = vectors.get(name, "weights")
    bad = changed(replies[1], **{vector: torch.full_like(replies[1].arrays[vector], value)})
    sifted = filter_replies(method, task, [replies[0], bad, *replies[2:]])
    assert sifted.rejected == Counter({why: 1})
    assert [r.encode() for r in sifted.replies] == [replies[i].encode() for i in (0, 2, 3, 4)]


def test_a_client_that_has_something_to_learn_among_those_that_have_not_is_honest() -> None:
    """FedNova's directions are about gradients: all but one may be nothing at all."""
    method = METHODS["fednova"](local_steps=1)
    task, _, replies = federation(method)
    tiny = [changed(r, direction=1e-9 * r.arrays["direction"]) for r in replies[1:]]
    assert not filter_replies(method, task, [replies[0], *tiny]).rejected


def test_replies_of_another_form_are_left_out() -> None:
    method = NTKFL()
    task, _, replies = federation(method)
    losses = Message("losses", 1, {"sums": torch.zeros(3).double(), "samples": torch.tensor(6, dtype=torch.int32)})
    late = dataclasses.replace(replies[1], round=2)
    sifted = filter_replies(method, task, [losses, late, *replies[2:]])
    assert len(sifted.replies) == 3
    assert sifted.touched == 2
    others = [dataclasses.replace(losses, arrays={**losses.arrays, "sums": torch.ones(n).double()}) for n in (3, 3, 4)]
    assert len(filter_replies(method, task, others).replies) == 2


@pytest.mark.parametrize("name", ["ntk-fl", "cp-ntk-fl", "fedavg", "qsgd"])
@pytest.mark.parametrize("kind", ["not-finite", "extreme"])
def test_a_round_ends_as_if_they_had_not_sent_anything(name: str, kind: str) -> None:
    """The weights are those of a cohort without the Byzantine clients; of one candidate, as finite losses count."""
    method = METHODS[name](**({"steps": (50,)} if name in ("ntk-fl", "cp-ntk-fl") else {"local_steps": 5}))
    task, people, _ = federation(method)
    start = method.start(task, task.like)
    byzantine = ByzantineClients(Byzantine(kind=kind), frozenset({0, 3}))
    outcome, traffic = play_round(task, method, start, 1, people, respond=byzantine.answer)
    honest, _ = play_round(task, method, start, 1, [person for person in people if person.id not in byzantine.ids])
    assert outcome.state.keys() == honest.state.keys()
    assert all(torch.equal(value, honest.state[key]) for key, value in outcome.state.items())
    assert not torch.equal(outcome.state["weights"], start["weights"])
    above_most = {"malformed"} if (name, kind) == ("cp-ntk-fl", "extreme") else set()  # losses that no sample has
    assert set(traffic.rejected) == {"not finite" if kind == "not-finite" else "extreme"} | above_most


@pytest.mark.parametrize("name", ["ntk-fl", "cp-ntk-fl", "fedavg", "qsgd"])
@pytest.mark.parametrize("kind", ["not-finite", "extreme"])
def test_a_run_goes_on_and_says_what_was_left_out(name: str, kind: str) -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=20), seed=0)
    small = {"projected_dim": 20} if name == "cp-ntk-fl" else {} if name == "ntk-fl" else {"local_steps": 5}
    method = METHODS[name](**small)
    torch.manual_seed(0)
    model = ntkfl.models.mlp(20 if name == "cp-ntk-fl" else 64, 12, 10)
    attack = Byzantine(kind=kind, fraction=0.25)
    run = Simulation(model, fed, method, clients_per_round=8, byzantine=attack).run(3)
    for record in run.history:
        assert bool(record["byzantine"]) == ("rejected" in record)
        if record["byzantine"]:
            assert ("not finite" if kind == "not-finite" else "extreme") in record["rejected"]
    assert run.history[-1]["test_accuracy"] > 0.2
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
