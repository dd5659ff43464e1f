# mypy: ignore-errors
"""GPU kernels of `layered.py`, in Triton: a product with the kernel in three launches, what surrounds it in the last.

All arrays are padded with zeros to whole tiles, so that no load needs a mask: N rows, C columns, H units. Matrix
products run on tensor cores, each as three products of TensorFloat-32 parts, which leave out what float32 would round
away, nearly.
"""

from __future__ import annotations

import triton
import triton.language as tl

BN = 32  # rows per program of `back` and `spread`
BC = 64  # columns per program of `there`
BK = 32  # terms summed at a time
LAUNCH = {"num_warps": 8, "num_stages": 3}  # of `there` and `back`: with fewer warps their registers do not suffice
PARTS = 9  # into which rows are cut, so that `there` has a program for each of an H200's 132 multiprocessors, nearly


@triton.jit
def there(Zt, Xt, parts, N, C, rows, H: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):
    """parts[k] = (Zᵀ X)ᵀ over the k-th `rows` rows, [H, C]."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    h = tl.arange(0, H)
    k = tl.program_id(1)
    acc = tl.zeros((BC, H), tl.float32)
    for r in range(0, rows, BK):
        n = k * rows + r + tl.arange(0, BK)
        z = tl.load(Zt + c[:, None] * N + n[None, :])
        x = tl.load(Xt + h[None, :] * N + n[:, None])
        acc += tl.dot(z, x, input_precision="tf32x3")
    tl.store(parts + k * H * C + h[None, :] * C + c[:, None], acc)


@triton.jit
def total(parts, same, W, at, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """W = the sum of all parts [H, C] where unit and column are of the same layer; and the next row of the table."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(parts + i)
    for k in tl.static_range(1, PARTS):
        acc += tl.load(parts + k * size + i)
    tl.store(W + i, acc * tl.load(same + i))
    if tl.program_id(0) == 0:
        tl.store(at, tl.load(at) + 1)


@triton.jit
def spread(
    y, slope, table, at, older, newer, M, st, Xt, N,
    D2: tl.constexpr, OP: tl.constexpr, H: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The first state of a step, newer = table[0, 2] y + table[0, 3] slope, and X of it; older = y."""
    n, o, h = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, OP), tl.arange(0, H)
    i, there = n[None, :] * D2 + o[:, None], o[:, None] < D2
    before = tl.load(y + i, mask=there, other=0.0)
    new = tl.load(table + 2) * before + tl.load(table + 3) * tl.load(slope + i, mask=there, other=0.0)
    tl.store(older + i, before, mask=there)
    tl.store(newer + i, new, mask=there)
    m = tl.load(M + o[:, None] * H + h[None, :])
    s = tl.load(st + h[:, None] * N + n[None, :])
    tl.store(Xt + h[:, None] * N + n[None, :], tl.dot(tl.trans(m), new.to(tl.float32), input_precision="tf32x3") * s)
    if tl.program_id(0) == 0:
        tl.store(at, tl.zeros((), tl.int64))


@triton.jit
def back(
    Z, W, st, M, f0, Y, numbers, y, slope, table, at, older, newer, out, Xt, N, C,
    D2: tl.constexpr, OP: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DO: tl.constexpr,
):  # fmt: skip
    """Θ R of BN rows, and then, by DO: 0: out = (η/N) Θ R; 1: out = the slope r(f0 + (η/N) Θ R); 2: older = the state
    of the next stage, all five states and slopes combined by the table's row, and X of it.

    numbers [2]: η/N, and how many rows are not padding.
    """
    n, h = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, H)
    acc = tl.zeros((H, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        w = tl.load(W + h[:, None] * C + c[None, :])
        z = tl.load(Z + n[None, :] * C + c[:, None])
        acc += tl.dot(w, z, input_precision="tf32x3")
    o = tl.arange(0, OP)
    s = tl.load(st + h[:, None] * N + n[None, :])
    m = tl.load(M + o[:, None] * H + h[None, :])
    moved = tl.load(numbers).to(tl.float32) * tl.dot(m, acc * s, input_precision="tf32x3")
    i, there = n[None, :] * D2 + o[:, None], o[:, None] < D2
    if DO == 0:
        tl.store(out + i, moved, mask=there)
    else:
        f = tl.where(there, tl.load(f0 + i, mask=there, other=0.0) + moved, -float("inf"))
        powers = tl.exp(f - tl.max(f, 0)[None, :])
        r = tl.load(Y + i, mask=there, other=0.0) - powers / tl.sum(powers, 0)[None, :]
        r = tl.where(there & (n[None, :] < tl.load(numbers + 1)), r, 0.0).to(tl.float64)
        if DO == 1:
            tl.store(out + i, r, mask=there)
        else:
            row = table + tl.load(at) * 5
            new = tl.load(row) * tl.load(older + i, mask=there, other=0.0)
            new += tl.load(row + 1) * tl.load(newer + i, mask=there, other=0.0)
            new += tl.load(row + 2) * tl.load(y + i, mask=there, other=0.0)
            new += tl.load(row + 3) * tl.load(slope + i, mask=there, other=0.0)
            new += tl.load(row + 4) * r
            tl.store(older + i, new, mask=there)
            x = tl.dot(tl.trans(m), new.to(tl.float32), input_precision="tf32x3") * s
            tl.store(Xt + h[:, None] * N + n[None, :], x)
