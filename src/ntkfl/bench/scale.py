"""How a round grows: memory and time a sample at one aggregator, and the same round spread over several."""

from __future__ import annotations

import torch

from ntkfl.bench.inputs import synthetic
from ntkfl.bench.memory import added_bytes
from ntkfl.bench.race import race, relative
from ntkfl.bench.rows import Row, Setting
from ntkfl.models import mlp
from ntkfl.tangent import Evolution, evolve, jacobian
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.stacking import StackedJacobian

_SHARDS = 8
_LR = 0.01


def scale(setting: Setting) -> list[Row]:
    """A round's update for more and more samples, 784-100-10, and the same in eight parts."""
    large = (10_000, 100_000, 1_000_000) if setting.device.type == "cuda" else (1_000, 10_000, 40_000)
    rows = []
    for samples in (200,) if setting.quick else large:
        rows += _rows(samples, setting)
    return rows


def _rows(samples: int, setting: Setting) -> list[Row]:
    x, y = (part.to(setting.device) for part in synthetic(samples))
    torch.manual_seed(0)
    model = mlp(784, 100, 10).to(setting.device)
    with torch.no_grad():
        f0 = model(x)
    J = jacobian(model, x)
    stored = sum(t.numel() * t.element_size() for block in _blocks(J) for t in block)
    size = -(-samples // _SHARDS)
    # What eight aggregators would each hold: every product is theirs alone, every transposed product a sum of theirs.
    parts = [J[start : start + size] for start in range(0, samples, size)]
    shards = StackedJacobian([part for part in parts if isinstance(part, BlockJacobian)])

    def update(of: Jacobian) -> Evolution:
        evolution = evolve(of, f0, y, _LR)
        evolution.deltas()
        return evolution

    peak = added_bytes(setting.device, lambda: update(J))
    whole, apart = update(J), update(shards)
    timed = race({"whole": lambda: update(J), "apart": lambda: update(shards)}, 2, setting)
    products, d = whole.statistics.evaluations, J.shape[2]
    about = {
        "samples": samples,
        "jacobian_bytes_a_sample": stored / samples,
        "working_bytes_a_sample": peak / samples,
        "kernel_products": products,
    }
    # In every product the parts' sums [d] are added up and given back.
    exchanged = {"exchanged_bytes_a_part": 2.0 * 4 * d * apart.statistics.evaluations}
    seconds, difference = timed["whole"].seconds, relative(apart.deltas(), whole.deltas())
    note = f"{stored / samples / 1e3:.1f} + {peak / samples / 1e3:.1f} kB a sample, {products} kernel products"
    return [
        Row(f"{samples:,} samples", seconds, 1.0, note=note, details=about, ours=True),
        Row(
            f"  in {_SHARDS} parts",
            timed["apart"].seconds,
            timed["apart"].seconds / seconds,
            difference=difference,
            note=f"each exchanges {exchanged['exchanged_bytes_a_part'] / 1e6:.0f} MB",
            details=exchanged,
        ),
    ]


def _blocks(J: Jacobian) -> list[tuple[torch.Tensor, ...]]:
    assert isinstance(J, BlockJacobian)
    return [tuple(block.tensors()) for block in J.blocks]
