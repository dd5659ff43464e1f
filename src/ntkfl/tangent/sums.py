"""Sums over samples that curvature is made of, and what their names and shapes say of the network."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ntkfl.errors import MessageError

GRADIENT, SAMPLES, REST = "gradient", "samples", "rest"
INPUTS, CONSTANT, SHARED, OUTPUTS = "inputs", "constant", "shared", "outputs"
_LAYER = re.compile(r"(\d{1,12})-(\d{1,12})(?:\+(\d{1,12})-(\d{1,12}))?(T?)")
_ROLE = re.compile(r"(inputs|constant|shared|outputs)(\.diagonal|\.sketch)?")
DIAGONAL, SKETCH = ".diagonal", ".sketch"
_SEEN = (INPUTS, CONSTANT, SHARED)  # roles of A: a layer has one of them at most
Span = tuple[int, int]


class Layer(NamedTuple):
    """Columns whose block of C is A ⊗ G: matrices [outputs, inputs], or the other way round where `transposed`."""

    weight: Span
    bias: Span | None
    transposed: bool  # an embedding's [tokens, features]

    @staticmethod
    def at(weight: slice, bias: slice | None, transposed: bool = False) -> Layer:
        """The layer whose weight and bias have these columns."""
        return Layer((weight.start, weight.stop), None if bias is None else (bias.start, bias.stop), transposed)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Columns of the weight, and of the bias if the layer has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def name(self) -> str:
        """As arrays are named: columns of the weight, of the bias, and T where transposed."""
        bias = "" if self.bias is None else f"+{self.bias[0]}-{self.bias[1]}"
        return f"{self.weight[0]}-{self.weight[1]}{bias}{'T' * self.transposed}"

    @staticmethod
    def parse(name: str) -> Layer:
        """The inverse of `name`."""
        match = _LAYER.fullmatch(name)
        if match is None:
            raise MessageError(f"{name!r} names no layer")
        w0, w1, b0, b1, transposed = match.groups()
        return Layer((int(w0), int(w1)), None if b0 is None else (int(b0), int(b1)), bool(transposed))

    def matrices(self, vector: Tensor, groups: int, outputs: int) -> Tensor:
        """Its columns of a vector [d] as [groups, outputs, inputs], a bias as the last input."""
        weight = vector[slice(*self.weight)]
        weight = weight.view(-1, outputs).T.unsqueeze(0) if self.transposed else weight.view(groups, outputs, -1)
        if self.bias is None:
            return weight
        return torch.cat([weight, vector[slice(*self.bias)].view(groups, outputs, 1)], dim=-1)

    def write(self, vector: Tensor, matrices: Tensor) -> None:
        """The inverse of `matrices`, into the vector."""
        if self.bias is not None:
            vector[slice(*self.bias)] = matrices[..., -1].reshape(-1)
            matrices = matrices[..., :-1]
        vector[slice(*self.weight)] = (matrices[0].T if self.transposed else matrices).reshape(-1)


class Columns(NamedTuple):
    """Any columns, as a layer of one output whose inputs they are."""

    which: Tensor

    def matrices(self, vector: Tensor, groups: int, outputs: int) -> Tensor:
        """Its columns of a vector [d], [1, 1, k]."""
        return vector[self.which].view(groups, outputs, -1)

    def write(self, vector: Tensor, matrices: Tensor) -> None:
        """The inverse of `matrices`, into the vector."""
        vector[self.which] = matrices.view(-1)


def sketch_rank(n: int) -> int:
    """Columns that the sketch of a factor of n rows has."""
    return max(1, min(256, n // 4))


@lru_cache(maxsize=16)
def probe_matrix(n: int, rank: int) -> Tensor:
    """Ω [n, rank] with entries ±1/√n, float64: the same on every machine, so that sketches A Ω of one size add up."""
    words = np.random.Philox(key=n).random_raw((n * rank + 63) // 64)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: n * rank].astype(np.float64)
    return torch.from_numpy((2 * bits - 1) / math.sqrt(n)).view(n, rank)


@dataclass(frozen=True)
class Factor:
    """A symmetric matrix for each group, as `form` says: its upper triangle [groups, n(n+1)/2] (""), its diagonal
    [groups, n], or a sketch [groups, n, r+1]: A Ω with `probe_matrix(n, r)`, and behind it the diagonal.
    """

    values: Tensor
    form: str = ""

    @property
    def size(self) -> int:
        """n, or −1 where the array is no such factor."""
        if self.values.ndim != (3 if self.form == SKETCH else 2) or not self.values.numel():
            return -1
        _, numbers, *columns = self.values.shape
        if self.form == DIAGONAL:
            return numbers
        if self.form == SKETCH:
            return numbers if 1 < columns[0] <= numbers else -1
        n = (math.isqrt(8 * numbers + 1) - 1) // 2
        return n if n * (n + 1) // 2 == numbers else -1

    def square(self) -> Tensor:
        """[groups, n, n] of a triangle."""
        n = self.size
        rows, columns = torch.triu_indices(n, n, device=self.values.device)
        out = self.values.new_empty(len(self.values), n, n)
        out[:, rows, columns] = self.values
        out[:, columns, rows] = self.values
        return out


class Shaped(NamedTuple):
    """A layer as sums describe it. `inputs` is None where they were left out, `outputs` where C's block has no G."""

    layer: Layer
    inputs: Factor | None
    outputs: Factor | None
    constant: bool  # the inputs are of the samples alone, whatever the weights
    shared: bool = False  # positions share the weights: A and G have the trace of C's block, A ⊗ G / trace is meant

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, which are the matrices that each factor has, outputs, inputs with the bias)."""
        groups, n = len((self.outputs or self.inputs).values), 1 if self.outputs is None else self.outputs.size  # type: ignore[union-attr]
        start, stop = self.layer.weight
        return groups, n, (stop - start) // (groups * n) + (self.layer.bias is not None)


@dataclass(frozen=True)
class Sums:
    """Sums over samples by name, all additive: those of two sets of samples add up to those of both.

    `gradient` [d]; `samples` []; `<columns>/inputs` (`/constant` where they do not depend on any trained weight,
    `/shared` where positions share the weights) and `<columns>/outputs`, factors of the layer at these columns as
    triangles or, with `.diagonal` or `.sketch` behind the name, in that form; `rest`, the diagonal of C at all columns
    that no layer covers.
    """

    arrays: Mapping[str, Tensor]

    def __add__(self, other: Sums) -> Sums:
        if self.arrays.keys() != other.arrays.keys():
            raise MessageError("sums of different networks, or of different parts of one, do not add up")
        for name, array in self.arrays.items():
            if array.shape != other.arrays[name].shape:
                raise MessageError(f"sums whose {name!r} differ in shape do not add up")
        return Sums({name: array + other.arrays[name] for name, array in self.arrays.items()})

    def layers(self) -> list[Shaped]:
        """The layers in the order of their columns; `MessageError` where names and shapes are not of one network."""
        found: dict[Layer, dict[str, Factor]] = {}
        for name, array in self.arrays.items():
            if name in (GRADIENT, SAMPLES, REST):
                continue
            columns, _, kind = name.partition("/")
            layer, match = Layer.parse(columns), _ROLE.fullmatch(kind)
            if match is None:
                raise MessageError(f"{name!r} names no factor of a layer")
            role, factor = match[1], Factor(array, match[2] or "")
            roles = found.setdefault(layer, {})
            if role in roles or (role in _SEEN and roles.keys() & {*_SEEN}):
                raise MessageError(f"a factor of the layer at columns {layer.name} stands twice")
            if factor.size < 1 or (layer.bias is not None and layer.transposed):
                raise MessageError(f"{name!r} of shape {list(array.shape)} is no factor")
            roles[role] = factor
        layers = []
        for layer, roles in sorted(found.items(), key=lambda item: item[0].weight):
            seen = next((roles[role] for role in _SEEN if role in roles), None)
            if SHARED in roles and OUTPUTS not in roles:
                raise MessageError(f"one factor of two of the layer at columns {layer.name}")
            layers.append(Shaped(layer, seen, roles.get(OUTPUTS), CONSTANT in roles, SHARED in roles))
        self._check(layers)
        return layers

    def _check(self, layers: list[Shaped]) -> None:
        """Columns that are there and no layer shares, and factors whose sizes multiply to them."""
        d = self.arrays[GRADIENT].numel() if GRADIENT in self.arrays else None
        taken: list[Span] = []
        for shaped in layers:
            layer, (groups, n, m) = shaped.layer, shaped.shape
            weights = layer.weight[1] - layer.weight[0]
            wrong = weights <= 0 or groups * n * (m - (layer.bias is not None)) != weights
            wrong |= layer.bias is not None and layer.bias[1] - layer.bias[0] != groups * n
            wrong |= layer.transposed and groups != 1
            if shaped.inputs is not None:
                wrong |= shaped.inputs.size != m or len(shaped.inputs.values) != groups
            if wrong:
                raise MessageError(f"factors that do not fit the columns {layer.name}")
            taken += layer.spans
        taken.sort()
        if any(one[1] > two[0] for one, two in itertools.pairwise(taken)):
            raise MessageError("two layers that share columns")
        if d is None:
            return
        rest = d - sum(stop - start for start, stop in taken)
        if taken and taken[-1][1] > d:
            raise MessageError(f"a layer beyond the {d} weights there are")
        if (REST in self.arrays) != (rest > 0) or (rest and tuple(self.arrays[REST].shape) != (rest,)):
            raise MessageError(f"the layers leave {rest} columns, and the diagonal of the rest is of another size")


def is_constant(name: str) -> bool:
    """Whether an array is a factor of inputs that do not depend on any trained weight."""
    return name.partition("/")[2].startswith(CONSTANT)


@lru_cache(maxsize=32)
def uncovered(layers: tuple[Layer, ...], d: int, device: torch.device) -> Tensor:
    """The columns that no layer has, ascending; one tensor for all calls with these layers: do not write to it."""
    free = torch.ones(d, dtype=torch.bool)
    for layer in layers:
        for start, stop in layer.spans:
            free[start:stop] = False
    return free.nonzero().squeeze(1).to(device)
