"""What bounds one client's part in a step from sums: every client's own step, and how many samples it says it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.config import Byzantine
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.methods.robust_sums import ClientSums, bounded
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.sums import GRADIENT, SAMPLES
from ntkfl.wire import Message
from tests.methods.rounds import small_clients, small_task

SIZES = (30, 12, 21, 16, 25)
HOW = (200.0, 12.0, 0.003)  # t, μ, δ


def sums_of(task: Task, client: ClientRound) -> Sums:
    return curvature_sums(task.at(task.like), client.x, task.training_targets(client.y), "ce", task.plan(client.x))


def total(parts: list[Sums]) -> Sums:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def own_part(part: Sums) -> ClientSums:
    return ClientSums(part.arrays[GRADIENT], part.arrays[SAMPLES], torch.ones(1).double())


def test_a_change_is_linear_in_the_gradient() -> None:
    task = small_task()
    parts = [sums_of(task, client) for client in small_clients(*SIZES)]
    flow, samples = Flow(total(parts)), float(sum(SIZES))
    together = flow.change(*HOW)
    apart = [flow.driven_by(part.arrays[GRADIENT] / samples).change(*HOW) for part in parts]
    assert float((sum(apart, torch.zeros_like(together)) - together).norm()) <= 1e-12 * float(together.norm())
    assert torch.equal(flow.change(*HOW), together)  # it was not changed itself


def test_longer_steps_are_cut_to_the_median_and_others_are_not_touched() -> None:
    task = small_task()
    parts = [sums_of(task, client) for client in small_clients(20, 20, 20, 20, 20)]
    flow = Flow(total(parts))
    clients = [own_part(part) for part in parts]
    mean, clipped = bounded(flow, clients, 1e6, *HOW)
    assert torch.allclose(mean, torch.stack([own.gradient for own in clients]).sum(0) / 100, rtol=1e-12, atol=1e-15)
    assert clipped == 0
    clients[3] = clients[3]._replace(gradient=-40 * clients[3].gradient)
    steps = torch.stack([flow.driven_by(own.gradient / 20).change(*HOW) for own in clients])
    lengths = steps.norm(dim=1)
    assert torch.allclose(flow.step_lengths([own.gradient / 20 for own in clients], *HOW), lengths, rtol=1e-12)
    most = 1.5 * lengths.sort().values[2]
    expected = (steps * (most / lengths).clamp(max=1).unsqueeze(1)).mean(0)
    limited, clipped = bounded(flow, clients, 1.5, *HOW)
    assert clipped == int((lengths > most).sum()) >= 1
    assert float((flow.driven_by(limited).change(*HOW) - expected).norm()) <= 1e-12 * float(expected.norm())
    assert bounded(flow, clients[2:4], 1.5, *HOW)[1] == 0  # of two clients none is the majority


def test_samples_count_for_no_more_than_the_limit() -> None:
    task = small_task()
    parts = [sums_of(task, client) for client in small_clients(20, 20, 20, 20, 20)]
    flow = Flow(total(parts))
    clients = [own_part(part) for part in parts]
    own = clients[0]
    clients[0] = own._replace(gradient=10 * own.gradient, samples=10 * own.samples)  # the same samples ten times over
    limited, clipped = bounded(flow, clients, 1.5, *HOW)
    steps = torch.stack([flow.driven_by(own.gradient / own.samples).change(*HOW) for own in clients])
    lengths = steps.norm(dim=1)
    factors = (1.5 * lengths.sort().values[2] / lengths).clamp(max=1)
    counted = torch.tensor([30.0, 20, 20, 20, 20], dtype=torch.float64)
    expected = ((counted * factors).unsqueeze(1) * steps).sum(0) / counted.sum()
    assert clipped >= 1
    assert float((flow.driven_by(limited).change(*HOW) - expected).norm()) <= 1e-12 * float(expected.norm())


def step(method: SumNTKFL, attack: Byzantine | None) -> tuple[Tensor, dict[str, float | str]]:
    """A round's change of the weights, where the last of five clients is Byzantine."""
    task, clients = small_task(), small_clients(20, 20, 20, 20, 20)
    conversation = method.round(task, method.start(task, task.like), 1, range(5))
    asked = next(conversation)
    assert isinstance(asked, Message)
    byzantine = ByzantineClients(attack, frozenset({4})) if attack else None
    replies = byzantine.answer(method, task, asked, clients) if byzantine else method.answer(task, asked, clients)
    with pytest.raises(StopIteration) as end:
        conversation.send(replies)
    return end.value.value.state["weights"] - task.like, end.value.value.diagnostics


@pytest.mark.parametrize("kind", ["sign-flip", "random"])
def test_one_of_five_decides_without_a_limit_and_not_with_one(kind: str) -> None:
    attack = Byzantine(kind=kind, scale=100.0)
    plain, limited = SumNTKFL(values="float32", step_limit=0), SumNTKFL(values="float32")
    task = small_task()
    parts = [sums_of(task, client) for client in small_clients(20, 20, 20, 20, 20)]
    flow = Flow(total(parts))
    own = [flow.driven_by(part.arrays[GRADIENT] / 20).change(plain.time, plain.mu, plain.delta) for part in parts[:4]]
    # Four of five are honest, so the median step is at most their longest: a mean of five that are each within 1.5
    # medians is too.
    most = 1.5 * max(float(one.norm()) for one in own)
    # The bound on what a step's model promises shortens it, too.
    assert float(step(plain, attack)[0].norm()) > max(most, 5 * float(step(plain, None)[0].norm()))
    kept, told = step(limited, attack)
    assert float(kept.norm()) <= most * (1 + 1e-3)  # what float32 on the wire leaves
    assert int(told["clipped_clients"]) >= 1


def test_secure_sums_show_no_client_to_limit() -> None:
    with pytest.raises(ConfigError, match="step_limit compares clients' sums, of which a secure sum shows none"):
        SumNTKFL(secure_sum=True, step_limit=1.5)
    assert SumNTKFL(secure_sum=True).step_limit == 0
    assert SumNTKFL(linear_head=True).step_limit == 0  # one round is the exact solution, and no client is bounded
    assert SumNTKFL().step_limit == 1.5
