"""Layers whose inputs are of the samples alone, whatever the weights: found by a forward pass on one sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntkfl.tangent.layers.tape import Tape
from ntkfl.tangent.parameters import call_with, evaluating, trainable
from ntkfl.tangent.passes import JacobianPlan, substituted


def constant_inputs(model: nn.Module, x: Tensor, plan: JacobianPlan) -> set[int]:
    """First columns of the layers whose input no trained weight is before: their A is the same in every round."""
    tapes = {part.use.module: Tape(part.use.module, {}) for part in plan.parts}
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with evaluating(model), substituted(plan.known, tapes), torch.enable_grad():
        call_with(model, leaves, x)
    moved = {use for tape in tapes.values() for use in tape.moved}
    return {part.weight.start for part in plan.parts if part.weight is not None and part.use not in moved}
