"""What a known layer writes down while it runs: for each linear use of its weights, the input and the output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ntkfl.tangent.factored import FactoredBlock


class Use(NamedTuple):
    """In which module and block, and through which of the module's parameters (by name), weights enter."""

    module: str
    block: type[FactoredBlock]
    weight: str
    bias: str | None
    settings: tuple[int, ...]


Uses = dict[Use, list[tuple[Tensor, Tensor]]]  # the (input, output) of each call


class Tape:
    """Given to a layer's `run`. A tape that records holds parameters fixed, so that autograd sees only the way through
    the layer's input, and notes the uses; without `uses` it lets the layer run as it is, in operations that always
    differentiate. With `live` a recorded layer's parameters stay part of the graph, for derivatives of derivatives.
    """

    def __init__(self, module: str = "", uses: Uses | None = None, live: bool = False) -> None:
        self.module, self.uses = module, uses
        self.live = live or uses is None

    def value(self, parameter: Tensor) -> Tensor:
        """A parameter as this layer computes with it."""
        return parameter if self.live else parameter.detach()

    def optional(self, parameter: Tensor | None) -> Tensor | None:
        """The same where there may be none."""
        return None if parameter is None else self.value(parameter)

    def tap(
        self,
        block: type[FactoredBlock],
        input: Tensor,
        output: Tensor,
        weight: str,
        bias: str | None = None,
        settings: tuple[int, ...] = (),
    ) -> Tensor:
        """Note that `output` came from `input` through these parameters; the layer goes on with what is returned."""
        if self.uses is None:
            return output
        if not output.requires_grad:
            output.requires_grad_()
        use = Use(self.module, block, weight, bias, settings)
        self.uses.setdefault(use, []).append((input, output))
        return output.clone()  # an in-place activation behind the layer must not overwrite the tapped output
