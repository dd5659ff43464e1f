"""Messages and the Jacobian in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.wire import Message, pack_jacobian, pack_labels, unpack_jacobian


class WithConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conv(x.unsqueeze(1))).flatten(1))


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("model", [ntkfl.models.mlp(6, 5, 3), WithConvolution()])
def test_a_jacobian_survives_the_wire_bit_by_bit(model: nn.Module, form: str, precision: torch.dtype) -> None:
    model = model.to(precision)
    J = ntkfl.jacobian(model, torch.randn(4, 6, dtype=precision), form=form)
    sent = Message("upload", 3, pack_jacobian(J)).encode()
    back = unpack_jacobian(Message.decode(sent), J.shape[1], J.shape[2], torch.zeros(1, dtype=precision))
    assert back.layout == J.layout  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(back.tensors(), J.tensors(), strict=True))


def test_an_upload_costs_what_its_factors_weigh() -> None:
    J = ntkfl.jacobian(ntkfl.models.mlp(784, 100, 10), torch.randn(200, 784))
    sent = len(Message("upload", 1, pack_jacobian(J)).encode())
    numbers = 200 * (784 + 1000 + 100 + 100)
    assert numbers * 4 < sent < numbers * 4 + 300


def test_mixed_forms_are_sent_in_parts() -> None:
    model, x = ntkfl.models.mlp(6, 5, 3), torch.randn(4, 6)
    J = ntkfl.concatenate([ntkfl.jacobian(model, x), ntkfl.jacobian(model, x, form="dense")])
    with pytest.raises(MessageError, match="mixed forms"):
        pack_jacobian(J)


class TestHostileUploads:
    def upload(self, **changes: Tensor) -> Message:
        J = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3), torch.randn(4, 6))
        return Message("upload", 1, pack_jacobian(J) | {k.replace("__", "."): v for k, v in changes.items()})

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("jacobian", torch.tensor([3, 99]), "another network"),
            ("0.spans", torch.tensor([[0, 30], [30, 99]]), "outside the network"),
            ("0.spans", torch.tensor([[0, 30], [-5, 0]]), "outside the network"),
            ("0.spans", torch.tensor([[0, 29], [30, 35]]), "do not fit the weights they claim"),
            ("0.spans", torch.tensor([[0, 30]]), "do not fit the weights they claim"),
            ("0.a", torch.zeros(3, 1, 6), "do not fit the weights they claim"),
            ("0.a", torch.zeros(4, 0, 6), "do not fit the weights they claim"),
            ("0.a", torch.full((4, 1, 6), float("nan")), "not finite"),
            ("1.g", torch.zeros(4, 2, 3), "has shape"),
            ("1.a", torch.zeros(5, 1, 5), "has shape"),
        ],
    )
    def test_are_refused(self, name: str, value: Tensor, why: str) -> None:
        message = self.upload(**{name.replace(".", "__"): value})
        with pytest.raises(MessageError, match=why):
            unpack_jacobian(Message.decode(message.encode()), 3, 53, torch.zeros(1))

    def test_an_upload_without_rows(self) -> None:
        with pytest.raises(MessageError, match="without a Jacobian"):
            unpack_jacobian(Message("upload", 1, {"jacobian": torch.tensor([3, 53])}), 3, 53, torch.zeros(1))


def test_take_checks_what_it_takes() -> None:
    message = Message("update", 2, {"weights": torch.zeros(3), "bad": torch.tensor([float("inf")])})
    assert message.take("weights", (3,)).shape == (3,)
    with pytest.raises(MessageError, match="lacks 'loss'"):
        message.take("loss")
    with pytest.raises(MessageError, match=r"has shape \[3\], not \[4\]"):
        message.take("weights", (4,))
    with pytest.raises(MessageError, match="not finite"):
        message.take("bad")
    with pytest.raises(MessageError, match="expected a 'losses' message"):
        message.of_kind("losses")


def test_labels_travel_in_the_narrowest_integers() -> None:
    assert pack_labels(torch.tensor([0, 9]), 10).dtype == torch.uint8
    assert pack_labels(torch.tensor([0, 300]), 301).dtype == torch.int32
    assert pack_labels(torch.randn(2, 3), 3).dtype == torch.float32
