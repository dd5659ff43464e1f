"""A loss of your own: Huber's, which outliers among real-valued targets pull less than they pull squares."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ntkfl


@dataclass(frozen=True)
class Huber(ntkfl.Loss):
    """Squares up to `delta`, absolute values beyond. NTK-FL takes the derivatives by autograd."""

    delta: float = 1.0

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return nn.functional.huber_loss(f, Y, reduction="none", delta=self.delta).mean(-1)


torch.manual_seed(0)
x = torch.randn(400, 3)
y = (x @ torch.tensor([[1.0], [-2.0], [0.5]])).tanh()
noisy = y.clone()
noisy[::10] += 20  # one reading in ten is broken
fed = ntkfl.data.from_clients([(x[i::4], noisy[i::4]) for i in range(4)], test=(x, y))
for loss in ("mse", Huber()):
    method = ntkfl.methods.NTKFL(loss=loss)
    run = ntkfl.train(ntkfl.models.mlp(3, 32, 1), fed, method, rounds=4, clients_per_round=4)
    error = float((run.model(x).detach() - y).abs().mean())
    print(f"{loss}: mean error {error:.3f}")
