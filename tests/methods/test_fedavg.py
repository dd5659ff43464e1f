"""FedAvg: one step of equal clients is a central step; its bytes and bits."""

from __future__ import annotations

import copy

import pytest
import torch

import ntkfl
import ntkfl.models
from ntkfl.methods import Centralized, FedAvg
from tests.methods.rounds import gradient, play, small_clients, small_task


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_one_full_step_of_equal_clients_is_one_central_step(loss: str) -> None:
    task, clients = small_task(loss), small_clients(9, 9, 9)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    expected = task.like - 0.3 * gradient(task, task.like, x, y)
    federated, _ = play(FedAvg(loss=loss, lr=0.3, local_steps=1, batch_size=9), task, clients)
    pooled, _ = play(Centralized(loss=loss, lr=0.3, local_steps=1), task, clients)
    torch.testing.assert_close(federated.state["weights"], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(pooled.state["weights"], expected, atol=1e-12, rtol=0)
    at_start = task.losses(task.predict(task.like, x), y).mean()
    assert federated.train_loss == pytest.approx(float(at_start), rel=1e-6)
    assert pooled.train_loss == pytest.approx(float(at_start), rel=1e-6)


def test_by_default_it_is_the_mean_of_what_clients_send_however_long() -> None:
    """Against FedAvg written by hand, with one of four clients whose inputs, and so its update, are larger."""
    generator = torch.Generator().manual_seed(3)
    scales, labels = (1.0, 1.0, 1.0, 6.0), (12, 20, 9, 15)
    own = [
        (scale * torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator))
        for scale, n in zip(scales, labels, strict=True)
    ]
    fed = ntkfl.data.from_clients(own, test=own[0], classes=3)
    model = ntkfl.models.mlp(5, 4, 3).double()
    trained = ntkfl.train(model, fed, FedAvg(), rounds=3, callbacks=[]).model

    plain = copy.deepcopy(model)
    for _ in range(3):
        ends = []
        for x, y in own:
            local = copy.deepcopy(plain)
            descent = torch.optim.SGD(local.parameters(), lr=0.1)
            for _ in range(20):
                descent.zero_grad()
                torch.nn.functional.cross_entropy(local(x.double()), y).backward()
                descent.step()
            ends.append([p.detach() for p in local.parameters()])
        for p, *each in zip(plain.parameters(), *ends, strict=True):
            p.data = torch.stack(each).mean(0)
    for p, q in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-13, rtol=1e-13)
