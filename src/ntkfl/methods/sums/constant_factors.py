"""Factors whose inputs do not depend on any trained weight: the same in every round, so `sum-ntk-fl` asks for them in a
few rounds only.

While they are asked for, the server's state holds their total, its samples and the number of cohorts; then their
spectra.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.errors import TooFew
from ntkfl.methods.task import State
from ntkfl.tangent import Sums
from ntkfl.tangent.flow import Eigen, eigen
from ntkfl.tangent.sums import Factor, Layer

TOTAL, COUNT = "total/", "constant_samples"
_SETTLED = 0.1  # part of a mean's norm by which a cohort may still change it
_VALUES, _VECTORS, _COHORTS = "values/", "vectors/", "constant_cohorts"


def no_factors_yet(weights: Tensor) -> State:
    """Before the first round: no samples and no cohorts are behind them."""
    return {COUNT: torch.zeros((), dtype=weights.dtype, device=weights.device), _COHORTS: torch.tensor(0)}


def still_asked(state: State) -> bool:
    """Whether the round's question asks for them."""
    return _COHORTS in state


def spectra_of(state: State) -> dict[Layer, Eigen]:
    """By layer, once factors are no longer asked for."""
    known = {n.removeprefix(_VALUES): t for n, t in state.items() if n.startswith(_VALUES)}
    return {Layer.parse(name): Eigen(t, state.get(_VECTORS + name)) for name, t in known.items()}


def constant_factors(state: State, sums: Sums, fresh: int, most: int) -> tuple[State, dict[Layer, Eigen]]:
    """What the next state holds of them, and their spectra by layer. `fresh` samples of this round are behind them.

    They are asked for until a cohort changes every mean by less than a tenth of its norm, in `most` rounds at most.
    """
    if not still_asked(state):
        return {name: t for name, t in state.items() if name.startswith((_VALUES, _VECTORS))}, spectra_of(state)
    count, cohorts = state[COUNT] + fresh, int(state[_COHORTS]) + 1
    kept, spectra, moved = {COUNT: count, _COHORTS: torch.tensor(cohorts)}, {}, 0.0
    for shaped in sums.layers():
        if not shaped.constant or shaped.inputs is None:
            continue
        if float(count) < 1:
            raise TooFew("no client sent the factor of its inputs: they sent it before, and it was lost")
        before = state.get(TOTAL + shaped.layer.name)
        total = shaped.inputs.values if before is None else before + shaped.inputs.values
        kept[TOTAL + shaped.layer.name] = total
        spectra[shaped.layer] = eigen(Factor(total, shaped.inputs.form), count)
        change = total / count if before is None else total / count - before / state[COUNT]
        moved = max(moved, float(change.norm() / (total / count).norm().clamp(min=1e-30)))
    if moved > _SETTLED and cohorts < most:
        return kept, spectra
    kept = {_VALUES + layer.name: own.values for layer, own in spectra.items()}
    vectors = {_VECTORS + layer.name: own.vectors for layer, own in spectra.items() if own.vectors is not None}
    return kept | vectors, spectra
