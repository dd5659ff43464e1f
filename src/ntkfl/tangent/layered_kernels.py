# mypy: ignore-errors
"""GPU kernels of `layered.py`, in Triton: a product with the kernel in three launches, what surrounds it in the last.

All arrays are padded with zeros to whole tiles, so that no load needs a mask: N rows, C columns, H units. Every number
of a large matrix product is the sum of two halves, x = high + low, of 11 bits each, and the product is three products
of halves on tensor cores, summed in float32: what is left out, low times low, is below float32's rounding. Numbers are
scaled by powers of two first, so that the largest of a matrix is near 2^11 and the low half of all that count is no
subnormal number: Z once, layer by layer, X by a bound on the state, each row of W by its largest number.
"""

from __future__ import annotations

import triton
import triton.language as tl

BN = 32  # rows per program of `back` and `spread`
BC = 64  # columns per program of `there`
PARTS = 9  # into which rows are cut, so that `there` has a program for each of an H200's 132 multiprocessors, nearly
THERE = {"BK": 64, "num_warps": 4, "num_stages": 3}  # BK: terms summed at a time
BACK = {"BK": 64, "num_warps": 8, "num_stages": 3}
_TOP = tl.constexpr(1024.0)  # what a power of two below the largest number becomes


@triton.jit
def _power_below(x):
    """The largest power of two up to x, which is positive; 1e-30's for less than that."""
    bits = tl.maximum(x, 1e-30).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _store_halves(high, low, i, x):
    upper = x.to(tl.float16)
    tl.store(high + i, upper)
    tl.store(low + i, (x - upper.to(tl.float32)).to(tl.float16))


@triton.jit
def there(Zh, Zl, Xh, Xl, parts, C, rows, H: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):
    """parts[k] = (Zᵀ X)ᵀ over the k-th `rows` rows, [H, C]."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    h = tl.arange(0, H)
    k = tl.program_id(1)
    acc = tl.zeros((BC, H), tl.float32)
    for r in range(0, rows, BK):
        n = k * rows + r + tl.arange(0, BK)
        i, j = n[None, :] * C + c[:, None], n[:, None] * H + h[None, :]
        zh, zl = tl.load(Zh + i), tl.load(Zl + i)
        xh, xl = tl.load(Xh + j), tl.load(Xl + j)
        acc += tl.dot(zh, xh, tl.dot(zh, xl, tl.dot(zl, xh)))  # tensor cores truncate what they add up to
    tl.store(parts + k * H * C + h[None, :] * C + c[:, None], acc)


@triton.jit
def total(parts, same, Wh, Wl, scales, at, C, H: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """W / scales [H, C], of W = the sum of all parts where unit and column are of the same layer; and the next row of
    the table. A program per unit.
    """
    h = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    i, there = h * C + c, c < C
    acc = tl.load(parts + i, mask=there, other=0.0)
    for k in tl.static_range(1, PARTS):
        acc += tl.load(parts + k * H * C + i, mask=there, other=0.0)
    acc *= tl.load(same + i, mask=there, other=0.0)
    power = _power_below(tl.max(tl.abs(acc), 0))
    w = acc * (_TOP / power)
    upper = w.to(tl.float16)
    tl.store(Wh + i, upper, mask=there)
    tl.store(Wl + i, (w - upper.to(tl.float32)).to(tl.float16), mask=there)
    tl.store(scales + h, power / _TOP)
    if h == 0:
        tl.store(at, tl.load(at) + 1)


@triton.jit
def spread(
    y, slope, control, table, numbers, at, older, newer, M, st, Xh, Xl, N,
    D2: tl.constexpr, OP: tl.constexpr, H: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The first state of a step, newer = row[2] y + h row[3] slope, and X of it; older = y.

    control [3]: h, the table's first row for such a step, and a bound on ‖R_n‖ over its states.
    """
    n, o, h = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, OP), tl.arange(0, H)
    i, there = n[None, :] * D2 + o[:, None], o[:, None] < D2
    size, first = tl.load(control), tl.load(control + 1).to(tl.int64)
    scale = _TOP / _power_below((tl.load(control + 2) * tl.load(numbers + 2)).to(tl.float32))
    before = tl.load(y + i, mask=there, other=0.0)
    new = tl.load(table + first * 5 + 2) * before
    new += size * tl.load(table + first * 5 + 3) * tl.load(slope + i, mask=there, other=0.0)
    tl.store(older + i, before, mask=there)
    tl.store(newer + i, new, mask=there)
    m = tl.load(M + o[:, None] * H + h[None, :])
    s = tl.load(st + h[:, None] * N + n[None, :])
    x = tl.dot(tl.trans(m), new.to(tl.float32), input_precision="tf32x3") * s * scale
    _store_halves(Xh, Xl, n[:, None] * H + h[None, :], tl.trans(x))
    if tl.program_id(0) == 0:
        tl.store(at, first)
        tl.store(numbers + 3, size)
        tl.store(numbers + 4, scale.to(tl.float64))


