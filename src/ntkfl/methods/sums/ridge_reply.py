"""A client's sums for ridge regression on their way to the server: exact, or in 8 bits.

Exact, G travels as its triangle. In 8 bits, Σφ and the variances still travel as they are, and what is rounded are
correlations: with m = Σφ/n, S = G_φφ − n m mᵀ and c_i = √S_ii,

    r_ij = S_ij / (c_i c_j),   i < j,

so that neither a large mean nor a feature of another size costs the others their digits. A bucket of r shares its
largest value, and r is rounded at random without bias: errors of many clients average out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.replies import SAMPLES, Sums
from ntkfl.methods.sums.last_layer import last_layer
from ntkfl.methods.task import Task
from ntkfl.tangent.ridge import RidgeSums
from ntkfl.wire.message import Message
from ntkfl.wire.quantize import dequantize, norm_count, quantize

if TYPE_CHECKING:
    from ntkfl.methods.sums.sum_ridge import SumRidge

Values = Literal["float32", "8bit"]
NAMES = (SAMPLES, "gram", "cross", "squares")
REDUCED = (SAMPLES, "sums", "variances", "correlations", "scales", "cross", "squares")
FRESH, TAG = "fresh", "tag"
_BITS, _BUCKET = 8, 4096
_SMALL = 1e-12  # a variance below this part of the largest counts as that

Uniform = Callable[[int], NDArray[np.float64]]


class RidgeReply(Sums):
    """n, G, C and q of a client (`tangent/ridge.py`), or how they changed: `ridge`.

    `fresh` [] uint8 is 1 from a client that sends for the first time. Where the server keeps each client's sums, `tag`
    [] stands in its place: a number that the server gave to this client alone.
    """

    additive = False
    _sizes: Tensor

    @classmethod
    def blank(cls, method: SumRidge, task: Task, question: Message) -> Self:  # type: ignore[override]
        p = last_layer(task.model, task.outputs).module.in_features + 1
        zeros = partial(torch.zeros, dtype=torch.float64)
        sums = RidgeSums(zeros(()), zeros(p, p), zeros(p, task.outputs), zeros(()))
        arrays = pack_sums(sums, task.like.dtype, method.values, np.zeros)
        mark = {TAG: question.take(TAG, ())} if TAG in question.arrays else {FRESH: torch.tensor(1, dtype=torch.uint8)}
        return cls(arrays | mark)

    @property
    def ridge(self) -> RidgeSums:
        """In float64, decoded at every call: G takes p² numbers, of which a cohort's replies need not all be held."""
        return read_sums(self.arrays)

    @property
    def is_new(self) -> bool:
        """Whether these are all of a client's sums, rather than how they changed."""
        return FRESH in self.arrays and int(self.take(FRESH, ())) == 1

    @property
    def tag(self) -> int:
        """The number that the server gave to this client alone."""
        return int(self.take(TAG, ()))

    def check(self, task: Task) -> None:
        """Decodes the sums once, for their form and size."""
        sums, layer = self.ridge, last_layer(task.model, task.outputs).module
        p, outputs = sums.cross.shape
        if (p, outputs) != (layer.in_features + 1, task.outputs):
            raise MessageError(f"sums over {p - 1} features and {outputs} outputs do not fit the last layer {layer}")
        if int(self.take(TAG if TAG in self.arrays else FRESH, ())) not in (0, 1) and FRESH in self.arrays:
            raise MessageError("sums are new or they are not: fresh is 0 or 1")
        samples = sums.samples.abs()
        self._sizes = torch.stack([samples, sums.gram.norm() / samples.clamp(min=1)]).reshape(1, 2)

    def sizes(self, task: Task) -> Tensor:
        """Its samples, and the norm of its mean G: [1, 2]."""
        return self._sizes


def pack_sums(sums: RidgeSums, dtype: torch.dtype, values: Values, uniform: Uniform) -> dict[str, Tensor]:
    """Arrays by name: exact numbers in `dtype`, correlations as `values` says (float32: everything exact).

    `uniform(count)` draws numbers in [0, 1), for rounding.
    """
    if values == "float32":
        return exact_arrays(sums, dtype)
    # What the server will compute with: rounded before anything is derived from it.
    samples, first = (part.to(dtype).double() for part in (sums.samples, sums.gram[-1, :-1]))
    S = sums.gram[:-1, :-1] - _outer(first, samples)
    variances = S.diagonal().to(dtype).double()
    c = _scales(variances)
    i, j = torch.triu_indices(len(S), len(S), offset=1)
    r = (S / torch.outer(c, c))[i, j].cpu()
    levels, norms = quantize(r, _BITS, uniform, "max", _BUCKET)
    coded = {"correlations": torch.from_numpy(levels.astype(np.int8)), "scales": torch.from_numpy(norms)}
    exact = {SAMPLES: samples, "sums": first, "variances": variances, "cross": sums.cross, "squares": sums.squares}
    return {name: array.to(dtype).cpu() for name, array in exact.items()} | coded


