"""Small float64 networks that the tangent tests share."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]).double()


class Tied(nn.Module):
    """One weight in two layers, with different biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Twice(nn.Module):
    """One module used twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Functional(nn.Module):
    """A layer's weight also used outside the layer, and a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * self.scale
        return self.out(h @ self.a.weight)


class Sequence(nn.Module):
    """Linear layers over a sequence: T uses of one weight in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x.view(-1, 2, 2))).mean(1))


class MergedBatch(nn.Module):
    """A reshape that merges samples and positions before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 5), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x.reshape(-1, 2))).reshape(-1, 10))


class PositionFirst(nn.Module):
    """Positions before samples: the layer's rows are not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x.view(-1, 2, 2).transpose(0, 1))).sum(0))


class UnknownLayer(nn.Module):
    """A layer type that the factored form does not know, between two it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv, self.out = nn.Linear(4, 8), nn.ConvTranspose1d(2, 3, 2), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conv(torch.tanh(self.a(x)).view(-1, 2, 4))).flatten(1))


class Unused(nn.Module):
    """A parameter and a layer that do not reach the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.idle, self.out = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.out(torch.tanh(self.a(x)))


def partly_frozen() -> nn.Module:
    model = mlp(4, 6, 5, 3)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    return model


def dropout_in_training_mode() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)).double().train()


NETWORKS: dict[str, object] = {
    "linear": lambda: mlp(4, 3),
    "deep tanh": lambda: mlp(4, 6, 5, 3),
    "relu": lambda: mlp(4, 9, 3, activation=nn.ReLU),
    "no bias": lambda: mlp(4, 6, 3, bias=False),
    "scalar output": lambda: mlp(4, 6, 1),
    "tied weight": Tied,
    "module used twice": Twice,
    "functional use": Functional,
    "sequence": Sequence,
    "batch merged": MergedBatch,
    "position first": PositionFirst,
    "unknown layer": UnknownLayer,
    "unused parameters": Unused,
    "partly frozen": partly_frozen,
    "dropout, training mode": dropout_in_training_mode,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The architecture in float64 and seven inputs for it."""
    torch.manual_seed(1)
    model = NETWORKS[name]().double()  # type: ignore[operator]
    return model, torch.randn(7, 4, dtype=torch.float64)
