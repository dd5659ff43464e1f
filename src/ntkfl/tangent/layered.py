"""The flow of cross-entropy along a network of linear layers, all of it in a few kernels of a GPU.

Where the sensitivities of every layer have a common factor, g_n = M diag(s_n) (`linear_product.py`), as in networks of
one hidden layer, the layers' kernels are one: with the inputs of all layers side by side, Z [N, C], and likewise M
[d2, H] and s [N, H],

    Θ R = ((Z W) ∘ s) Mᵀ,   W = (Zᵀ X) ∘ E,   X = (R M) ∘ s

E being 1 where a column and a unit are of the same layer, else 0. `layered_kernels.py` computes that, the residuals and
a stage of the integrator in three launches, where PyTorch takes twenty.

Buffers and graphs are made once for so many rows, rounded up, and serve every round: rows beyond the last have inputs,
residuals and states of zero, so that they change no sum.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ntkfl.tangent.chebyshev import MOST_STAGES, Attempt, Stepper, stage_table
from ntkfl.tangent.cuda_graph import capture
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.linear_product import common_factor, identical
from ntkfl.tangent.losses import CrossEntropy, Loss

_ROWS = 576  # rows are rounded up to a multiple of this, which the tiles of every kernel divide
_MOST_UNITS, _MOST_OUTPUTS = 128, 32
_MOST_NUMBERS = 2**26  # of all inputs: 256 MiB, and as much for their halves
_KEPT = 4  # sets of buffers
_MOST_ROWS, _MOST_COLUMNS = 2**20, 2**13  # for which kernels are compiled in a second or two
_TOP = 11  # the largest number of a layer's Z, scaled, is near two to the power of this
_LAST = 127  # float32's largest power of two is two to the power of this
_own = threading.local()  # a thread's sets, by the sizes they are for


class CommonFactors(NamedTuple):
    """Inputs a [N, n], whether a bias trains, and M [d2, h] and s [N, h] with g_n = M diag(s_n)."""

    a: Tensor
    bias: bool
    M: Tensor
    s: Tensor


class LayeredFlow(Stepper):
    """Slopes and steps of R' = r(f0 + (η/N) Θ R), R [N, d2] in float64, of what `load` was given: at most `rows` rows
    of layers with so many inputs and units.
    """

    roundings = 4  # of float32, by which a product is off: 3.9 on an H200, at the size of the paper

    def __init__(
        self, rows: int, outputs: int, inputs: Sequence[int], units: Sequence[int], device: torch.device
    ) -> None:
        from ntkfl.tangent import layered_kernels  # Triton, which comes with PyTorch for CUDA alone

        super().__init__(self.evaluate)
        self._kernels, self._rows, self._N = layered_kernels, rows, 0
        H, C = _power_of_two(sum(units)), -(-sum(n + 1 for n in inputs) // layered_kernels.BC) * layered_kernels.BC
        self._sizes = {"D2": outputs, "OP": _power_of_two(outputs), "H": H}

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        double, half = partial(room, dtype=torch.float64), partial(room, dtype=torch.float16)
        self._Z, self._st, self._M, self._same = room(rows, C), room(H, rows), room(self._sizes["OP"], H), room(H, C)
        self._Zs, self._Xs, self._Ws = half(2, rows, C), half(2, rows, H), half(2, H, C)  # high and low halves
        self._parts, self._scales = room(layered_kernels.PARTS, H, C), room(H)
        self._f0, self._Y, self._f, self._product = (room(rows, outputs) for _ in range(4))
        self._numbers, self._at = double(5), torch.zeros(1, dtype=torch.int64, device=device)
        self._table = double(2 * MOST_STAGES, 5)
        self._table[0, 2] = 1.0  # what is given, as it is
        self._starts, self._filled = dict[int, int](), 1
        self._given, self._slope, self._zero = (double(rows, outputs) for _ in range(3))
        self._states = double(2, rows, outputs)  # the last two stages'
        self._ends = double(2, 2, rows, outputs)  # of two steps in turn: the state, and the slope there
        self._views: list[tuple[Tensor, Tensor]] = []  # these, without padding
        self._lengths = [(0.0, 0.0), (0.0, 0.0)]  # and their norms
        self._sums = double(5, rows // layered_kernels.BN)
        # Norms are written where they are read, in the host's memory; a step's control is copied from there at once, as
        # programs that all read it there would wait for each other.
        pinned = partial(torch.zeros, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._given_step, self._norms = pinned(3), pinned(5)
        self._control = self._given_step.numpy()
        self._step, self._of_state = double(3), double(3)  # the latter of a state that is given
        column, unit = 0, 0
        for n, h in zip(inputs, units, strict=True):
            self._same[unit : unit + h, column : column + n + 1] = 1
            column, unit = column + n + 1, unit + h
        work: dict[tuple[str, int, int], Callable[[], None]] = {
            ("product", 0, 0): partial(self._evaluate, 0, self._product),
            ("slope", 0, 0): partial(self._evaluate, 1, self._slope),
            ("curvature", 0, 0): partial(self._evaluate, 4, self._slope),
        }
        for slot in (0, 1):
            work["begin", slot, 0] = partial(self._begin, slot)
            for last in (0, 1):
                work["stage", slot, last] = partial(self._stage, slot, last)
                work["finish", slot, last] = partial(self._finish, slot, last)
        self._graphs = dict(zip(work, capture(device, *work.values()), strict=True))

    def load(self, layers: Sequence[CommonFactors], f0: Tensor, Y: Tensor, rate: float) -> None:
        """Take layers, outputs f0 and targets Y [N, d2], and η/N."""
        N, outputs = f0.shape
        column, unit = 0, 0
        for a, bias, M, s in layers:
            n, h = a.shape[1], M.shape[1]
            own, factors = self._Z[:N, column : column + n + 1], self._st[unit : unit + h, :N]
            own[:, :n], own[:, n], factors[:] = a, float(bias), s.mT
            self._M[:outputs, unit : unit + h] = M
            # A power of two for each layer: small inputs of one are not lost beside large ones of another.
            size = _exponent(a, bias)
            own.mul_(torch.exp2(_TOP - size))
            factors.mul_(torch.exp2(size))
            column, unit = column + n + 1, unit + h
        self._Z[N:], self._st[:, N:] = 0.0, 0.0  # of an earlier flow
        self._Zs[0] = self._Z
        self._Zs[1] = self._Z.sub_(self._Zs[0])
        self._f0[:N], self._Y[:N] = f0, Y
        for tensor in (self._ends, self._given):
            tensor.zero_()
        self._numbers[0] = rate / 4**_TOP
        self._numbers[1] = N
        self._numbers[2] = (self._M.norm(dim=0) * self._st.abs().amax(1)).amax()
        self._views = [(state[:N], slope[:N]) for state, slope in self._ends]
        self._N, self.evaluations = N, 0

    def product(self, v: Tensor) -> Tensor:
        """(η/N) Θ v in float32."""
        self._given[: self._N] = v
        self._replay("product")
        return self._product[: self._N].clone()

    def evaluate(self, y: Tensor) -> Tensor:
        self.evaluations += 1
        return self._of("slope", y)

    def stiffness(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ (η/N) Λ Θ v with Λ the loss's curvature at R = y: the flow's Jacobian there, times −1."""
        torch.add(self._f0[: self._N], self.product(y), out=self._f[: self._N])
        return partial(self._of, "curvature")

    def _of(self, what: str, given: Tensor) -> Tensor:
        self._given[: self._N] = given
        self._replay(what)
        return self._slope[: self._N].clone()

    def step(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
        state = self._states[self._advance(self._slot(y, slope), h, stages), : self._N].clone()
        self._wait()  # from now on the control may be overwritten
        return state

    def attempt(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Attempt:
        """The tensors stay as they are until the attempt after the next."""
        slot = self._slot(y, slope)
        self._replay("finish", slot, self._advance(slot, h, stages))
        self.evaluations += 1
        self._wait()
        error, before, after, speed_before, speed = self._norms.tolist()
        self._lengths[1 - slot] = after, speed
        return Attempt(*self._views[1 - slot], error, before, after, speed_before, speed)

    def _wait(self) -> None:
        if self._Z.is_cuda:
            torch.cuda.current_stream(self._Z.device).synchronize()

    def _slot(self, y: Tensor, slope: Tensor) -> int:
        """Which of both ends holds y and its slope; they are put there where none does."""
        for slot, (own, _) in enumerate(self._views):
            if y.data_ptr() == own.data_ptr():
                return slot
        for own, given in zip(self._views[0], (y, slope), strict=True):
            own.copy_(given)
        self._lengths[0] = float(y.norm()), float(slope.norm())
        return 0

    def _advance(self, slot: int, h: float, stages: int) -> int:
        """A step from the end in this slot; which of both states is the last one then."""
        length, speed = self._lengths[slot]
        self._control[:] = h, self._start(stages), length + 2 * h * speed  # states of a stable step go no further
        self._replay("begin", slot)
        for j in range(stages - 1):
            self._replay("stage", slot, j % 2)
        self.evaluations += stages - 1
        return stages % 2

    def _start(self, stages: int) -> int:
        """The first row of the table for a step of so many stages, which is kept there."""
        if stages not in self._starts:
            if self._filled + stages > len(self._table):
                self._starts, self._filled = {}, 1
            self._table[self._filled : self._filled + stages] = stage_table(stages).to(self._table.device)
            self._starts[stages] = self._filled
            self._filled += stages
        return self._starts[stages]

    def _replay(self, name: str, slot: int = 0, last: int = 0) -> None:
        self._graphs[name, slot, last].replay()

    # What the graphs are of.

    def _evaluate(self, do: int, out: Tensor) -> None:
        """Of the state that is given, which no row is longer than the root of d2 times its largest number."""
        torch.mul(self._given.abs().amax(), self._given.shape[1] ** 0.5, out=self._of_state[2])
        self._spread(self._given, self._zero, self._of_state)
        self._back(do, 0, self._states[0], self._states[1], out)

    def _begin(self, slot: int) -> None:
        y, slope = self._ends[slot]
        self._step.copy_(self._given_step, non_blocking=True)
        self._spread(y, slope, self._step)

    def _stage(self, slot: int, last: int) -> None:
        self._back(2, slot, self._states[last], self._states[1 - last], self._slope)

    def _finish(self, slot: int, last: int) -> None:
        end, fresh = self._ends[1 - slot]
        self._back(3, slot, self._states[1 - last], self._states[last], fresh, end)
        many = self._sums.shape[1]
        self._kernels.norms[(1,)](self._sums, self._norms, many, BLOCK=_power_of_two(many))

    def _spread(self, y: Tensor, slope: Tensor, control: Tensor) -> None:
        read, rooms = (self._table, self._numbers, self._at), (*self._states, self._M, self._st, *self._Xs)
        self._kernels.spread[(self._rows // self._kernels.BN,)](
            y, slope, control, *read, *rooms, self._rows, **self._sizes, BN=self._kernels.BN
        )

    def _back(self, do: int, slot: int, older: Tensor, newer: Tensor, out: Tensor, end: Tensor | None = None) -> None:
        """From X to what `do` says in `back`."""
        k, rows, (H, C) = self._kernels, self._rows, self._same.shape
        k.there[C // k.BC, k.PARTS](*self._Zs, *self._Xs, self._parts, C, rows // k.PARTS, H=H, BC=k.BC, **k.THERE)
        made = (*self._Ws, self._scales)
        k.total[(H,)](self._parts, self._same, *made, self._at, C, H=H, PARTS=k.PARTS, BLOCK=_power_of_two(C))
        given = (*self._Zs, *made, self._st, self._M, self._f if do == 4 else self._f0, self._Y, self._numbers)
        step = (*self._ends[slot], self._table, self._at, older, newer, newer if end is None else end, out)
        rooms = (self._sums, *self._Xs)
        k.back[(rows // k.BN,)](*given, *step, *rooms, rows, C, **self._sizes, BN=k.BN, DO=do, **k.BACK)


def layered_flow(J: Jacobian, f0: Tensor, Y: Tensor, rate: float, loss: Loss) -> LayeredFlow | None:
    """The flow ready for these rows, where J is on a GPU and such layers are all there is to it; else None."""
    if (
        J.device.type != "cuda"
        or J.dtype != torch.float32
        or type(loss) is not CrossEntropy
        or getattr(_own, "no", False)
    ):
        return None
    layers = layers_of(J)
    if layers is None:
        return None
    inputs, units = [layer.a.shape[1] for layer in layers], [layer.M.shape[1] for layer in layers]
    rows = -(-len(f0) // _ROWS) * _ROWS
    if sum(units) > _MOST_UNITS or f0.shape[1] > _MOST_OUTPUTS or rows * sum(inputs) > _MOST_NUMBERS:
        return None
    if rows > _MOST_ROWS or sum(inputs) > _MOST_COLUMNS:
        return None
    sizes = (rows, f0.shape[1], tuple(inputs), tuple(units), J.device)
    kept: OrderedDict[Any, LayeredFlow] = _own.__dict__.setdefault("kept", OrderedDict())
    if sizes not in kept:
        try:
            kept[sizes] = LayeredFlow(*sizes)
        except Exception as error:  # no Triton, no compiler for it, a GPU it does not know: whatever it may raise
            torch.cuda.synchronize(J.device)
            logging.getLogger(__name__).warning("products with the kernel take their slower way: %s", error)
            _own.no = not isinstance(error, torch.OutOfMemoryError)  # which may pass
            return None
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    kept.move_to_end(sizes)
    kept[sizes].load(layers, f0, Y, rate)
    return kept[sizes]


def layers_of(J: Jacobian) -> list[CommonFactors] | None:
    """The layers of a Jacobian that consists of linear layers with common factors; else None."""
    blocks = J.blocks if isinstance(J, BlockJacobian) else ()
    layers = []
    for block in blocks:
        if not isinstance(block, LinearBlock) or block.T != 1:
            return None
        if identical(block.g):
            d2 = block.g.shape[1]
            found = torch.eye(d2, dtype=J.dtype, device=J.device), block.g.new_ones(len(J), d2)
        elif (common := common_factor(block.g)) is not None:
            found = common
        else:
            return None
        layers.append(CommonFactors(block.a[:, 0], block.bias is not None, *found))
    return layers or None


def _exponent(a: Tensor, bias: bool) -> Tensor:
    """e [] with a layer's largest input, or the 1 of its bias, just below 2^e; or near that, where float32 has no 2^e
    or no 2^(_TOP − e).
    """
    exponent: Tensor = torch.linalg.vector_norm(a, math.inf).clamp_min(float(bias)).frexp().exponent
    return exponent.clamp(_TOP - _LAST, _LAST)


def _power_of_two(n: int) -> int:
    """The least that is not below n, and 16 at least: what Triton's tiles may measure."""
    return max(16, 1 << (n - 1).bit_length())
