"""Rows and updates that cannot be used cost themselves and nobody else, on every way to the server."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ntkfl.methods import METHODS, NTKFL, Method, Privacy
from ntkfl.wire import Message
from tests.federation.rounds import lying, play_round, scaled, sifted, small_client, small_task

CODECS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"form": "dense"}, {}),
    ({}, {"sparsity": 0.5}),
    ({}, {"sparsity": 0.5, "values": "8bit"}),
]


class Sent:
    """Five clients' replies to a method's first question, as messages."""

    def __init__(self, method: Method, **privacy: Any) -> None:
        self.method, self.task = method, small_task(method, Privacy(**privacy))
        self.people = [small_client(i, 6) for i in range(5)]
        asked = next(method.round(self.task, method.start(self.task, self.task.like), 1, range(5)))
        assert isinstance(asked, Message)
        self.kind = method.replies[asked.kind]
        self.messages = [method.answer(self.task, asked, person).message(1) for person in self.people]

    def filtered(self, **changed: Message) -> SimpleNamespace:
        """With client i's message replaced by the one given as `ci`."""
        return sifted(self.kind, self.task, [changed.get(f"c{i}", m) for i, m in enumerate(self.messages)])


def changed(message: Message, **arrays: torch.Tensor) -> Message:
    return dataclasses.replace(message, arrays={**message.arrays, **arrays})


def with_row(array: torch.Tensor, row: int, value: float) -> torch.Tensor:
    """Row `row` times `value`, or all `value` where that is not finite or the row holds integers."""
    out = array.clone()
    out[row] = out[row] * value if array.is_floating_point() and value == 1e30 else value
    return out


@pytest.mark.parametrize(("options", "privacy"), CODECS)
@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e30, "extreme")]
)
def test_a_bad_row_costs_that_row(options: Any, privacy: Any, value: float, why: str) -> None:
    sent = Sent(NTKFL(**options), **privacy)
    third = sent.messages[2]
    good = sent.kind.join([row for i, row in enumerate(sent.kind(third.arrays).split()) if i != 3])[0].message(1)
    for name in [n for n, a in third.arrays.items() if a.is_floating_point() and not n.endswith("positions")]:
        kept = sent.filtered(c2=changed(third, **{name: with_row(third.arrays[name], 3, value)}))
        assert kept.rejected == Counter({why: 1})
        assert (sum(map(len, kept.replies)), kept.rejected_clients) == (29, 1)
        assert kept.replies[2].message(1).encode() == good.encode()


def test_labels_that_are_no_labels_cost_their_row() -> None:
    sent = Sent(NTKFL())
    one, two = sent.messages[:2]
    wrong = changed(one, labels=with_row(one.arrays["labels"], 1, 200))
    scaled = changed(two, labels=10 * torch.eye(3)[two.arrays["labels"].long()])
    kept = sent.filtered(c0=wrong, c1=scaled)
    assert kept.rejected == Counter({"malformed": 1 + 6})
    assert kept.reasons == {"malformed": "a label that is none of the 3 classes"}
    assert sum(map(len, kept.replies)) == 5 + 3 * 6


def test_an_input_scaled_up_and_its_sensitivities_down_is_extreme_all_the_same() -> None:
    """The product is as large as ever, and a kernel of such factors overflows."""
    sent = Sent(NTKFL())
    a, g = (sent.messages[0].arrays[name].clone() for name in ("0.a", "0.g"))
    a[0] *= 1e25
    g[0] *= 1e-25
    assert sent.filtered(c0=changed(sent.messages[0], **{"0.a": a, "0.g": g})).rejected == Counter({"extreme": 1})


@pytest.mark.parametrize(
    ("name", "array"),
    [("fedavg", "weights"), ("fednova", "direction"), ("fedcom", "norms"), ("qsgd", "norms"), ("scaffold", "control")],
)
def test_an_extreme_update_costs_its_client(name: str, array: str) -> None:
    sent = Sent(METHODS[name](local_steps=1))
    kept = sent.filtered(c1=changed(sent.messages[1], **{array: torch.full_like(sent.messages[1].arrays[array], 1e30)}))
    assert kept.rejected == Counter({"extreme": 1})
    assert [r.message(1).encode() for r in kept.replies] == [sent.messages[i].encode() for i in (0, 2, 3, 4)]


def test_a_client_that_has_something_to_learn_among_those_that_have_not_is_honest() -> None:
    """FedNova's directions are about gradients: all but one may be nothing at all."""
    sent = Sent(METHODS["fednova"](local_steps=1))
    tiny = {f"c{i}": changed(m, direction=1e-9 * m.arrays["direction"]) for i, m in enumerate(sent.messages) if i}
    assert not sent.filtered(**tiny).rejected


def test_statistics_that_the_network_has_not_are_refused() -> None:
    """They would become part of the model that is averaged and saved."""
    sent = Sent(METHODS["fedavg"](local_steps=1))
    sent.messages = [changed(message, statistics=torch.ones(3)) for message in sent.messages]
    kept = sent.filtered()
    assert (kept.replies, kept.rejected) == ([], Counter({"malformed": 5}))


def test_replies_of_another_round_or_kind_are_left_out() -> None:
    sent = Sent(NTKFL())
    late = dataclasses.replace(sent.messages[1], round=2)
    kept = sent.filtered(c0=Message("update", 1, {"weights": torch.zeros(3)}), c1=late)
    assert (len(kept.replies), kept.rejected_clients) == (3, 2)


@pytest.mark.parametrize("name", ["ntk-fl", "cp-ntk-fl", "fedavg", "qsgd"])
@pytest.mark.parametrize(("factor", "why"), [(math.nan, "not finite"), (1e30, "extreme")])
def test_a_round_ends_as_if_they_had_not_sent_anything(name: str, factor: float, why: str) -> None:
    """The weights are those of a cohort without the Byzantine clients; of one candidate, as finite losses count."""
    method = METHODS[name](**({"steps": (50,)} if name in ("ntk-fl", "cp-ntk-fl") else {"local_steps": 5}))
    task = small_task(method, Privacy(projected_dim=5) if name == "cp-ntk-fl" else None)
    people = [small_client(i, 6) for i in range(5)]
    start = method.start(task, task.like)
    outcome, traffic = play_round(task, method, start, 1, people, respond=lying({0, 3}, scaled(factor)))
    honest, _ = play_round(task, method, start, 1, [person for person in people if person.id not in (0, 3)])
    assert outcome.state.keys() == honest.state.keys()
    assert all(torch.equal(value, honest.state[key]) for key, value in outcome.state.items())
    assert not torch.equal(outcome.state["weights"], start["weights"])
    above_most = {"malformed"} if why == "extreme" and name.endswith("ntk-fl") else set()  # losses that no sample has
    assert set(traffic.rejected) == {why} | above_most
