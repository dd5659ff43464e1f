"""NTK-FL from sums: what travels in a round, how often, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.methods.base import fitted
from ntkfl.methods.sums.curvature_reply import CurvatureSums, StepCurvature, accepted_weights, weights_question
from ntkfl.tangent import curvature_sums
from ntkfl.wire import Message
from tests.federation.rounds import sifted
from tests.methods.rounds import convolutional, play, play_rounds, pooled, small_clients, small_task

D, HIDDEN, OUT = 5, 7, 3
WEIGHTS = (D + 1) * HIDDEN + (HIDDEN + 1) * OUT
FIRST, SECOND = "0-35+35-42", "42-63+63-66"


def triangle(n: int) -> int:
    return n * (n + 1) // 2


@pytest.mark.parametrize(("values", "width"), [("float16", 2), ("float32", 4)])
def test_bytes_are_triangles_in_few_bits(values: str, width: int) -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(9, 4, dtype=torch.float32)
    method = SumNTKFL(fisher="exact", values=values)
    _, log = play(method, task, clients)
    numbers = WEIGHTS + triangle(HIDDEN + 1) + triangle(HIDDEN) + triangle(OUT)
    for sent in log:
        if sent.way == "up":
            overhead = sent.size - width * (numbers + triangle(D + 1))
            assert 0 < overhead < 300  # names, shapes, exponents, a loss, counts
    state = play_rounds(method, task, clients, 2)
    _, log = play(method, task, clients, state, 3)
    assert all(s.size < width * numbers + 300 for s in log if s.way == "up")
    # The last accepted weights, as a step, take one byte each.
    assert all(s.size < (width + 1) * WEIGHTS + 200 for s in log if s.way == "down")


# -- Constant factors --------------------------------------------------------------------------------------------------


def test_constant_factors_are_asked_for_once_per_client_and_no_longer_than_needed() -> None:
    task, clients = small_task(), small_clients(30, 12, 21, 8)
    method = SumNTKFL(fisher="exact", values="float32")
    state = method.start(task, task.like)
    for number, cohort in enumerate([(0, 1), (1, 2)], 1):
        for _ in range(2):  # a round that is repeated gets them again
            outcome, log = play(method, task, [clients[i] for i in cohort], state, number)
            fresh = {s.client: int(s.message.arrays["fresh"]) for s in log if s.way == "up"}
            assert fresh == {i: len(clients[i]) if number == 1 or i == number else 0 for i in cohort}
        state = outcome.state
    x = pooled(clients[:3])[0]
    seen = torch.cat([x, torch.ones(len(x), 1).double()], dim=1)
    values, vectors = state[f"values/{FIRST}"][0], state[f"vectors/{FIRST}"][0]
    assert torch.allclose(vectors @ values.diag() @ vectors.T, seen.T @ seen / len(x), atol=1e-12)
    outcome, log = play(method, task, clients[:2], state, 3)
    assert all("asks" not in s.message.arrays for s in log if s.way == "down")
    assert all(f"{FIRST}/constant" not in s.message.arrays for s in log if s.way == "up")
    assert torch.equal(outcome.state[f"values/{FIRST}"], state[f"values/{FIRST}"])


def test_a_frozen_backbone_sends_its_features_once() -> None:
    """All inputs of a head are constant behind frozen layers."""
    task = small_task()
    task.model[0].requires_grad_(False)  # type: ignore[index]
    task = Task(task.model, OUT, "ce")
    method = fitted(SumNTKFL(fisher="exact"), task.model, OUT, everyone=True)
    outcome, _ = play(method, task, small_clients(9, 12))
    _, log = play(method, task, small_clients(9, 12), outcome.state, 2)
    assert {name for name in log[-1].message.arrays if "/" in name} == {"0-21+21-24/outputs"}


# -- What is refused ---------------------------------------------------------------------------------------------------


def reply(method: SumNTKFL, task: Task, client: ClientRound) -> Message:
    question = weights_question(1, task.like, None, asks=True, halves=True)
    return method.answer(task, question, client).message(1)


def changed(message: Message, **arrays: Tensor) -> Message:
    return dataclasses.replace(message, arrays={**message.arrays, **arrays})


def test_sums_far_larger_than_the_others_are_left_out() -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(9, 8, 7, 6, dtype=torch.float32)
    replies = [reply(SumNTKFL(fisher="exact"), task, client) for client in clients]
    good, whole = replies[0], torch.tensor
    large = changed(good, **{name: 2.0**40 * good.arrays[name] for name in good.halves})
    many = changed(good, samples=whole(10**6), fresh=whole(10**6))
    for bad_one in (large, many):
        kept = sifted(CurvatureSums, task, [bad_one, *replies[1:]])
        assert [r.message(1).encode() for r in kept.replies] == [r.encode() for r in replies[1:]]
        assert kept.rejected == {"extreme": 1}


def test_other_networks_are_refused_by_clients_and_servers() -> None:
    method, task = SumNTKFL(fisher="exact"), small_task(dtype=torch.float32)
    (client,) = small_clients(9, dtype=torch.float32)
    other = Task(nn.Linear(D, OUT), OUT, "ce")
    with pytest.raises(MessageError, match="has shape"):
        method.answer(task, Message("weights", 1, {"weights": other.like}), client)
    with pytest.raises(MessageError):
        CurvatureSums.parse(reply(method, other, client), task)


def test_curvatures_that_are_none_are_refused() -> None:
    task, clients = convolutional(torch.float32)
    method, whole = SumNTKFL(fisher="exact"), torch.tensor
    question = Message("candidates", 1, {"weights": task.like, "change": 0.01 * task.like})
    good, *others = (method.answer(task, question, client).message(1) for client in clients)
    for change in ({"samples": whole(0)}, {"curvature": whole(-1.0)}, {"curvature": whole([1.0])}):
        with pytest.raises(MessageError):
            StepCurvature.parse(changed(good, **change), task)
    curvature = good.arrays["curvature"]
    for bad, why in ((curvature * float("nan"), "not finite"), (1e6 * curvature, "extreme")):
        assert sifted(StepCurvature, task, [changed(good, curvature=bad), *others]).rejected == {why: 1}
    with pytest.raises(MessageError, match="has shape"):
        method.answer(task, changed(question, change=task.like[1:]), clients[0])


# -- What else travels -------------------------------------------------------------------------------------------------


class Counting(SumNTKFL):
    """A method of somebody's own, whose clients also say how many samples they have of each class."""

    fisher: Literal["mc", "exact"] = "exact"
    name: ClassVar[str] = "counting"

    def answer(self, task: Task, question: Message, client: ClientRound) -> CurvatureSums | StepCurvature:
        reply = super().answer(task, question, client)
        reply.arrays["extra"] = self.counts(client)
        return reply

    @staticmethod
    def counts(client: ClientRound) -> Tensor:
        return torch.bincount(client.y, minlength=OUT).float() / 7


