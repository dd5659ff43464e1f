"""Jacobians on the wire: every block comes back bit by bit, and what does not fit the network is refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.wire.jacobians import pack_jacobian, unpack_jacobian
from ntkfl.wire.message import Message, join_rows, split_rows
from tests.tangent.architectures import ARCHITECTURES, build


class Everything(nn.Module):
    """A block of every kind: embedding, convolution, scale, linear and, for the positions, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 3), nn.Parameter(torch.randn(6, 3))
        self.conv, self.norm, self.out = nn.Conv1d(3, 4, 3, stride=2), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv((self.tokens(x) + self.positions).mT)).flatten(1)
        return self.out(torch.tanh(self.norm(h)))


@cache
def everything(precision: torch.dtype = torch.float32) -> Jacobian:
    torch.manual_seed(0)
    J = ntkfl.jacobian(Everything().to(precision), torch.randint(0, 40, (4, 6)))
    return J


def received(message: Message, J: ntkfl.tangent.Jacobian) -> Jacobian:
    return unpack_jacobian(Message.decode(message.encode()), J.shape[1], J.shape[2], torch.zeros(1, dtype=J.dtype))


def assert_same(a: Jacobian, b: Jacobian) -> None:
    assert a.layout == b.layout
    assert [type(block) for block in a.blocks] == [type(block) for block in b.blocks]
    for left, right in zip(a.tensors(), b.tensors(), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_a_jacobian_survives_the_wire_bit_by_bit(precision: torch.dtype) -> None:
    J = everything(precision)
    assert_same(received(Message("rows", 3, pack_jacobian(J)), J), J)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_survives_and_splits_by_sample(name: str) -> None:
    model, x = build(name)
    for form in ("auto", "factored"):
        try:
            J = ntkfl.jacobian(model, x, form=form)
        except ntkfl.errors.ModelError:
            continue
        message = Message("rows", 3, pack_jacobian(J))
        assert_same(received(message, J), J)
        rows = split_rows(message.arrays)
        assert len(rows) == len(x)
        assert_same(received(Message("rows", 3, rows[2]), J), J[2])
        assert_same(received(Message("rows", 3, join_rows(rows)), J), J)


def test_an_upload_costs_what_its_factors_weigh() -> None:
    J = ntkfl.jacobian(ntkfl.models.mlp(784, 100, 10), torch.randn(200, 784))
    sent = len(Message("rows", 1, pack_jacobian(J)).encode())
    numbers = 200 * (784 + 1000 + 100 + 100)
    assert numbers * 4 < sent < numbers * 4 + 300


FIT = "do not fit the weights they claim"


class TestHostileUploads:
    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("jacobian", torch.tensor([3, 99]), "another network"),
            ("0.spans", torch.tensor([[0, 30], [30, 99]]), "outside the network"),
            ("0.spans", torch.tensor([[0, 30], [-5, 0]]), "outside the network"),
            ("0.spans", torch.tensor([[0, 29], [30, 35]]), FIT),
            ("0.spans", torch.tensor([[0, 30]]), FIT),
            ("0.spans", torch.tensor([[-1, -1], [30, 35]]), FIT),
            ("0.spans", torch.tensor([[0.0, 30.0], [30.0, 35.0]]), "int64"),
            ("0.spans", torch.tensor([[5, 35], [35, 40]]), "claim the same weights"),
            ("0.a", torch.zeros(3, 1, 6), FIT),
            ("0.a", torch.zeros(4, 0, 6), FIT),
            ("0.a", torch.zeros(4, 6), FIT),
            ("0.a", torch.zeros(4, 1, 6, dtype=torch.int32), FIT),
            ("0.a", torch.full((4, 1, 6), float("nan")), "not finite"),
            ("0.layer", torch.tensor([9]), "unknown kind"),
            ("0.layer", torch.tensor([-1]), "unknown kind"),
            ("0.layer", torch.tensor([], dtype=torch.int64), "unknown kind"),
            ("0.layer", torch.tensor([0, 1]), FIT),
            ("0.layer", torch.tensor([1]), FIT),
            ("1.g", torch.zeros(4, 2, 3), "has shape"),
            ("1.a", torch.zeros(5, 1, 5), "has shape"),
        ],
    )
    def test_of_a_perceptron(self, name: str, value: Tensor, why: str) -> None:
        J = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3), torch.randn(4, 6))
        with pytest.raises(MessageError, match=why):
            received(Message("rows", 1, pack_jacobian(J) | {name: value}), J)

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("0.a", torch.full((4, 6), 40, dtype=torch.int32), FIT),  # tokens beyond the vocabulary
            ("0.a", torch.full((4, 6), -1, dtype=torch.int32), FIT),
            ("0.a", torch.zeros(4, 6), FIT),
            ("0.a", torch.zeros(4, 5, dtype=torch.int32), FIT),
            ("1.layer", torch.tensor([1, 3, 1, 0, 1, 1]), FIT),  # kernel, stride, padding, dilation, groups
            ("1.layer", torch.tensor([1, 3, 2, 3, 1, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 2, -1, 1, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 0, 0, 1, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 2, 0, 0, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 2, 0, 1, 3]), FIT),
            ("1.layer", torch.tensor([1, 3, 2, 0, 1, 0]), FIT),
            ("1.layer", torch.tensor([1, 3, 2**40, 0, 1, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 10**9, 15 * 10**8, 10**9, 1]), FIT),  # two positions, gigabytes of padding
            ("1.layer", torch.tensor([1, 9, 2, 0, 1, 1]), FIT),
            ("1.layer", torch.tensor([1, 3, 2, 0, 1]), FIT),
            ("1.a", torch.zeros(4, 1, 3, 2), FIT),
            ("2.a", torch.zeros(4, 2, 4), FIT),
            ("4.spans", torch.zeros(0, 2, dtype=torch.int64), "does not say"),
            ("4.spans", torch.tensor([[120, 138], [-1, -1]]), "does not say"),
            ("4.values", torch.zeros(4, 3, 17), "has shape"),
        ],
    )
    def test_of_every_block(self, name: str, value: Tensor, why: str) -> None:
        J = everything()
        assert name in pack_jacobian(J)
        with pytest.raises(MessageError, match=why):
            received(Message("rows", 1, pack_jacobian(J) | {name: value}), J)

    def test_without_rows(self) -> None:
        with pytest.raises(MessageError, match="without a Jacobian"):
            unpack_jacobian(Message("rows", 1, {"jacobian": torch.tensor([3, 53])}), 3, 53, torch.zeros(1))

    @given(st.data())
    @settings(max_examples=300, deadline=None)
    def test_damage_is_refused_or_a_jacobian_of_the_network(self, data: st.DataObject) -> None:
        J = everything()
        arrays = pack_jacobian(J)
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(arrays)))
            arrays[name] = data.draw(damaged(arrays[name]))
        try:
            other = received(Message("rows", 1, arrays), J)
        except MessageError:
            return
        assert other.shape[1:] == J.shape[1:]
        delta, R = torch.randn(J.shape[2]), torch.randn(other.shape[:2])
        dense = other.dense()
        assert torch.allclose(other.jvp(delta), dense @ delta, atol=1e-2, rtol=1e-3)
        assert torch.allclose(other.vjp(R), torch.einsum("nj,njd->d", R, dense), atol=1e-2, rtol=1e-3)
        assert torch.allclose(other.kernel() * 3, torch.einsum("ajd,bjd->ab", dense, dense), atol=1e-2, rtol=1e-3)


@st.composite
def damaged(draw: st.DrawFn, array: Tensor) -> Tensor:
    """The array with an entry, its type or its shape changed."""
    how = draw(st.sampled_from(["entry", "type", "shape", "cut", "empty"]))
    if how == "entry" and array.numel():
        out = array.clone()
        value = draw(st.integers(-3, 200)) if not array.is_floating_point() else draw(st.floats(-9, 9, width=32))
        out.view(-1)[draw(st.integers(0, array.numel() - 1))] = value
        return out
    if how == "type":
        return array.to(draw(st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8])))
    if how == "cut" and array.ndim:
        dim = draw(st.integers(0, array.ndim - 1))
        return array.narrow(dim, 0, draw(st.integers(0, array.shape[dim])))
    if how == "shape":
        shape = draw(st.permutations(array.shape))
        return array.reshape([*shape, 1] if draw(st.booleans()) else shape)
    return array.new_zeros(draw(st.lists(st.integers(0, 4), max_size=4)))
