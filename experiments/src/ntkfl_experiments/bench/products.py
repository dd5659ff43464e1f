"""One product with the full kernel, R ↦ J Jᵀ R, in several forms and precisions, each against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ntkfl.models import mlp
from ntkfl.tangent import jacobian
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.linear_product import Sensitivities, sensitivities
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting

_LOW_BITS = -(2**13)  # of a float32: without them it is a TensorFloat-32


def products(setting: Setting) -> list[BenchRow]:
    """A kernel product: forms of the sensitivities, and precisions."""
    N, side, hidden = (60, 4, 8) if setting.quick else (4000, 28, 100)
    x, _, called = (*synthetic(N, side), "synthetic images") if setting.quick else fashion(N)
    torch.manual_seed(0)
    J = jacobian(mlp(side**2, hidden, 10).to(setting.device), x.to(setting.device))
    assert isinstance(J, BlockJacobian)
    R = torch.randn(N, 10, generator=torch.Generator().manual_seed(0)).to(setting.device)
    exact = J.double()
    ways: dict[str, Callable[[], Tensor]] = {
        "ours, float32": lambda: J.product(R),
        "sensitivities as they came": lambda: _as_they_came(J, R),
        "float64": lambda: exact.product(R.double()),
    }
    if setting.device.type == "cuda":
        parts = [_Split(block) for block in J.blocks if isinstance(block, LinearBlock)]

        def reduced(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
            def way() -> Tensor:
                with _tf32():
                    return make()

            return way

        ways["TensorFloat-32"] = reduced(lambda: J.product(R))
        ways["three TensorFloat-32"] = reduced(lambda: torch.stack([part.product(R) for part in parts]).sum(0))
    timed = race(ways, 5, setting)
    ours, true = timed["ours, float32"].seconds, timed["float64"].result
    flop = 4.0 * N * hidden * (side**2 + 10)
    notes = {"ours, float32": f"N={N:,} {called}, {side**2}-{hidden}-10; differences are from float64"}
    return [
        BenchRow(
            name,
            timing.seconds,
            timing.seconds / ours,
            flop=flop,
            difference=None if name == "float64" else relative(timing.result, true),
            note=notes.get(name, ""),
        )
        for name, timing in timed.items()
    ]


def _as_they_came(J: BlockJacobian, R: Tensor) -> Tensor:
    """Through every layer's own `transpose` and `apply`, all of g read twice."""
    blocks = [block for block in J.blocks if isinstance(block, FactoredBlock)]
    return torch.stack([FactoredBlock.product(block, R) for block in blocks]).sum(0)


class _Split:
    """A linear layer's product with its inputs as two TensorFloat-32 numbers each, a ≈ high + low: of the four products
    of such sums the one of both low parts is left out, and the others are one matrix product of three times the length.
    """

    def __init__(self, block: LinearBlock) -> None:
        a = block.a[:, 0]
        Z = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
        high, low = _halves(Z)
        self.down, self.across = torch.cat([high, high, low]), torch.cat([high, high, low], dim=1)
        self.S: Sensitivities = sensitivities(block.g)

    def product(self, R: Tensor) -> Tensor:
        high, low = _halves(self.S.back(R))
        weight = self.down.mT @ torch.cat([high, low, high])
        high, low = _halves(weight)
        return self.S.there(self.across @ torch.cat([high, low, high]))


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    high = (values.contiguous().view(torch.int32) & _LOW_BITS).view(torch.float32)
    return high, values - high


@contextmanager
def _tf32() -> Iterator[None]:
    switch = torch.backends.cuda.matmul
    before, switch.allow_tf32 = switch.allow_tf32, True
    try:
        yield
    finally:
        switch.allow_tf32 = before
