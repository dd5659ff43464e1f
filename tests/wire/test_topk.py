"""The codec against its specification spelled out bit by bit, its error bounds, and bytes that are no code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.privacy.sparsify import kept, sparsify, top_k
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.wire import Message
from ntkfl.wire.topk import pack_topk, topk_form, unpack_topk

VALUES = ("float32", "8bit")
every_kind = pytest.mark.parametrize("values_as", VALUES)


def encode(values: Tensor, positions: Tensor, n: int, values_as: str = "8bit") -> dict[str, Tensor]:
    """Rows of k of n values, as a Jacobian of one output: arrays by name, without what describes the network."""
    arrays = pack_topk(Jacobian([SparseBlock(values, positions, 1, n)], 1, n), values_as)
    return {name.removeprefix("topk."): a for name, a in arrays.items() if name != "jacobian"}


def decode(
    arrays: dict[str, Tensor], n: int, k: int, values_as: str = "8bit", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(values, positions) of what `encode` made."""
    sent = {"jacobian": torch.tensor([1, n])} | {f"topk.{name}": a for name, a in arrays.items()}
    J = unpack_topk(Message("rows", 1, sent), 1, n, k, values_as, torch.zeros(1, dtype=dtype))
    positions, values = J.tensors()
    return values, positions


def row_bytes(n: int, k: int, values_as: str = "8bit") -> int:
    return sum(width * dtype.itemsize for dtype, width in topk_form(n, k, values_as).values())


def spelled(positions: list[int], n: int) -> bytes:
    """A row of positions as the module's docstring has it, one character a bit."""
    k = len(positions)
    low = math.floor(math.log2(n / k))
    stream = ["0"] * (k * low + k + (n - 1) // 2**low)
    for i, p in enumerate(positions):
        for j in range(low):
            stream[i * low + j] = str(p // 2**j % 2)
        stream[k * low + p // 2**low + i] = "1"
    text = "".join(stream)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def rows_of(N: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return top_k(torch.randn(N, n, generator=g), k)


def size_of(arrays: dict[str, Tensor]) -> int:
    return sum(a[0].numel() * a.element_size() for a in arrays.values())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """values [N, k] of any float32, positions [N, k], n."""
    n = draw(st.integers(1, 70) | st.integers(1, 2**34))
    k = draw(st.integers(1, min(n, 12)))
    rows = draw(st.lists(st.sets(st.integers(0, n - 1), min_size=k, max_size=k).map(sorted), min_size=1, max_size=3))
    number = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(0.0)
    values = [[draw(number) for _ in range(k)] for _ in rows]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(rows), n


def bound(values: Tensor, values_as: str) -> Tensor:
    """The largest error that the module's docstring admits, value by value, in float64."""
    exact = values.double().abs()
    if values_as == "float32":
        return 0 * exact
    hi = exact.amax(1, keepdim=True)
    lo = torch.where(exact > 0, exact, torch.inf).amin(1, keepdim=True)
    ratio = torch.where(hi > 0, hi / lo, 1.0)
    return exact * (ratio ** (1 / 252) * (1 + 1e-6) - 1) + torch.where(exact > 0, 2.0**-150, 0.0)


# What is right.


def test_the_bits_of_a_row_by_hand() -> None:
    """n = 20, k = 3: l = 2, and 3·2 + 3 + 4 bits. 1 = 0·4 + 01, 7 = 1·4 + 11, 18 = 4·4 + 10."""
    arrays = encode(torch.tensor([[1.0, -2.0, 4.0]]), torch.tensor([[1, 7, 18]]), 20)
    low, high = "10" + "11" + "01", "1010001"
    assert len(low + high) == 13
    assert arrays["positions"].tolist() == [[int((low + high)[:8][::-1], 2), int((low + high)[8:][::-1], 2)]]
    assert arrays["scale"].tolist() == [[1.0, 4.0]]
    assert arrays["values"].tolist() == [[1, 128 + 64, 127]]  # 2 = 1·4^(63/126)
    assert row_bytes(20, 3) == 2 + 3 + 8


@settings(max_examples=200, deadline=None)
@given(cases())
def test_rows_are_what_the_specification_says_and_come_back(case: tuple[Tensor, Tensor, int]) -> None:
    values, positions, n = case
    k = values.shape[1]
    for values_as in VALUES:
        arrays = encode(values, positions, n, values_as)
        for row, data in zip(positions.tolist(), arrays["positions"], strict=True):
            assert bytes(data.tolist()) == spelled(row, n)
        assert size_of(arrays) == row_bytes(n, k, values_as)
        back, where = decode(arrays, n, k, values_as, torch.float64)
        assert torch.equal(where, positions)
        assert bool(((back - values.double()).abs() <= bound(values, values_as)).all())
        assert torch.equal(back == 0, values == 0)
        assert bool((back * values.double().sign() >= 0).all())
        assert torch.equal(decode(arrays, n, k, values_as)[0].double(), back)  # all are float32 numbers


def test_the_papers_row_in_bytes() -> None:
    assert row_bytes(211_100, 6_333, "8bit") == 5_575 + 6_333 + 8
    assert row_bytes(211_100, 6_333, "float32") == 5_575 + 4 * 6_333


@pytest.mark.parametrize("ratio", [1.0, 1.5, 10.0, 1e3, 1e30])
def test_eight_bits_err_by_half_a_step_of_the_logarithm(ratio: float) -> None:
    """The bound is met everywhere, and nearly reached: it could not be stated lower."""
    lo = 1e-4
    values = torch.logspace(0, math.log10(ratio), 20_001, dtype=torch.float64).mul_(lo).unsqueeze(0)
    values[:, ::2] *= -1
    positions = torch.arange(20_001).unsqueeze(0)
    arrays = encode(values, positions, 20_001, "8bit")
    back, _ = decode(arrays, 20_001, 20_001, "8bit", torch.float64)
    worst = float((back / values - 1).abs().max())
    hi, lo32 = float(arrays["scale"][0, 1]), float(arrays["scale"][0, 0])
    stated = (hi / lo32) ** (1 / 252) - 1
    assert worst <= stated + 2e-7
    assert worst > 0.9 * stated - 2e-7
    assert float(back[0, 0]) == -lo32
    assert abs(float(back[0, -1])) == hi


# What is wrong.


def broken(name: str, at: int, value: float, values_as: str = "8bit") -> dict[str, Tensor]:
    """n = 20, k = 3, two rows; one number of the first changed."""
    arrays = encode(torch.tensor([[1.0, -2, 4]] * 2), torch.tensor([[1, 7, 18]] * 2), 20, values_as)
    arrays[name][0, at] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "values_as", "reason"),
    [
        (broken("positions", 1, 0b0011_0001), "8bit", "bits too many"),  # bits 13 to 15 are to spare
        (broken("positions", 1, 0b1_1111), "8bit", "does not name 3"),
        (broken("values", 0, 128), "8bit", "means nothing"),
        (broken("scale", 0, math.nan), "8bit", "not finite"),
        (broken("scale", 0, 5.0), "8bit", "least and largest"),
        (broken("scale", 0, 4.0), "8bit", "means nothing"),
        (broken("values", 0, math.nan, "float32"), "float32", "not finite"),
        (broken("values", 0, 1, "float32"), "8bit", "missing or too many: topk.scale"),
        ({}, "8bit", "consist of topk.positions, topk.values, topk.scale"),
    ],
)
def test_what_rows_must_not_say(arrays: dict[str, Tensor], values_as: str, reason: str) -> None:
    with pytest.raises(MessageError, match=reason) as caught:
        decode(arrays, 20, 3, values_as)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("low", ["10" + "10" + "01", "11" + "10" + "01"])
def test_positions_out_of_order(low: str) -> None:
    """Two in the first group of four, 1 and 1, or 3 and 1."""
    arrays, stream = broken("values", 0, 1), low + "1100001"
    arrays["positions"][0] = torch.tensor([int(stream[:8][::-1], 2), int(stream[8:][::-1], 2)])
    with pytest.raises(MessageError, match="increase strictly"):
        decode(arrays, 20, 3)


def test_positions_past_the_end() -> None:
    """n = 18 and 20 have rows of one size, but 18 is beyond the first."""
    arrays = broken("values", 0, 1)
    assert row_bytes(18, 3) == row_bytes(20, 3)
    with pytest.raises(MessageError, match="below 18"):
        decode(arrays, 18, 3)


@every_kind
def test_sizes_are_exact(values_as: str) -> None:
    good = encode(*rows_of(2, 100, 7), 100, values_as)
    for name in good:
        wider = torch.cat([good[name], good[name][:, :1]], dim=1)
        for bad in (good[name][:, :-1], good[name][:1], good[name][0], good[name][0, 0], good[name].double(), wider):
            with pytest.raises(MessageError, match=r"must be|has shape"):
                decode(good | {name: bad}, 100, 7, values_as)
    with pytest.raises(MessageError, match="has shape"):
        decode(good, 100, 8, values_as)


# Sparsified Jacobians in messages.


def jacobian(precision: torch.dtype = torch.float32) -> ntkfl.Jacobian:
    J = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3).to(precision), torch.randn(4, 6, dtype=precision))
    return sparsify(J, 0.8)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@every_kind