@triton.jit
def back(
    Zh, Zl, Wh, Wl, scales, st, M, f0, Y, numbers, y, slope, table, at, older, newer, end, out, sums, Xh, Xl, N, C,
    D2: tl.constexpr, OP: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DO: tl.constexpr,
):  # fmt: skip
    """Θ R of BN rows, and then, by DO: 0: out = (η/N) Θ R; 1: out = the slope r(f0 + (η/N) Θ R); 2: older = the state
    of the next stage, all five states and slopes combined by the table's row, and X of it; 3: as 1, and end = newer,
    and the squares that `norms` adds up; 4: out = (diag(p) − ppᵀ) (η/N) Θ R, p = softmax(f0).

    numbers [5]: η/N over the square of Z's scale; how many rows are not padding; max |s| ‖M‖; h; the scale of X.
    """
    n, h = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, H)
    acc = tl.zeros((H, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        i, j = h[:, None] * C + c[None, :], n[None, :] * C + c[:, None]
        wh, wl = tl.load(Wh + i), tl.load(Wl + i)
        zh, zl = tl.load(Zh + j), tl.load(Zl + j)
        acc += tl.dot(wh, zh, tl.dot(wh, zl, tl.dot(wl, zh)))
    o = tl.arange(0, OP)
    s = tl.load(st + h[:, None] * N + n[None, :])
    m = tl.load(M + o[:, None] * H + h[None, :])
    scale = tl.load(numbers + 4)
    factor = (tl.load(numbers) / scale).to(tl.float32)
    moved = factor * tl.dot(m, acc * tl.load(scales + h)[:, None] * s, input_precision="tf32x3")
    i, there = n[None, :] * D2 + o[:, None], o[:, None] < D2
    if DO == 0:
        tl.store(out + i, moved, mask=there)
    elif DO == 4:
        f = tl.load(f0 + i, mask=there, other=-float("inf"))
        p = tl.exp(f - tl.max(f, 0)[None, :])
        p = p / tl.sum(p, 0)[None, :]
        tl.store(out + i, (p * (moved - tl.sum(p * moved, 0)[None, :])).to(tl.float64), mask=there)
    else:
        f = tl.where(there, tl.load(f0 + i, mask=there, other=0.0) + moved, -float("inf"))
        powers = tl.exp(f - tl.max(f, 0)[None, :])
        r = tl.load(Y + i, mask=there, other=0.0) - powers / tl.sum(powers, 0)[None, :]
        r = tl.where(there & (n[None, :] < tl.load(numbers + 1)), r, 0.0).to(tl.float64)
        if DO == 2:
            row, size = table + tl.load(at) * 5, tl.load(numbers + 3)
            new = tl.load(row) * tl.load(older + i, mask=there, other=0.0)
            new += tl.load(row + 1) * tl.load(newer + i, mask=there, other=0.0)
            new += tl.load(row + 2) * tl.load(y + i, mask=there, other=0.0)
            new += size * tl.load(row + 3) * tl.load(slope + i, mask=there, other=0.0)
            new += size * tl.load(row + 4) * r
            tl.store(older + i, new, mask=there)
            x = tl.dot(tl.trans(m), new.to(tl.float32), input_precision="tf32x3") * s * scale.to(tl.float32)
            _store_halves(Xh, Xl, n[:, None] * H + h[None, :], tl.trans(x))
        else:
            tl.store(out + i, r, mask=there)
        if DO == 3:
            a, b = tl.load(y + i, mask=there, other=0.0), tl.load(newer + i, mask=there, other=0.0)
            v = tl.load(slope + i, mask=there, other=0.0)
            tl.store(end + i, b, mask=there)
            e = 0.8 * (a - b) + 0.4 * tl.load(numbers + 3) * (v + r)
            p, many = tl.program_id(0), tl.num_programs(0)
            tl.store(sums + p, tl.sum(e * e))
            tl.store(sums + many + p, tl.sum(a * a))
            tl.store(sums + 2 * many + p, tl.sum(b * b))
            tl.store(sums + 3 * many + p, tl.sum(v * v))
            tl.store(sums + 4 * many + p, tl.sum(r * r))


@triton.jit
def norms(sums, out, many, BLOCK: tl.constexpr):
    """out [5], in the host's memory: roots of the sums over programs."""
    i = tl.arange(0, BLOCK)
    for k in tl.static_range(5):
        tl.store(out + k, tl.sqrt(tl.sum(tl.load(sums + k * many + i, mask=i < many, other=0.0))))
