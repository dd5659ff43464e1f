"""The dense way, as published code does it: every derivative stored, kernels as products of the stored rows.

Written apart from `tangent.passes`, so that it is a witness and not a relative.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

_CHUNK_NUMBERS = 2**25  # derivatives made at a time; a few times that is alive, so the store itself sets the peak


class DenseWay:
    """J of `x` in one array a parameter, [N, d2, …], allocated once and filled a few rows at a time."""

    def __init__(self, model: nn.Module, x: Tensor, outputs: int) -> None:
        self.model, self.x = model, x
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        self.store = {
            name: torch.empty(len(x), outputs, *p.shape, device=x.device) for name, p in self.parameters.items()
        }
        self.outputs = outputs
        self.weights = sum(p.numel() for p in self.parameters.values())
        self.chunk = max(1, min(len(x), _CHUNK_NUMBERS // (outputs * self.weights)))

    @property
    def gigabytes(self) -> float:
        return sum(part.nbytes for part in self.store.values()) / 1e9

    def fill(self) -> None:
        """∂f/∂w of every sample."""

        def output(parameters: Mapping[str, Tensor], sample: Tensor) -> Tensor:
            result: Tensor = functional_call(self.model, dict(parameters), (sample.unsqueeze(0),))
            return result.squeeze(0)

        derivative = vmap(jacrev(output), in_dims=(None, 0))
        with torch.no_grad():
            for start in range(0, len(self.x), self.chunk):
                rows = slice(start, start + self.chunk)
                for name, values in derivative(self.parameters, self.x[rows]).items():
                    self.store[name][rows] = values

    def kernel(self, which: str = "trace") -> Tensor:
        """`trace`: (1/d2)⟨J_i, J_j⟩_F, [N, N]; `full`: J Jᵀ, [N·d2, N·d2]."""
        rows = [part.flatten(1) if which == "trace" else part.flatten(2).flatten(0, 1) for part in self.store.values()]
        total = self.x.new_zeros(len(rows[0]), len(rows[0]))
        for part in rows:
            total.addmm_(part, part.T)
        return total.div_(self.outputs) if which == "trace" else total
