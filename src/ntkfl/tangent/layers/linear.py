"""`nn.Linear`, over samples alone or over sequences of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.layers.tape import Tape


def run_linear(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    """out = W x + b."""
    out = F.linear(input, tape.value(module.weight), tape.optional(module.bias))
    return tape.tap(LinearBlock, input, out, "weight", None if module.bias is None else "bias")
