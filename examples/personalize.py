"""A head of each client's own: the sums of all clients, in which its own samples count κ times more."""

import torch
from torch import nn

import ntkfl
from ntkfl.tangent.ridge import RidgeSums, solve, total

KAPPAS = (0, 3, 10, 100)  # 0 is everybody's head; the larger, the more a head is the client's alone
PENALTY = 1e-3

torch.manual_seed(0)
backbone = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten())  # stands for a pretrained one
fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=0.1), seed=0)


@torch.no_grad()
def read(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = fed.client(client)
    return backbone(x.view(-1, 1, 8, 8)), y


def accuracy(weights: torch.Tensor, features: torch.Tensor, y: torch.Tensor) -> float:
    outputs = features.double() @ weights[:-1] + weights[-1]
    return float((outputs.argmax(1) == y).double().mean())


clients = [read(client) for client in range(10)]
train = [(features[::2], y[::2]) for features, y in clients]  # every other sample is set aside, to choose κ by
later = [(features[1::2], y[1::2]) for features, y in clients]
sums = [RidgeSums.of(features, nn.functional.one_hot(y, 10)) for features, y in train]
whole = total(sums)
for kappa in KAPPAS:
    heads = [solve(total([whole, *[own] * kappa]), PENALTY) for own in sums]
    found = [accuracy(head, *data) for head, data in zip(heads, later, strict=True)]
    print(f"κ = {kappa}: {sum(found) / len(found):.1%} on samples of the clients' own")
