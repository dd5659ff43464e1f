"""The curvature of the last layer as a server keeps it between rounds, and the Laplace posterior it gives."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.tangent.flow import Eigen, eigen
from ntkfl.tangent.posterior import FactoredPosterior
from ntkfl.tangent.sums import SAMPLES, Factor, Layer, Sums

_OUTPUTS, _INPUTS, _COUNT = "head/outputs/", "head/inputs/", "head/samples"


def head_factors(sums: Sums, outputs: int) -> dict[str, Tensor]:
    """G of the last layer with so many outputs, A where it changes between rounds, and N; nothing where positions share
    the layer or there is none.
    """
    for shaped in reversed(sums.layers()):
        if shaped.outputs is None or shaped.shared or shaped.shape[:2] != (1, outputs) or shaped.layer.transposed:
            continue
        kept = {_OUTPUTS + shaped.layer.name: shaped.outputs.values, _COUNT: sums.arrays[SAMPLES]}
        if shaped.inputs is not None and not shaped.constant:
            kept[_INPUTS + shaped.layer.name] = shaped.inputs.values
        return kept
    return {}


def head_posterior(
    state: Mapping[str, Tensor], weights: Tensor, d2: int, known: Mapping[Layer, Eigen], asked: tuple[str, str]
) -> FactoredPosterior:
    """For flat weights [d] of a network with d2 outputs; `known` are spectra of constant input factors. Before they are
    known, their sums lie in the state: `asked` is what stands before a layer's name there, and the name of their count.
    """
    names = [name.removeprefix(_OUTPUTS) for name in state if name.startswith(_OUTPUTS)]
    if not names:
        raise ConfigError("no factors of a last linear layer were kept: no round has ended, or the network has none")
    layer, samples = Layer.parse(names[0]), state[_COUNT]
    outputs, W = state[_OUTPUTS + names[0]], layer.matrices(weights.detach().cpu(), 1, d2)[0]
    A = known.get(layer)
    if A is None:
        values, count = state.get(_INPUTS + names[0]), samples
        if values is None:
            values, count = state[asked[0] + names[0]], state[asked[1]]
        A = eigen(Factor(values, values.shape[1] == W.shape[1]), count)
    return FactoredPosterior(A, eigen(Factor(outputs, outputs.shape[1] == d2), samples), float(samples), W)
