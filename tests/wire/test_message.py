"""Messages: what they carry and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire import Message, pack_labels, stack_messages


def test_take_checks_what_it_takes() -> None:
    message = Message("update", 2, {"weights": torch.zeros(3), "bad": torch.tensor([float("inf")])})
    assert message.take("weights", (3,)).shape == (3,)
    with pytest.raises(MessageError, match="lacks 'loss'; it has '"):
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


class TestStackedMessages:
    """Messages of several clients as one."""

    @staticmethod
    def message(rows: int, **changed: Tensor) -> Message:
        arrays = {
            "jacobian": torch.tensor([2, 6]),
            "0.a": torch.arange(rows * 3.0).view(rows, 3) + rows,
            "labels": torch.arange(rows, dtype=torch.uint8),
        }
        return Message("upload", 4, arrays | changed)

    def test_rows_of_all_in_order(self) -> None:
        parts = [self.message(2), self.message(5), self.message(1)]
        whole, counts = stack_messages(parts, torch.device("cpu"))
        assert counts == [2, 5, 1]
        assert (whole.kind, whole.round) == ("upload", 4)
        assert torch.equal(whole.arrays["0.a"], torch.cat([part.arrays["0.a"] for part in parts]))
        assert torch.equal(whole.arrays["labels"], torch.tensor([0, 1, 0, 1, 2, 3, 4, 0], dtype=torch.uint8))
        assert torch.equal(whole.arrays["jacobian"], torch.tensor([2, 6]))

    @pytest.mark.parametrize(
        "changed",
        [
            {"0.a": torch.zeros(3, 3)},  # more rows than labels, which another message's fewer would hide
            {"0.a": torch.zeros(2, 4)},
            {"0.a": torch.zeros(2, 3, dtype=torch.float64)},
            {"0.a": torch.tensor(1.0)},
            {"jacobian": torch.tensor([2, 7])},
            {"0.a": torch.zeros(0, 3), "labels": torch.zeros(0, dtype=torch.uint8)},
            {"more": torch.zeros(2)},
        ],
    )
    def test_one_unlike_the_others_is_refused(self, changed: dict[str, Tensor]) -> None:
        with pytest.raises(MessageError):
            stack_messages([self.message(2), self.message(2, **changed)], torch.device("cpu"))