@pytest.mark.parametrize("values", ["float16", "float32"])
def test_arrays_of_a_derived_method_are_left_to_it_and_halves_are_read_as_values(values: str) -> None:
    task, clients = small_task(), small_clients(9, 12, 8)
    plain, _ = play(SumNTKFL(fisher="exact", values=values), task, clients)
    outcome, log = play(Counting(values=values), task, clients)
    assert torch.equal(outcome.state["weights"], plain.state["weights"])
    replies = [s.message for s in log if s.way == "up"]
    assert sifted(CurvatureSums, task, replies).rejected == {}
    rounding = 2**-11 if values == "float16" else 1e-12
    for reply, client in zip(replies, clients, strict=True):
        assert torch.equal(reply.take("extra", (OUT,)), Counting.counts(client))
        found = curvature_sums(task.model, client.x, task.training_targets(client.y), "ce", task.plan(client.x))
        exact = found.arrays["gradient"]
        w = next(s.message for s in log if s.way == "down").take("weights", None, task.like)
        assert torch.allclose(w, task.like, rtol=rounding, atol=0)
        assert float((reply.take("gradient", None, task.like) - exact).norm()) <= 4 * rounding * float(exact.norm())


def test_the_last_accepted_weights_travel_in_eight_bits_or_whole() -> None:
    """Whole where 8 bits, of which the largest number of a step sets the scale, would miss them."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(500, generator=generator, dtype=torch.float64)
    for far in (1e-9, 0.1, 1.0, 1e3, 1e30):
        proposed = w + far * torch.randn(500, generator=generator, dtype=torch.float64)
        question = Message.decode(weights_question(2, proposed, w, asks=False, halves=True).encode())
        assert (question.arrays["step"].dtype == torch.int8) if far <= 1 else ("step" not in question.arrays)
        read = question.take("weights", None, w)
        found = accepted_weights(question, read)
        assert found is not None
        within = 2.0**-5 * w.norm() if far <= 1 else 2**-11 * w.norm()
        assert float((found - w - (read - proposed if far <= 1 else 0)).norm()) <= within
    assert accepted_weights(weights_question(1, w, None, asks=True, halves=True), w) is None
    same = accepted_weights(weights_question(2, w, w, asks=False, halves=False), w)
    assert same is not None
    assert torch.equal(same, w)


def test_layers_whose_factors_are_sketches_are_named() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 6), nn.ReLU(), nn.Linear(6, 3)
    )

    def notes(**options: int) -> list[str]:
        task = Task(model, 3, "ce")
        SumNTKFL(fisher="exact", **options).start(task, task.like)
        return task.notes

    assert notes() == []
    assert notes(largest=512) == ["curvature factors above largest = 512 are sent as sketches: '3' (513 rows)"]
    (line,) = notes(largest=7)
    assert line.endswith("'0' (10 rows), '3' (513 rows)")
    model[3].requires_grad_(False)
    (line,) = notes(largest=7)
    assert line.endswith(": '0' (10 rows)")
