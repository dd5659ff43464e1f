"""NTK-FL from sums: what a round computes, what travels, and what a server refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, MessageError, NotFinite
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent import Flow, curvature_sums
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves, unpack_halves
from tests.methods.rounds import play, play_rounds, small_clients, small_task

D, HIDDEN, OUT = 5, 7, 3
WEIGHTS = (D + 1) * HIDDEN + (HIDDEN + 1) * OUT
FIRST, SECOND = "0-35+35-42", "42-63+63-66"


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def pooled(clients: list[ClientRound]) -> tuple[Tensor, Tensor]:
    return torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])


def dealt(x: Tensor, y: Tensor, rows: list[Tensor]) -> list[ClientRound]:
    return [ClientRound(i, x[own], y[own], Randomness.simulated(i)) for i, own in enumerate(rows)]


def test_a_round_is_the_flow_of_the_pooled_data_however_they_are_dealt() -> None:
    task = small_task(label_smoothing=0.1)
    method = SumNTKFL(values="float32")
    x, y = pooled(small_clients(30, 12, 21))
    sums = curvature_sums(task.at(task.like), x, task.training_targets(y), "ce", task.plan(x))
    expected = task.like + Flow(sums).change(method.time, method.mu, method.delta)
    everyone = torch.arange(len(y))
    ways = [[everyone], [everyone[y == c] for c in range(OUT)], list(everyone.split(1))]
    for rows in ways:
        outcome, log = play(method, task, dealt(x, y, rows))
        assert float((outcome.state["weights"] - expected).norm()) <= 1e-10 * float(expected.norm())
        assert outcome.train_loss == pytest.approx(float(task.losses(task.predict(task.like, x), y).mean()), rel=1e-12)
        assert [s.way for s in log].count("up") == len(rows)  # one exchange
        assert outcome.diagnostics["samples"] == len(y)


def test_one_round_is_ridge_regression_for_a_model_linear_in_its_weights() -> None:
    """The pooled solution from one message per client, whatever each of them holds: AFL's."""
    torch.manual_seed(0)
    task = Task(nn.Linear(5, 3).double(), 3, "mse")
    x, y = torch.randn(40, 5).double(), torch.randn(40, 3).double()
    clients = dealt(x, y, list(torch.arange(40).split([1, 7, 32])))
    X = torch.cat([x, torch.ones(40, 1).double()], dim=1)
    W = torch.cat([task.like[:15].view(3, 5).T, task.like[15:].view(1, 3)])
    for delta in (0.0, 0.2):
        method = SumNTKFL(loss="mse", mu=1, delta=delta, time=None, values="float32")
        weights = play(method, task, clients)[0].state["weights"]
        left = X.T @ X / (40 * 3) + delta * torch.eye(6).double()
        solved = torch.linalg.solve(left, X.T @ y / (40 * 3) + delta * W)
        found = torch.cat([weights[:15].view(3, 5).T, weights[15:].view(1, 3)])
        assert torch.allclose(found, solved, atol=1e-9)


def test_no_time_no_change() -> None:
    task = small_task()
    assert torch.equal(play(SumNTKFL(time=0), task, small_clients(8))[0].state["weights"], task.like)


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


def test_halves_keep_eleven_bits_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(e): (torch.rand(50, generator=generator, dtype=torch.float64) + 0.01) * 10.0**e
        for e in (-300, -30, 0, 6, 300)
    }
    values |= {"zero": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, dtype=torch.float64)}
    message = Message.decode(Message("update", 1, pack_halves(values)).encode())
    back = unpack_halves(message, list(values), torch.zeros(0, dtype=torch.float64))
    for name, value in values.items():
        assert torch.allclose(back[name], value, rtol=2**-11, atol=0)
    with pytest.raises(NotFinite):
        unpack_halves(message, list(values), torch.zeros(0, dtype=torch.float32))  # 1e300 is no float32


