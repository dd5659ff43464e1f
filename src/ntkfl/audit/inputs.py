"""Every row's network input, as far as its entries tell it, for attacks that need all rows of a round at once.

What `analytic.invert` does for a few rows with care is done here for thousands: of sparsified rows, entries of the
first layer's derivative are g·x with g the public readout of a unit that is on, so each entry gives a coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.audit.analytic import invert, linear_layers
from ntkfl.audit.capture import Capture
from ntkfl.audit.received import ReceivedRows
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.sparse import SparseBlock

_ENOUGH = 20  # coordinates that two rows must both tell before they are compared


@dataclass(frozen=True)
class Inputs:
    """x [n, d1'], zero where `known` [n, d1'] is not set."""

    x: Tensor
    known: Tensor


def seen_inputs(capture: Capture, rows: ReceivedRows) -> Inputs | None:
    """None where the rows tell nothing of inputs."""
    model = capture.task.at(capture.weights)
    layers = linear_layers(model)
    block = rows.J.blocks[0] if isinstance(rows.J, BlockJacobian) else None
    if isinstance(block, SparseBlock) and len(layers) == 2 and layers[1].module.out_features == capture.task.outputs:
        return _from_sparse(block, layers[0].weight, layers[0].module.in_features, layers[1].module.weight.detach())
    found = invert(model, rows.J)
    return None if found is None else Inputs(found.x, found.known)


def distances(a: Inputs, b: Inputs) -> Tensor:
    """‖x − x'‖/‖x‖ over the coordinates both tell, [n, m]; infinite where those are few."""
    x, y = a.x.double() * a.known, b.x.double() * b.known
    mine, theirs = a.known.double(), b.known.double()
    size = x.square() @ theirs.T
    square = size - 2 * x @ y.T + mine @ y.square().T
    few = mine @ theirs.T < min(_ENOUGH, (a.x.shape[1] + 1) // 2)  # of a short input, half
    ratio = (square.clamp_min(0) / size.clamp_min(1e-12)).sqrt()
    return ratio.masked_fill(few, float("inf"))


def _from_sparse(block: SparseBlock, weight: slice, inputs: int, readout: Tensor) -> Inputs:
    """Least squares a coordinate: Σ g v / Σ g² over the entries v = g x that came."""
    positions = block.positions.long()
    output, column = positions // block.columns, positions % block.columns
    here = (column >= weight.start) & (column < weight.stop) & (block.values != 0)
    inner = (column - weight.start).clamp(0, weight.stop - weight.start - 1)
    g = readout[output, inner // inputs] * here
    coordinate = inner % inputs
    empty = block.values.new_zeros(len(positions), inputs)
    top = empty.scatter_add(1, coordinate, g * block.values)
    bottom = empty.scatter_add(1, coordinate, g * g)
    known = bottom > 0
    return Inputs(torch.where(known, top / bottom.clamp_min(torch.finfo(g.dtype).tiny), 0.0), known)
