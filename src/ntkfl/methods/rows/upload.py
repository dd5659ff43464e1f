"""What clients of NTK-FL send: per-sample Jacobians, outputs and labels, packed, checked and read once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.replies import Rows
from ntkfl.methods.task import Task, labels_of
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.tangent import Jacobian
from ntkfl.wire.jacobians import pack_jacobian, unpack_jacobian
from ntkfl.wire.message import Message, pack_labels
from ntkfl.wire.topk import pack_topk, unpack_topk

if TYPE_CHECKING:
    from ntkfl.methods.base import Method


class TangentRows(Rows):
    """A row per sample: its Jacobian [d2, d], its outputs [d2] and its label.

    A Jacobian travels in the form it was made in (factored by layer, or dense), or with `[privacy] sparsity` as its
    largest values alone. Received ones are decoded when they are checked: `J`, `outputs` [n, d2] and `labels` are on
    the CPU until `to` moves them.
    """

    extreme = (10.0, 100.0, 100.0, 100.0)  # outputs, targets and inputs differ more between rows than Jacobians do

    J: Jacobian
    outputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, task: Task, w: Tensor, x: Tensor, y: Tensor, form: str = "auto") -> Self:
        """The rows of samples (x, y) at the weights w [d]. Costs a Jacobian of n samples and one forward pass."""
        J = task.jacobian(w, x, form)
        packed = pack(sparsify(J, task.privacy.sparsity), task.privacy)
        return cls({"outputs": task.predict(w, x), "labels": pack_labels(y, task.outputs)} | packed)

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        assert task.example is not None
        x, y = task.example
        return cls.of(task, task.like, x, y, getattr(method, "form", "auto"))

    def check(self, task: Task) -> None:
        """Decodes J against the network's (d2, d) and the run's settings: no array decides its own shape."""
        outputs, columns, privacy = task.outputs, task.like.numel(), task.privacy
        like = task.like.new_empty(0, device="cpu")
        if privacy.sparsity:
            k = kept(privacy.sparsity, outputs * columns)
            self.J = unpack_topk(self, outputs, columns, k, privacy.values, like)
        else:
            self.J = unpack_jacobian(self, outputs, columns, like)
        n, y = len(self.J), self.take("labels")
        self.outputs, self.labels = self.take("outputs", (n, outputs), like), labels_of(y, like)
        if y.ndim not in (1, 2) or len(y) != n:
            raise MessageError(f"labels of shape {list(y.shape)} for {n} samples")
        if y.is_floating_point():
            if task.loss == "ce":
                raise MessageError("real-valued targets where classes are trained")
        elif y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs:
            raise MessageError(f"a label that is none of the {outputs} classes")

    def sizes(self, task: Task) -> Tensor:
        """Of each row the Jacobian's norm, and the largest output, target and number stored: [n, 4]."""
        J, f0, y = self.J, self.outputs, self.labels
        stored = [t.flatten(1).abs().amax(1) for t in J.tensors() if t.is_floating_point()]
        targets = y.abs().flatten(1).amax(1) if y.is_floating_point() else torch.zeros_like(f0[:, 0])
        return torch.stack([J.norms(), f0.abs().amax(1), targets, torch.stack(stored).amax(0)], dim=1)


def pack(J: Jacobian, privacy: Privacy) -> dict[str, Tensor]:
    """The arrays of a reply that hold J: sparse rows as top-k codes, others as they are stored."""
    return pack_topk(J, privacy.values) if privacy.sparsity else pack_jacobian(J)