def test_sixteen_bits_cost_little() -> None:
    task, clients = small_task(), small_clients(30, 12, 21)
    ends = [play(SumNTKFL(values=v), task, clients)[0].state["weights"] for v in ("float16", "float32")]
    assert float((ends[0] - ends[1]).norm()) < 0.02 * float((ends[1] - task.like).norm())


def test_the_next_cohort_judges() -> None:
    """Losses are those of the last round's flow at half and twice its μ; the least decides which μ comes next."""
    task, clients = small_task(), small_clients(30, 12, 21)
    method = SumNTKFL(control="judge", mu=8, mu_range=(2, 16), values="float32")
    outcome, log = play(method, task, clients[:1])
    assert len(log[-1].message.arrays["losses"]) == 1
    assert outcome.state["mu"].tolist() == [8, 4, 16]
    x, y = clients[0].x, clients[0].y
    flow = Flow(curvature_sums(task.at(task.like), x, task.training_targets(y), "ce", task.plan(x)))
    judged, log = play(method, task, clients[1:], outcome.state, 2)
    told = torch.stack([s.message.arrays["losses"] for s in log if s.way == "up"]).sum(0)
    x, y = pooled(clients[1:])
    ends = torch.stack([task.like + flow.change(method.time, mu, method.delta) for mu in (8, 4, 16)])
    losses = task.candidate_losses(ends, x, y).sum(1)
    assert torch.allclose(told, losses, rtol=1e-2)  # alternatives travel in 8 bits
    assert told[0] == pytest.approx(float(losses[0]), rel=1e-9)
    chosen = [8.0, 4.0, 16.0][int(told.argmin())]
    assert judged.diagnostics["mu"] == chosen
    assert judged.state["mu"].tolist() == [chosen, *(m for m in (chosen / 2, 2 * chosen) if 2 <= m <= 16)]
    down = [s.size for s in log if s.way == "down"]
    assert max(down) < (8 + 2) * WEIGHTS + 200  # a byte for each weight of an alternative


def test_a_judge_recovers_from_steps_that_are_far_too_long() -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(30, 12, 21, dtype=torch.float32)
    options: dict[str, Any] = {"mu": 0.05, "delta": 0.0, "average": 0}
    x, y = pooled(clients)
    ends = {}
    for control in ("fixed", "judge"):
        state = play_rounds(SumNTKFL(control=control, mu_range=(0.05, 64), **options), task, clients, 8)
        ends[control] = float(task.losses(task.predict(state["weights"], x), y).mean())
    assert ends["judge"] < ends["fixed"]


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


@pytest.mark.parametrize("name", ["cnn", "resnet", "gru", "transformer"])
def test_every_network_of_the_package(name: str) -> None:
    torch.manual_seed(0)
    tokens = name == "transformer"
    if name in ("cnn", "resnet"):
        x = torch.randn(24, 1, 12, 12)
        model = ntkfl.models.cnn((1, 12, 12), 3) if name == "cnn" else ntkfl.models.resnet((1, 12, 12), 3)
    else:
        x = torch.randint(0, 20, (24, 6)) if tokens else torch.randn(24, 6, 5)
        model = ntkfl.models.transformer((6,), 3, vocabulary=20) if tokens else ntkfl.models.gru((6, 5), 3)
    task = Task(model, 3, "ce")
    y = torch.arange(24) % 3
    cautious = SumNTKFL(delta=3.0)  # short enough a step to descend on any network: the direction is what is tested
    state = play_rounds(cautious, task, dealt(x, y, list(torch.arange(24).split(9))), 2)
    before, after = (task.losses(task.predict(w, x), y).mean() for w in (task.like, state["weights"]))
    assert after < before


def test_options() -> None:
    for wrong in ({"values": "8bit"}, {"control": "jury"}, {"mu_range": (4, 2)}, {"sparsity": 0.5}, {"mu": 0}):
        with pytest.raises(ConfigError):
            SumNTKFL(**wrong)
    assert SumNTKFL(loss="mse").label_smoothing == 0