def test_a_sparse_jacobian_survives_the_wire(values_as: str, precision: torch.dtype) -> None:
    J = jacobian(precision)
    k = kept(0.8, 3 * 53)
    sent = Message("rows", 3, pack_topk(J, values_as)).encode()
    back = unpack_topk(Message.decode(sent), 3, 53, k, values_as, torch.zeros(1, dtype=precision))
    assert back.layout == J.layout  # type: ignore[attr-defined]
    assert back.dtype == precision
    assert torch.equal(back.tensors()[0], J.tensors()[0])
    error = (back.tensors()[1].double() - J.tensors()[1].double()).abs()
    assert bool((error <= bound(J.tensors()[1], values_as) + 2.0**-24 * J.tensors()[1].double().abs()).all())
    assert values_as != "float32" or precision != torch.float32 or not bool(error.any())
    rows = 4 * row_bytes(3 * 53, k, values_as)
    assert rows < len(sent) < rows + 150


def test_only_sparse_jacobians_travel_so() -> None:
    whole = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3), torch.randn(4, 6))
    for J in (whole, ntkfl.concatenate([whole, jacobian()])):
        with pytest.raises(MessageError, match="call sparsify first"):
            pack_topk(J)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jacobian": torch.tensor([3, 99])}, "another network"),
        ({"jacobian": torch.tensor([3])}, "has shape"),
        ({"topk.more": torch.zeros(4, 1)}, "consist of"),
    ],
)
def test_hostile_uploads_are_refused(changes: dict[str, Tensor], reason: str) -> None:
    message = Message("rows", 1, pack_topk(jacobian()) | changes)
    with pytest.raises(MessageError, match=reason):
        unpack_topk(Message.decode(message.encode()), 3, 53, 32, "8bit", torch.zeros(1))
