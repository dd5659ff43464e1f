"""NTK-FL from sums: what travels in a round, how often, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves
from tests.methods.rounds import convolutional, play, pooled, small_clients, small_task

D, HIDDEN, OUT = 5, 7, 3
WEIGHTS = (D + 1) * HIDDEN + (HIDDEN + 1) * OUT
FIRST, SECOND = "0-35+35-42", "42-63+63-66"


def triangle(n: int) -> int:
    return n * (n + 1) // 2


@pytest.mark.parametrize(("values", "width"), [("float16", 2), ("float32", 4)])
def test_bytes_are_triangles_in_few_bits(values: str, width: int) -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(9, 4, dtype=torch.float32)
    method = SumNTKFL(values=values)
    _, log = play(method, task, clients)
    numbers = WEIGHTS + triangle(HIDDEN + 1) + triangle(HIDDEN) + triangle(OUT)
    constant = triangle(D + 1)
    arrays = next(s for s in log if s.way == "up").message.arrays
    assert (
        sum(a.numel() for a in arrays.values() if a.element_size() == width and a.ndim)
        - (len(arrays[EXPONENTS]) if values == "float16" else 0)
        == numbers + constant
    )
    for sent in log:
        if sent.way == "up":
            overhead = sent.size - width * (numbers + constant)
            assert 0 < overhead < 300  # names, shapes, exponents, a loss, counts
    outcome, _ = play(SumNTKFL(values=values, input_cohorts=1), task, clients)
    _, log = play(method, task, clients, outcome.state, 2)
    assert all(s.size < width * numbers + 300 for s in log if s.way == "up")
    assert all(s.size < width * WEIGHTS + 100 for s in log if s.way == "down")


def test_constant_factors_are_asked_for_once_per_client_and_no_longer_than_needed() -> None:
    task, clients = small_task(), small_clients(30, 12, 21, 8)
    method = SumNTKFL(values="float32", input_tolerance=0.0, input_cohorts=3)
    state = method.start(task, task.like)
    for number, cohort in enumerate([(0, 1), (1, 2), (0, 3)], 1):
        outcome, log = play(method, task, [clients[i] for i in cohort], state, number)
        fresh = {s.client: int(s.message.arrays["fresh"]) for s in log if s.way == "up"}
        assert fresh == {i: len(clients[i]) if number == 1 or i == number else 0 for i in cohort}
        state = outcome.state
    x = pooled(clients)[0]
    seen = torch.cat([x, torch.ones(len(x), 1).double()], dim=1)
    values, vectors = state[f"values/{FIRST}"][0], state[f"vectors/{FIRST}"][0]
    assert torch.allclose(vectors @ values.diag() @ vectors.T, seen.T @ seen / len(x), atol=1e-12)
    outcome, log = play(method, task, clients[:2], state, 4)
    assert all("asks" not in s.message.arrays for s in log if s.way == "down")
    assert all(f"{FIRST}/constant" not in s.message.arrays for s in log if s.way == "up")
    assert torch.equal(outcome.state[f"values/{FIRST}"], state[f"values/{FIRST}"])


def test_asking_ends_when_a_cohort_changes_little() -> None:
    task, clients = small_task(), small_clients(30, 30)
    for client in clients:
        client.x = clients[0].x  # the second cohort says what the first did
    method = SumNTKFL(input_tolerance=1e-3, input_cohorts=5)
    state = play(method, task, clients[:1])[0].state
    assert "constant_cohorts" in state
    assert "constant_cohorts" not in play(method, task, clients[1:], state, 2)[0].state


def test_a_repeated_round_gets_the_constant_factors_again() -> None:
    task, (client,) = small_task(), small_clients(9)
    method = SumNTKFL()
    for _ in range(2):
        _, log = play(method, task, [client])
        assert int(log[-1].message.arrays["fresh"]) == 9


def test_a_frozen_backbone_sends_its_features_once() -> None:
    """All inputs of a head are constant behind frozen layers."""
    task = small_task()
    task.model[0].requires_grad_(False)  # type: ignore[index]
    task = Task(task.model, OUT, "ce")
    method = SumNTKFL(input_cohorts=1)
    outcome, _ = play(method, task, small_clients(9, 12))
    _, log = play(method, task, small_clients(9, 12), outcome.state, 2)
    assert {name for name in log[-1].message.arrays if "/" in name} == {"0-21+21-24/outputs"}


def test_sixteen_bits_cost_little() -> None:
    task, clients = small_task(), small_clients(30, 12, 21)
    ends = [play(SumNTKFL(values=v), task, clients)[0].state["weights"] for v in ("float16", "float32")]
    assert float((ends[0] - ends[1]).norm()) < 0.02 * float((ends[1] - task.like).norm())


def reply(method: SumNTKFL, task: Task, client: ClientRound) -> Message:
    asked = Message("weights", 1, {"weights": task.like, "asks": torch.tensor(1, dtype=torch.uint8)})
    return method.answer(task, asked, [client])[0]


def changed(message: Message, **arrays: Tensor) -> Message:
    return dataclasses.replace(
        message, arrays={**message.arrays, **{k.replace("__", "/"): v for k, v in arrays.items()}}
    )


def test_replies_that_are_none_are_refused() -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(9, 8, 7, 6, dtype=torch.float32)
    method = SumNTKFL()
    replies = [reply(method, task, client) for client in clients]
    good = replies[0]
    method.check(task, good)
    whole = torch.tensor
    bad: list[dict[str, Tensor]] = [
        {"samples": whole(0)},
        {"samples": whole(-3)},
        {"fresh": whole(4)},
        {"losses": whole([-1.0], dtype=torch.float64)},
        {"losses": torch.zeros(0, dtype=torch.float64)},
        {"losses": whole([float("nan")], dtype=torch.float64)},
        {"gradient": good.arrays["gradient"][1:]},
        {EXPONENTS: good.arrays[EXPONENTS][1:]},
        {EXPONENTS: torch.full_like(good.arrays[EXPONENTS], 2000)},
        {f"{SECOND}/outputs": good.arrays[f"{SECOND}/outputs"][:, 1:]},
        {f"{SECOND}/outputs": good.arrays[f"{SECOND}/outputs"].expand(3, -1)},
        {"0-9/outputs": good.arrays[f"{SECOND}/outputs"]},
    ]
    for change in bad:
        with pytest.raises(MessageError):
            method.check(task, changed(good, **change))
    large = changed(good, **{EXPONENTS: good.arrays[EXPONENTS] + 40})
    many = changed(good, samples=whole(10**6), fresh=whole(10**6))
    for bad_one in (large, many):
        sifted = filter_replies(method, task, [bad_one, *replies[1:]])
        assert [r.encode() for r in sifted.replies] == [r.encode() for r in replies[1:]]
        assert sifted.rejected == {"extreme": 1}


def test_other_networks_are_refused_by_clients_and_servers() -> None:
    method, task = SumNTKFL(), small_task(dtype=torch.float32)
    (client,) = small_clients(9, dtype=torch.float32)
    other = Task(nn.Linear(D, OUT), OUT, "ce")
    with pytest.raises(MessageError, match="this model has"):
        method.answer(task, Message("weights", 1, {"weights": other.like}), [client])
    with pytest.raises(MessageError):
        method.check(task, reply(method, other, client))


def test_curvatures_that_are_none_are_refused() -> None:
    task, clients = convolutional(torch.float32)
    method, whole = SumNTKFL(), torch.tensor
    asked = Message("candidates", 1, pack_halves({"weights": task.like, "step": 0.01 * task.like}))
    good, *others = method.answer(task, asked, clients)
    wrong = ({"samples": whole(0)}, {"curvature": whole(-1.0)}, {"curvature": whole([1.0])})
    for change in wrong:
        with pytest.raises(MessageError):
            method.check(task, changed(good, **change))
    curvature = good.arrays["curvature"]
    for bad, why in ((curvature * float("nan"), "not finite"), (1e6 * curvature, "extreme")):
        assert filter_replies(method, task, [changed(good, curvature=bad), *others]).rejected == {why: 1}
    with pytest.raises(MessageError, match="this model has"):
        method.answer(task, Message("candidates", 1, {"weights": task.like, "step": task.like[1:]}), clients)


def test_a_secure_sum_has_one_exchange_per_round() -> None:
    task, clients = convolutional()
    _, log = play(SumNTKFL(values="float32", secure_sum=True), task, clients)
    assert {s.kind for s in log} == {"weights", "update"}
    with pytest.raises(ConfigError, match="taken once per round"):
        SumNTKFL(control="measured", secure_sum=True)