def exact_arrays(sums: RidgeSums, dtype: torch.dtype) -> dict[str, Tensor]:
    """All of it in `dtype`, G as its upper triangle: p (p + 1) / 2 numbers."""
    i, j = torch.triu_indices(*sums.gram.shape)
    arrays = zip(NAMES, (sums.samples, sums.gram[i, j], sums.cross, sums.squares), strict=True)
    return {name: array.to(dtype).cpu() for name, array in arrays}


def read_sums(arrays: Mapping[str, Tensor]) -> RidgeSums:
    """The inverse of `pack_sums`, in float64; `MessageError` for arrays that are missing or do not fit together."""
    reduced = "correlations" in arrays
    names = REDUCED if reduced else NAMES
    if missing := [name for name in names if name not in arrays]:
        raise MessageError(f"sums for ridge regression lack {', '.join(missing)}")
    arrays = {name: arrays[name] for name in names}
    return _reduced(arrays) if reduced else unfold({name: array.double() for name, array in arrays.items()})


def unfold(arrays: Mapping[str, Tensor]) -> RidgeSums:
    """Sums with all of G's triangle."""
    samples, triangle, cross, squares = (arrays[name] for name in NAMES)
    p = _rows(samples, cross, squares)
    if triangle.shape != (p * (p + 1) // 2,):
        raise MessageError("sums whose shapes do not fit together")
    gram = triangle.new_zeros(p, p)
    i, j = torch.triu_indices(p, p)
    gram[i, j] = triangle
    gram[j, i] = triangle
    return RidgeSums(samples, gram, cross, squares)


def _reduced(arrays: Mapping[str, Tensor]) -> RidgeSums:
    """G_ij = r_ij c_i c_j + n m_i m_j."""
    exact = (SAMPLES, "sums", "variances", "cross", "squares")
    samples, first, variances, cross, squares = (arrays[name].double() for name in exact)
    coded, scales = arrays["correlations"], arrays["scales"]
    p = _rows(samples, cross, squares)
    F, pairs = p - 1, (p - 1) * (p - 2) // 2
    fits = coded.shape == (pairs,) and scales.shape == (norm_count(pairs, _BUCKET),)
    if not fits or first.shape != (F,) or variances.shape != (F,):
        raise MessageError("sums whose shapes do not fit together")
    if coded.dtype != torch.int8 or scales.dtype != torch.float32 or bool((scales < 0).any()):
        raise MessageError("correlations are bytes, and scales are not negative")
    r = dequantize(coded.numpy().astype(np.int32), scales.numpy(), _BITS, _BUCKET)
    c = _scales(variances)
    S = torch.diag(variances)
    i, j = torch.triu_indices(F, F, offset=1)
    S[i, j] = S[j, i] = r * c[i] * c[j]
    gram = S.new_empty(p, p)
    gram[:-1, :-1] = S + _outer(first, samples)
    gram[-1, :-1] = gram[:-1, -1] = first
    gram[-1, -1] = samples
    if not bool(gram.isfinite().all()):
        raise MessageError("sums that overflow")
    return RidgeSums(samples, gram, cross, squares)


def _rows(samples: Tensor, cross: Tensor, squares: Tensor) -> int:
    """p, the features and one."""
    p = cross.shape[0] if cross.ndim == 2 else 0
    if samples.ndim or squares.ndim or p < 2:
        raise MessageError("sums whose shapes do not fit together")
    return p


def _outer(first: Tensor, samples: Tensor) -> Tensor:
    """n m mᵀ; of a change of sums, which need not be of more samples, nothing is taken out."""
    return torch.outer(first, first) / samples if float(samples) > 0 else first.new_zeros(len(first), len(first))


def _scales(variances: Tensor) -> Tensor:
    """c [F]; ones where no variance is above zero."""
    top = float(variances.abs().max())
    return variances.abs().clamp(min=_SMALL * top).sqrt() if top > 0 else torch.ones_like(variances)
