"""Local training in the span of the rows: the same descent, by other products."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.methods import ClientRound, Task
from ntkfl.methods.gram_sgd import first_layer, pays
from ntkfl.methods.local_sgd import train_locally
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import gradient


def wide_clients(*sizes: int, dtype: torch.dtype = torch.float64) -> list[ClientRound]:
    """More inputs than samples, where the span pays; with a mean far from zero, as images have."""
    return [
        ClientRound(
            i, (torch.randn(n, 60) + 3).to(dtype).view(n, 6, 10), torch.randint(0, 4, (n,)), Randomness.simulated(i)
        )
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize(("sizes", "steps"), [((8, 8, 8), [30, 30, 30]), ((8, 3, 12), [30, 7, 0]), ((5,), [12])])
def test_equals_plain_descent(loss: str, sizes: tuple[int, ...], steps: list[int]) -> None:
    task = Task(ntkfl.models.mlp(60, 16, 4).double(), 4, loss)
    clients = wide_clients(*sizes)
    layer = first_layer(task.model)
    assert layer is not None
    assert pays(layer, max(sizes), max(steps))
    result = train_locally(task, task.like, clients, steps, 0.05, 100)
    for client, tau, w_m in zip(clients, steps, result.weights, strict=True):
        w = task.like
        for _ in range(tau):
            w = w - 0.05 * gradient(task, w, client.x, client.y)
        torch.testing.assert_close(w_m, w, atol=1e-12, rtol=0)


def test_losses_are_those_met_on_the_way() -> None:
    task, clients = Task(ntkfl.models.mlp(60, 16, 4).double(), 4, "ce"), wide_clients(8, 5)
    together = train_locally(task, task.like, clients, [30, 11], 0.05, 100)
    singly = train_locally(task, task.like, clients, [30, 11], 0.05, 100, batched=False)
    torch.testing.assert_close(together.losses, singly.losses, atol=1e-12, rtol=0)


class TestFirstLayer:
    def test_frozen_or_shared_layers_are_left_alone(self) -> None:
        frozen = ntkfl.models.mlp(6, 5, 3)
        frozen[1].bias.requires_grad_(False)
        linear = nn.Linear(6, 6)
        shared = nn.Sequential(linear, nn.ReLU(), linear, nn.Linear(6, 3))
        without_bias = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))
        for model in (frozen, shared, without_bias, nn.Sequential(nn.Conv1d(1, 2, 3)), nn.Linear(6, 3)):
            assert first_layer(model) is None

    def test_a_frozen_layer_behind_is_kept_as_it_is(self) -> None:
        model = ntkfl.models.mlp(60, 16, 8, 4).double()
        model[3].weight.requires_grad_(False)
        task, clients = Task(model, 4, "ce"), wide_clients(8, 5)
        together = train_locally(task, task.like, clients, 30, 0.05, 100)
        singly = train_locally(task, task.like, clients, 30, 0.05, 100, batched=False)
        torch.testing.assert_close(together.weights, singly.weights, atol=1e-12, rtol=0)

    def test_a_layer_held_twice_behind_trains_once_and_stays_what_it_is(self) -> None:
        twice = nn.Linear(16, 16)
        model = nn.Sequential(nn.Flatten(), nn.Linear(60, 16), nn.Tanh(), twice, nn.Tanh(), twice, nn.Linear(16, 4))
        task, clients = Task(model.double(), 4, "ce"), wide_clients(8)
        assert first_layer(task.model) is not None
        before = [id(p) for p in task.model.parameters()]
        together = train_locally(task, task.like, clients, 30, 0.05, 100)
        assert [id(p) for p in task.model.parameters()] == before
        w = task.like
        for _ in range(30):
            w = w - 0.05 * gradient(task, w, clients[0].x, clients[0].y)
        torch.testing.assert_close(together.weights[0], w, atol=1e-12, rtol=0)

    def test_it_is_not_used_where_it_costs_more(self) -> None:
        layer = first_layer(ntkfl.models.mlp(60, 16, 4))
        assert layer is not None
        assert not pays(layer, n=500, steps=20)  # more rows than twice the inputs
        assert not pays(layer, n=8, steps=1)


def network(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 16), activation, nn.Linear(16, 4))


def trained(model: nn.Module, clients: list[ClientRound], batched: bool = True) -> Tensor:
    task = Task(model, 4, "ce")
    return train_locally(task, task.like, clients, 40, 0.05, 100, batched=batched).weights


def exactly(model: nn.Module, clients: list[ClientRound]) -> Tensor:
    """The plain loop in float64."""
    doubled = [ClientRound(c.id, c.x.double(), c.y, c.randomness) for c in clients]
    return trained(copy.deepcopy(model).double(), doubled, batched=False)


def test_float32_stays_as_close_as_the_loop_does() -> None:
    """Rows with a large common mean, and steps that multiply whatever rounding leaves."""
    torch.manual_seed(1)
    model, clients = network(nn.Tanh()), wide_clients(8, 8, dtype=torch.float32)
    truth = exactly(model, clients)
    ours, loop = trained(model, clients).double(), trained(model, clients, batched=False).double()
    assert (ours - truth).norm() < 3 * (loop - truth).norm()
    assert (ours - truth).norm() < 1e-5 * truth.norm()


class TestPrecision:
    """Rounding to float32 moves a number by at most 2⁻²⁴ of itself; steps in float64 leave less than that.

    Their own error is 2⁻⁵³ times the norm of the Jacobian of all steps together, which is below a hundred for these
    problems. They are drawn in float64, because float32 draws depend on the processor.
    """

    def clients(self) -> list[ClientRound]:
        generator = torch.Generator().manual_seed(4)
        rows = torch.randn(2, 8, 60, dtype=torch.float64, generator=generator).float() + 3
        return [ClientRound(i, x, torch.arange(8) * 3 % 4, Randomness.simulated(i)) for i, x in enumerate(rows)]

    @pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.PReLU])
    def test_float32_weights_are_exact_up_to_their_rounding(self, activation: type[nn.Module]) -> None:
        torch.manual_seed(1)
        model, clients = network(activation()), self.clients()
        truth = exactly(model, clients)
        assert (trained(model, clients) - truth).norm() < 2**-24 * truth.norm()

    def test_frozen_float32_layers_behind_take_part(self) -> None:
        torch.manual_seed(1)
        frozen, clients = nn.Linear(16, 16).requires_grad_(False), self.clients()
        model = network(nn.Sequential(nn.Tanh(), frozen))
        truth = exactly(model, clients)
        assert (trained(model, clients) - truth).norm() < 2**-24 * truth.norm()


def test_layers_of_ones_own_behind_take_the_loop() -> None:
    """Their constants may be float32, which float64 rows cannot be multiplied with."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.randn(16, 16)  # neither parameter nor buffer

        def forward(self, z: Tensor) -> Tensor:
            return torch.tanh(z @ self.constant)

    model, clients = network(Mixing()), wide_clients(8, 8, dtype=torch.float32)
    assert first_layer(model) is None
    assert trained(model, clients).isfinite().all()
