"""Networks that rivals train: random features of the inputs with a linear head, and a network that can be replaced by
its linearisation.

Random Fourier features (Rahimi & Recht 2007, the Gaussian kernel) with `sum-ridge` train in one round, exactly, however
the samples are dealt: what a backbone's features are to AFL and Fed3R, without a backbone.

TCT (Yu et al. 2022) trains the linear model θᵀφ(x), whose features φ are the derivatives of one output with respect to
the weights, at the weights the network has, with a last layer drawn anew, and a random part of them where there are
more than wanted: the authors' form of the empirical tangent kernel, the same for every class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ntkfl.errors import ConfigError, ModelError
from ntkfl.models.backbone import Adapted, head
from ntkfl.models.networks import mlp
from ntkfl.tangent.parameters import call_with, column_slices, evaluating, trainable

_NUMBERS = 2**24  # derivatives held at once


class RandomFeatures(nn.Module):
    """φ(x) = cos(xΩ + b), with Ω [d1, F] of entries N(0, scale²/d1) and b uniform on [0, 2π]: [N, ...] → [N, F].

    Both follow from `seed` alone, so that all parties have the same. `scale` is the inverse width of the Gaussian
    kernel, for inputs whose numbers have variance 1.
    """

    def __init__(self, inputs: int, features: int, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if features < 1 or scale <= 0:
            raise ConfigError(f"random features need a number and a scale above 0, got {features} and {scale:g}")
        draws = torch.Generator().manual_seed(seed)
        omega = torch.randn(inputs, features, generator=draws, device="cpu") * (scale / math.sqrt(inputs))
        self.register_buffer("omega", omega)
        self.register_buffer("offsets", torch.rand(features, generator=draws, device="cpu") * (2 * math.pi))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offsets, x.flatten(1), self.omega).cos()  # type: ignore[arg-type]  # buffers are tensors


def random_features(
    inputs: Sequence[int], outputs: int, features: int = 1500, scale: float = 1.0, seed: int = 0
) -> Adapted:
    """A linear head, which begins at zero and alone trains, on `features` random features of inputs of this shape."""
    return head(RandomFeatures(math.prod(inputs), features, scale, seed), outputs, features=features)


class Convexified(nn.Module):
    """f(x) = network(x) as long as θ [p, d2] is zero, as it is at first; θᵀφ(x) from then on.

    φ(x) = ∂g(x)/∂w at p coordinates of w, where g is the network's first output with its last layer's weights replaced
    by uniform ones within ±1/√h. Coordinates and replacement follow from `seed` alone, so that all parties have the
    same.
    """

    def __init__(self, network: nn.Module, outputs: int, features: int = 100_000, seed: int = 0) -> None:
        super().__init__()
        if features < 1:
            raise ConfigError(f"a linearisation needs at least one feature, got {features}")
        parameters = trainable(network)
        self._columns, self._last = column_slices(parameters), _last_layer(network, outputs, set(parameters))
        weight = parameters[f"{self._last}.weight"]
        draws = torch.Generator().manual_seed(seed)
        h = weight.shape[1]
        readout = (2 * torch.rand(h, generator=draws, device="cpu") - 1) / math.sqrt(h)
        moves = torch.ones(sum(p.numel() for p in parameters.values()), dtype=torch.bool, device="cpu")
        for name in (f"{self._last}.weight", f"{self._last}.bias"):
            if name in parameters:  # other outputs' weights do not move the first
                span = self._columns[name]
                moves[span.start + parameters[name].numel() // outputs : span.stop] = False
        candidates = moves.nonzero().squeeze(1)
        chosen = torch.randperm(len(candidates), generator=draws, device="cpu")[:features].sort().values
        self.network = network
        self.theta = nn.Parameter(torch.zeros(len(chosen), outputs, dtype=weight.dtype))
        self.register_buffer("coordinates", candidates[chosen])
        self.register_buffer("readout", readout.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not bool(self.theta.any()):
            out: Tensor = self.network(x)
            return out
        rows = max(1, _NUMBERS // sum(span.stop - span.start for span in self._columns.values()))
        return torch.cat([self.features(part) @ self.theta for part in torch.split(x, rows)])

    def features(self, x: Tensor) -> Tensor:
        """φ of the rows of x: [N, p]."""
        own = dict(self.network.named_parameters())
        point = {name: own[name].detach() for name in self._columns}
        last = torch.zeros_like(point[f"{self._last}.weight"])
        last[0] = self.readout  # type: ignore[assignment]  # a buffer is a tensor
        point[f"{self._last}.weight"] = last

        def first_output(at: dict[str, Tensor], one: Tensor) -> Tensor:
            return call_with(self.network, at, one.unsqueeze(0))[0, 0]

        with evaluating(self.network):
            slopes = vmap(grad(first_output), in_dims=(None, 0))(point, x)
        flat = torch.cat([slopes[name].flatten(1) for name in self._columns], dim=1)
        return flat[:, self.coordinates]  # type: ignore[index]


def convexified_mlp(
    inputs: Sequence[int], outputs: int, features: int = 100_000, hidden: Sequence[int] = (100,)
) -> Convexified:
    """A perceptron with its linearisation beside it, of at most so many features: for `TCT`."""
    return Convexified(mlp(math.prod(inputs), *hidden, outputs), outputs, features)


def _last_layer(network: nn.Module, outputs: int, names: set[str]) -> str:
    """The name of the last linear layer with so many outputs whose weights train."""
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Linear) and m.out_features == outputs]
    found: list[str] = [name for name in layers if f"{name}.weight" in names]
    if not found:
        raise ModelError("a convexified network needs a last linear layer that trains, and this one has none")
    return found[-1]


def lenet(inputs: Sequence[int], outputs: int) -> nn.Sequential:
    """LeNet-5 with rectified units, as studies of federated CIFAR-10 have it: 62 thousand weights.

    Weights start as PyTorch draws them.
    """
    c, height, width = inputs
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(c, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip
