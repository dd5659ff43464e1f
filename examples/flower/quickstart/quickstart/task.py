"""The network, the data, and one client's training and evaluation: nothing federated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntkfl

SIDE = {"digits": 8, "fashion-mnist": 28}  # pixels
Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A LeNet for pictures with one channel."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * (SIDE[dataset] // 4) ** 2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
        )
        self.head = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@cache  # read and dealt once per process, which in a simulation plays several clients
def federation(dataset: Any, clients: int, seed: int) -> ntkfl.data.Federated:
    """Classes are dealt to clients by Dirichlet(0.1); nobody has the test images."""
    return ntkfl.data.load(dataset).partition(ntkfl.data.Dirichlet(clients=clients, alpha=0.1), seed=seed)


def load_data(config: Mapping[str, Any], client: int) -> tuple[Loader, Loader]:
    """One client's images: nine tenths to train on, a tenth to evaluate."""
    x, y = federation(config["dataset"], config["clients"], config["seed"]).client(client)
    x, y = x[: config["samples"]], y[: config["samples"]]
    held_out = len(x) // 10
    train, valid = TensorDataset(x[held_out:], y[held_out:]), TensorDataset(x[:held_out], y[:held_out])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=500)


def load_test(config: Mapping[str, Any]) -> Loader:
    """The test images."""
    fed = federation(config["dataset"], config["clients"], config["seed"])
    return DataLoader(TensorDataset(*fed.test), batch_size=500)


def fit(model: nn.Module, loader: Loader, epochs: int, lr: float) -> float:
    """Plain SGD on the cross-entropy; returns the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: nn.Module, loader: Loader) -> tuple[float, int]:
    """The share of images classified correctly, and how many there are."""
    model.eval()
    hits = [model(x).argmax(1) == y for x, y in loader]
    return torch.cat(hits).float().mean().item(), sum(map(len, hits))
