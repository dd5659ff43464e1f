"""Layers whose inputs are of the samples alone, whatever the weights: found by a forward pass on one sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.layers.tape import Slot, Tape, Use
from ntkfl.tangent.parameters import call_with, evaluating, trainable
from ntkfl.tangent.passes import JacobianPlan, substituted


def constant_inputs(model: nn.Module, x: Tensor, plan: JacobianPlan) -> set[int]:
    """First columns of the layers whose input no trained weight is before: their A is the same in every round."""
    moved: set[Use] = set()
    tapes: dict[str, Tape] = {part.use.module: _Origins(part.use.module, moved) for part in plan.parts}
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with evaluating(model), substituted(plan.known, tapes), torch.enable_grad():
        call_with(model, leaves, x)
    return {part.weight.start for part in plan.parts if part.weight is not None and part.use not in moved}


class _Origins(Tape):
    """Notes which uses of weights have trained weights before them."""

    def __init__(self, module: str, moved: set[Use]) -> None:
        super().__init__(module, {})
        self.moved = moved

    def tap(
        self,
        block: type[FactoredBlock],
        input: Tensor,
        output: Tensor,
        weight: Slot | str,
        bias: Slot | str | None = None,
        settings: tuple[int, ...] = (),
    ) -> Tensor:
        result = super().tap(block, input, output, weight, bias, settings)
        if input.requires_grad:
            self.moved |= {use for use, calls in (self.uses or {}).items() if calls[-1][1] is output}
        return result
