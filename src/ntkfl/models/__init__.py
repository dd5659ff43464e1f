"""Networks to begin with; any `nn.Module` that maps a batch to [N, d2] will do.

`MODELS` maps the command line's names to builders that take the shape of one input and the number of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from ntkfl.models.backbone import digest, freeze, head
from ntkfl.models.networks import cnn, mlp, resnet

__all__ = ["MODELS", "cnn", "digest", "freeze", "head", "mlp", "resnet"]


def _mlp(
    inputs: Sequence[int], outputs: int, hidden: Sequence[int] = (100,), gain: float = 1.0, bias: float = 0.0
) -> nn.Module:
    return mlp(math.prod(inputs), *hidden, outputs, gain=gain, bias=bias)


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": _mlp, "cnn": cnn, "resnet": resnet}
