"""A network of your own: any nn.Module that maps a batch to [N, d2]."""

import torch
from torch import Tensor, nn

import ntkfl


class Small(nn.Module):
    """A convolution, a skip, a scale of its own: whatever PyTorch can differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1))  # in no layer: gets a block of plain derivatives
        self.out = nn.Linear(4 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h + self.scale * torch.relu(self.second(h))
        return self.out(h.flatten(1))


torch.manual_seed(0)
fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)
run = ntkfl.train(Small(), fed, ntkfl.methods.NTKFL(), rounds=2, clients_per_round=6)
print(f"accuracy after 2 rounds: {run.history[-1]['test_accuracy']:.1%}")

# What NTK-FL sees of the network, sample by sample.
x, y = fed.client(0)
J = ntkfl.jacobian(run.model, x)
H = J.kernel()
print(f"Jacobian {J.shape}, kernel {tuple(H.shape)}, largest eigenvalue {torch.linalg.eigvalsh(H)[-1]:.1f}")

# run.model is your network, trained: measure it on any data, and save it as you save others.
score = run.evaluate(*fed.test)
print(f"{score.accuracy:.1%} of {score.samples} test samples, loss {score.loss:.2f}")
