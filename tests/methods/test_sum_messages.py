"""What a GPU does with all clients' sums at once is what a CPU does with one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

import ntkfl
from ntkfl.federation.simulation import Simulation
from ntkfl.federation.validation import Filtered, filter_replies
from ntkfl.methods import SumNTKFL
from ntkfl.tangent.sums import GRADIENT
from ntkfl.wire import Message
from tests.methods.rounds import small_clients, small_task

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
Change = Callable[[Message], Message]


def at_once(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr("ntkfl.methods.sum_ntk_fl.batched", lambda task: value)


def with_arrays(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda reply: Message(
        reply.kind, reply.round, {n: changes.get(n, lambda a: a)(a) for n, a in reply.arrays.items()}
    )


CHANGES: dict[str, Change] = {
    "good": lambda reply: reply,
    "not finite": with_arrays(gradient=lambda a: torch.full_like(a, float("inf"))),
    "extreme": with_arrays(exponents=lambda a: a + 12),
    "a loss below zero": with_arrays(losses=lambda a: -a),
    "no samples": with_arrays(samples=lambda a: a * 0),
    "another network": with_arrays(gradient=lambda a: a[:-1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_same_replies_are_used_and_add_up_to_the_same(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of two sizes, in a mixed order."""
    found: list[tuple[Filtered, list[bytes], Mapping[str, torch.Tensor], float]] = []
    task, clients, method = small_task(), small_clients(12, 7, 12, 12, 7, 12), SumNTKFL()
    for together in (False, True):
        at_once(monkeypatch, together)
        weights = Message("weights", 1, method._pack({"weights": task.like}) | {"asks": torch.tensor(1).byte()})
        replies = method.answer(task, weights, clients)
        sent = [reply.encode() for reply in replies]
        received = [Message.decode(payload) for payload in sent]
        received[3] = change(received[3])
        filtered = filter_replies(method, task, received)
        total, own = method._add_up(task, list(filtered.replies), 1)
        assert len(own) == len(filtered.replies)
        summed = torch.stack([client.gradient for client in own]).sum(0)
        assert torch.allclose(summed, total.sums.arrays[GRADIENT], rtol=1e-5, atol=1e-7)
        found.append((filtered, sent, total.sums.arrays, float(total.losses[0])))
    (one, bytes_one, sums, loss), (other, bytes_other, also, same) = found
    assert list(map(len, bytes_one)) == list(map(len, bytes_other))
    assert (one.rejected, one.rows, one.touched) == (other.rejected, other.rows, other.touched)
    assert same == pytest.approx(loss, rel=1e-12)
    for name, array in sums.items():
        # A last bit of a sum in float64 may move one of its numbers to the neighbouring half.
        assert (array - also[name]).norm() <= 2**-10 * array.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_rounds_end_with_the_same_weights(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 on the wire, where no rounding to halves makes a difference; constant factors are asked for twice."""
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=0.5), seed=0)
    ends = []
    for where, together in (("cpu", False), (device, True)):
        at_once(monkeypatch, together)
        torch.manual_seed(0)
        model = ntkfl.models.mlp(64, 10, 10).double()
        method = SumNTKFL(values="float32", input_tolerance=0.0)
        ends.append(Simulation(model, data, method, clients_per_round=6, device=where).run(4, callbacks=[]))
    one, other = ends
    assert [r["uplink_bytes"] for r in one.history] == [r["uplink_bytes"] for r in other.history]
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_rounds_in_halves_are_as_good(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=0.5), seed=0)
    losses = []
    for where, together in (("cpu", False), (device, True)):
        at_once(monkeypatch, together)
        torch.manual_seed(0)
        run = ntkfl.train(
            ntkfl.models.mlp(64, 10, 10), data, SumNTKFL(), rounds=3, clients_per_round=6, device=where, callbacks=[]
        )
        losses.append([r["test_loss"] for r in run.history])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
