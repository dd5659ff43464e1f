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
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ntkfl.tangent.chebyshev import MOST_STAGES, Attempt, Stepper, attempt_norms, stage_table
from ntkfl.tangent.cuda_graph import capture
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.linear_product import common_factor, identical
from ntkfl.tangent.losses import CrossEntropy, Loss

_ROWS = 576  # rows are rounded up to a multiple of this, which the tiles of every kernel divide
_MOST_UNITS, _MOST_OUTPUTS = 128, 32
_MOST_NUMBERS = 2**26  # of all inputs: 256 MiB, of which there are two copies
_KEPT = 4  # sets of buffers
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

    roundings = 4  # of float32, by which a product is off: 3.6 were measured

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

        double = partial(room, dtype=torch.float64)
        self._Z, self._Zt, self._st, self._Xt = room(rows, C), room(C, rows), room(H, rows), room(H, rows)
        self._M, self._W, self._same = room(self._sizes["OP"], H), room(H, C), room(H, C)
        self._parts = room(layered_kernels.PARTS, H, C)
        self._f0, self._Y, self._product = (room(rows, outputs) for _ in range(3))
        self._numbers, self._at = double(2), torch.zeros(1, dtype=torch.int64, device=device)
        self._table = double(MOST_STAGES + 1, 5)
        self._table[-1, 2] = 1.0  # what is given, as it is
        self._given, self._slope, self._zero = (double(rows, outputs) for _ in range(3))
        self._states = double(2, rows, outputs)  # the last two stages'
        self._ends = double(2, 2, rows, outputs)  # of two steps in turn: the state, and the slope there
        self._pinned = torch.zeros(self._table.shape, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._norms = double(5)
        column, unit = 0, 0
        for n, h in zip(inputs, units, strict=True):
            self._same[unit : unit + h, column : column + n + 1] = 1
            column, unit = column + n + 1, unit + h
        work: dict[tuple[str, int, int], Callable[[], None]] = {
            ("product", 0, 0): partial(self._of_given, 0, self._product),
            ("slope", 0, 0): partial(self._of_given, 1, self._slope),
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
            self._Z[:N, column : column + n] = a
            self._Z[:N, column + n] = float(bias)
            self._M[:outputs, unit : unit + h] = M
            self._st[unit : unit + h, :N] = s.mT
            column, unit = column + n + 1, unit + h
        self._Z[N:], self._st[:, N:] = 0.0, 0.0  # of earlier rounds
        self._Zt.copy_(self._Z.mT)
        self._f0[:N], self._Y[:N] = f0, Y
        for tensor in (self._ends, self._given):
            tensor.zero_()
        self._numbers.copy_(torch.tensor([rate, N], dtype=torch.float64))
        self._N, self.evaluations = N, 0

    def product(self, v: Tensor) -> Tensor:
        """(η/N) Θ v in float32."""
        self._given[: self._N] = v
        self._replay("product")
        return self._product[: self._N].clone()

    def evaluate(self, y: Tensor) -> Tensor:
        self.evaluations += 1
        self._given[: self._N] = y
        self._replay("slope")
        return self._slope[: self._N].clone()

    def step(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
        state = self._states[self._advance(self._slot(y, slope), h, stages), : self._N].clone()
        if state.is_cuda:  # from now on the table may be overwritten
            torch.cuda.current_stream(state.device).synchronize()
        return state

    def attempt(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Attempt:
        """The tensors stay as they are until the attempt after the next."""
        slot = self._slot(y, slope)
        self._replay("finish", slot, self._advance(slot, h, stages))
        self.evaluations += 1
        return Attempt(*self._ends[1 - slot, :, : self._N], *self._norms.tolist())

    def _slot(self, y: Tensor, slope: Tensor) -> int:
        """Which of both ends holds y and its slope; they are put there where none does."""
        for slot in (0, 1):
            if y.data_ptr() == self._ends[slot].data_ptr():
                return slot
        self._ends[0, 0, : self._N], self._ends[0, 1, : self._N] = y, slope
        return 0

    def _advance(self, slot: int, h: float, stages: int) -> int:
        """A step from the end in this slot; which of both states is the last one then."""
        table = stage_table(stages)
        torch.mul(table, table.new_tensor([1, 1, 1, h, h]), out=self._pinned[:stages])
        self._table[:stages].copy_(self._pinned[:stages], non_blocking=True)
        self._replay("begin", slot)
        for j in range(stages - 1):
            self._replay("stage", slot, j % 2)
        self.evaluations += stages - 1
        return stages % 2

    def _replay(self, name: str, slot: int = 0, last: int = 0) -> None:
        self._graphs[name, slot, last].replay()

    # What the graphs are of.

    def _of_given(self, do: int, out: Tensor) -> None:
        self._spread(self._given, self._zero, self._table[-1])
        self._back(do, 0, self._states[0], self._states[1], out)

    def _begin(self, slot: int) -> None:
        self._spread(self._ends[slot, 0], self._ends[slot, 1], self._table)

    def _stage(self, slot: int, last: int) -> None:
        self._back(2, slot, self._states[last], self._states[1 - last], self._slope)

    def _finish(self, slot: int, last: int) -> None:
        (y, slope), (state, fresh) = self._ends[slot], self._ends[1 - slot]
        state.copy_(self._states[last])
        self._back(1, slot, self._states[0], self._states[1], fresh)
        self._norms.copy_(attempt_norms(y, state, slope, fresh, self._table[0, 4]))

    def _spread(self, y: Tensor, slope: Tensor, table: Tensor) -> None:
        rooms = (*self._states, self._M, self._st, self._Xt)
        programs = (self._rows // self._kernels.BN,)
        self._kernels.spread[programs](
            y, slope, table, self._at, *rooms, self._rows, **self._sizes, BN=self._kernels.BN
        )

    def _back(self, do: int, slot: int, older: Tensor, newer: Tensor, out: Tensor) -> None:
        """From X to what `do` says in `back`."""
        k, rows, (H, C) = self._kernels, self._rows, self._W.shape
        k.there[C // k.BC, k.PARTS](
            self._Zt, self._Xt, self._parts, rows, C, rows // k.PARTS, H=H, BC=k.BC, BK=k.BK, **k.LAUNCH
        )
        k.total[(H * C // 512,)](self._parts, self._same, self._W, self._at, H * C, PARTS=k.PARTS, BLOCK=512)
        given = (self._Z, self._W, self._st, self._M, self._f0, self._Y, self._numbers)
        step = (*self._ends[slot], self._table, self._at, older, newer, out, self._Xt)
        k.back[(rows // k.BN,)](*given, *step, rows, C, **self._sizes, BN=k.BN, BK=k.BK, DO=do, **k.LAUNCH)


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


def _power_of_two(n: int) -> int:
    """The least that is not below n, and 16 at least: what Triton's tiles may measure."""
    return max(16, 1 << (n - 1).bit_length())
