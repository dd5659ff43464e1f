"""What clients of NTK-FL send: Jacobians, outputs and labels of their samples, packed, read and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError, unknown
from ntkfl.methods.base import ClientRound, Method, Task, take_labels
from ntkfl.methods.corruption import change_of, corrupted_jacobian, with_numbers
from ntkfl.methods.inspection import Corruption, SampleRows
from ntkfl.methods.step_selection import LOSS_ATTACKS, check_scores, favouring
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.tangent import Jacobian
from ntkfl.tangent.build import FORMS
from ntkfl.wire import Message, join_rows, pack_jacobian, pack_labels, split_rows, unpack_jacobian
from ntkfl.wire.topk import VALUES, pack_topk, unpack_topk

CODECS = ("auto", "factored", "dense", "topk")


class NTKUpload(Method):
    """An upload has a row per sample: its Jacobian [d2, d] in the form of `codec`, its outputs [d2] and its label."""

    sampled: ClassVar[tuple[str, ...]] = ("upload",)
    shows: ClassVar[str] = "rows"
    extreme: ClassVar[tuple[float, ...]] = (10.0, 100.0, 100.0, 100.0)  # outputs and inputs differ more than norms do

    sparsity: float = Field(0.0, ge=0, lt=1, description="part of a Jacobian's smallest values that is left out")
    values: str = Field("float32", description="how the values kept by sparsification travel: float32, float16 or 8bit")
    codec: str = Field(
        "auto",
        description="how Jacobians are sent: factored, dense, topk (sparsified); auto: topk where sparsity is set",
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.codec not in CODECS:
            raise unknown("codec", self.codec, CODECS)
        if self.values not in VALUES:
            raise unknown("kind of values", self.values, VALUES)
        if (self.codec == "topk") != (self.sparsity > 0) and self.codec != "auto":
            raise ConfigError("codec 'topk' and a sparsity above 0 go together: sparsified rows have no other form")

    @property
    def form(self) -> str:
        """In which form Jacobians are made."""
        return self.codec if self.codec in FORMS else "auto"

    def upload(self, task: Task, round: int, w: Tensor, client: ClientRound) -> Message:
        """A client's upload at the weights w [d]."""
        J = task.jacobian(w, client.x, self.form)
        packed = self.pack(sparsify(J, self.sparsity) if self.sparsity else J)
        arrays = {"outputs": task.predict(w, client.x), "labels": pack_labels(client.y, task.outputs)}
        return Message("upload", round, arrays | packed)

    def pack(self, J: Jacobian) -> dict[str, Tensor]:
        """The arrays of an upload that hold J."""
        return pack_topk(J, self.values) if self.sparsity else pack_jacobian(J)

    def read_rows(self, task: Task, reply: Message, like: Tensor | None = None) -> SampleRows:
        """(J, f0, y) of an upload, everything checked; of the type and on the device of `like`, or of the weights."""
        like = task.like if like is None else like
        if "rows" not in reply.read:
            reply.read["rows"] = self._decoded(task, reply, like.new_empty(0, device="cpu"))
        rows: SampleRows = reply.read["rows"]
        if like.device == rows.outputs.device:
            return rows
        return SampleRows(rows.J.to(like.device), rows.outputs.to(like.device), rows.labels.to(like.device))

    def _decoded(self, task: Task, reply: Message, like: Tensor) -> SampleRows:
        outputs, columns = task.outputs, task.like.numel()
        reply.of_kind("upload")
        J: Jacobian
        if self.sparsity:
            k = kept(self.sparsity, outputs * columns)
            J = unpack_topk(reply, outputs, columns, k, self.values, like)
        else:
            J = unpack_jacobian(reply, outputs, columns, like)
        f0 = reply.take("outputs", (len(J), outputs), like)
        y = reply.take("labels")
        if y.ndim not in (1, 2) or len(y) != len(J):
            raise MessageError(f"labels of shape {list(y.shape)} for {len(J)} samples")
        if y.is_floating_point() and task.loss == "ce":
            raise MessageError("real-valued targets where classes are trained")
        if not y.is_floating_point() and (y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs):
            raise MessageError(f"a label that is none of the {outputs} classes")
        return SampleRows(J, f0, take_labels(reply, "labels", like))

    def split(self, reply: Message) -> list[Message]:
        return split_rows(reply)

    def join(self, rows: list[Message]) -> list[Message]:
        return [join_rows(rows)]

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """Of an upload's rows, four sizes: the Jacobian's norm, the largest output, target and number stored."""
        if reply.kind != "upload":
            check_scores(reply, self.shuffle)
            return None
        return _sizes(self.read_rows(task, reply, task.like.new_empty(0, device="cpu")))

    @property
    def attacks(self) -> frozenset[str]:
        return frozenset({"random", "sign-flip", "scaled-labels", "scaled-outputs", "flood"})

    def corrupt(
        self, corruption: Corruption, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        kind, scale = corruption.kind, corruption.scale
        if kind in LOSS_ATTACKS and reply.kind == "losses":
            return with_numbers(reply, lambda losses: favouring(kind, losses))
        if reply.kind != "upload":
            return reply
        arrays = dict(reply.arrays)
        if kind == "scaled-labels":
            labels = nn.functional.one_hot(client.y.cpu(), task.outputs) if client.y.ndim == 1 else client.y
            arrays["labels"] = scale * labels.to(task.like.dtype)
        elif kind == "scaled-outputs":
            arrays["outputs"] = scale * arrays["outputs"]
        elif kind in ("random", "sign-flip"):
            draws = torch.Generator().manual_seed(corruption.seed + 1) if kind == "random" else None
            J = self.read_rows(task, reply).J
            arrays |= self.pack(corrupted_jacobian(J, change_of(corruption), draws))
        return replace(reply, arrays=arrays)


def row_count(upload: Message) -> int:
    """Rows of an upload; one that was read before is not looked at again, number by number."""
    return len(upload.read["rows"].outputs if "rows" in upload.read else upload.take("outputs"))


def _sizes(rows: SampleRows) -> Tensor:
    """Of each row the Jacobian's norm, the largest output, target and number stored: [n, 4]."""
    J, f0, y = rows
    largest = [t.flatten(1).abs().amax(1) for t in J.tensors() if t.is_floating_point()]
    targets = y.abs().flatten(1).amax(1) if y.is_floating_point() else torch.zeros_like(f0[:, 0])
    return torch.stack([J.norms(), f0.abs().amax(1), targets, torch.stack(largest).amax(0)], dim=1)
