"""Rows and updates that cannot be used cost themselves and nobody else, on every way to the server."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ntkfl.errors import MessageError
from ntkfl.methods import NTKFL, Method, Privacy
from ntkfl.wire import Message
from tests.federation.rounds import CODECS, changed, lying, play_round, scaled, sifted, small_client, small_task
from tests.methods.known import METHODS


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


def value(*numbers: float, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """These numbers, whatever was sent."""
    return lambda array: torch.tensor(numbers[0] if len(numbers) == 1 else numbers, **options)


LAYER, MOMENTS = "24-36+36-39/outputs", "moments/0-20+20-24"
REFUSED: list[tuple[str, dict[str, Callable[[torch.Tensor], torch.Tensor]], str]] = [
    ("fedavg", {"samples": value(0)}, "on 0 samples"),
    ("fednova", {"steps": value(0)}, "no local steps"),
    *(("qsgd", {"codes": make}, "") for make in (lambda a: a[:-1], torch.Tensor.int, lambda a: a[None])),
    *(("qsgd", {"norms": make}, "") for make in (torch.neg, torch.Tensor.double)),
    ("ntk-fl", {"labels": lambda a: a[:-1]}, r"labels of shape \[5\] for 6"),
    *(("ntk-fl", {"labels": lambda a, c=c: torch.full((6,), c)}, "none of the 3 classes") for c in (3, -1)),
    ("ntk-fl", {"labels": lambda a: a[:, None]}, "none of the 3 classes"),
    ("ntk-fl", {"labels": lambda a: torch.zeros(6, 3)}, "real-valued targets"),
    *(("centralized", {"labels": make}, "fit") for make in (lambda a: a[:-1], lambda a: a[:, None], lambda a: a[0])),
    *(("centralized", {"x": make}, "fit together") for make in (lambda a: a[:, :4], lambda a: a[:, 0])),
    *(("centralized", {"x": make, "labels": make}, "fit") for make in (lambda a: a[:0], lambda a: a.view(-1)[0])),
    ("sum-ridge", {"gram": lambda a: a[:-1]}, "shape"),
    ("sum-ridge", {"cross": lambda a: a[:, 1:]}, "shape"),
    ("sum-ridge", {"samples": lambda a: a.expand(2)}, "shape"),
    ("sum-ridge", {"fresh": value(2)}, "fresh is 0 or 1"),
    *(("sum-ntk-fl", {"samples": value(n)}, f"sums over {n} samples") for n in (0, -3)),
    ("sum-ntk-fl", {"fresh": value(4)}, "constant factors of 4 of 6 samples"),
    ("sum-ntk-fl", {"losses": torch.neg}, "'losses' is below zero"),
    *(("sum-ntk-fl", {"losses": lambda a, n=n: a.expand(n)}, f"{n} losses") for n in (0, 3)),
    ("sum-ntk-fl", {"gradient": lambda a: a[1:]}, "shape"),
    *(("sum-ntk-fl", {LAYER: make}, "") for make in (lambda a: a[:, 1:], lambda a: a.expand(3, -1))),
    ("sum-ntk-fl", {"0-9/outputs": lambda a: torch.ones(1, 6)}, ""),
    ("private-sums", {"gradient": lambda a: a[:3]}, "shape"),
    ("private-sums", {"losses": value(1.0)}, "'losses', which nobody asked for"),
    ("private-sums", {MOMENTS: lambda a: a[1:]}, "fit no layer"),
    ("private-sums", {"moments/0-3500+35-42": lambda a: torch.zeros(21).int()}, "fit no layer"),
    ("private-ridge", {"gram": lambda a: a[1:]}, "shape"),
    ("private-ridge", {"count": value(1.0)}, "'count', which nobody asked for"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "why"), REFUSED)
def test_what_no_honest_client_sends_is_refused(name: str, change: dict[str, Any], why: str) -> None:
    """By value, or by shapes of its own; what is missing or not finite is in test_conformance.py."""
    sent = Sent(METHODS[name]())
    good = sent.messages[0]
    sent.kind.parse(good, sent.task)
    bad = {array: make(good.arrays.get(array, torch.zeros(1))) for array, make in change.items()}
    with pytest.raises(MessageError, match=why):
        sent.kind.parse(changed(good, **bad), sent.task)


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
