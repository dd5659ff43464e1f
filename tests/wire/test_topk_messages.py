"""Sparsified Jacobians in messages: exact but for values' rounding, and nothing but an error for anything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.wire import Message
from ntkfl.wire.topk import VALUES, pack_topk, topk_bytes, unpack_topk
from tests.wire.test_topk import bound

every_kind = pytest.mark.parametrize("values_as", VALUES)


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
    assert torch.equal(back.tensors()[1], J.tensors()[1])
    error = (back.tensors()[0].double() - J.tensors()[0].double()).abs()
    assert bool((error <= bound(J.tensors()[0], values_as) + 2.0**-24 * J.tensors()[0].double().abs()).all())
    assert values_as != "float32" or precision != torch.float32 or not bool(error.any())
    rows = 4 * topk_bytes(3 * 53, k, values_as)
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
        ({"topk.values": torch.zeros(3, 32, dtype=torch.uint8)}, "must be"),
        ({"topk.positions": torch.zeros(4, 16, dtype=torch.uint8)}, "must be|does not name"),
    ],
)
def test_hostile_uploads_are_refused(changes: dict[str, Tensor], reason: str) -> None:
    message = Message("rows", 1, pack_topk(jacobian()) | changes)
    with pytest.raises(MessageError, match=reason):
        unpack_topk(Message.decode(message.encode()), 3, 53, 32, "8bit", torch.zeros(1))
