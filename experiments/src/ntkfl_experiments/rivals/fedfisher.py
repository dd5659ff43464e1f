"""FedFisher. Jhunjhunwala et al., FedFisher: Leveraging Fisher Information for One-Shot Federated Learning, 2024.

Clients train to their own optima w_m and send, beside them, the Fisher information F_m there: how much it costs them to
be elsewhere. The server finds the weights that cost all of them least. Meant for one round; it may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import WEIGHTS, Update
from ntkfl.methods.robust import weighted_sum
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.tangent.build import numbers_at_once
from ntkfl.tangent.curvature import curvature_sums
from ntkfl.tangent.losses import find_loss
from ntkfl.tangent.sums import GRADIENT, REST, SAMPLES, Factor, Layer, Sums, uncovered
from ntkfl.wire.message import Message

_DIAGONAL = "fisher"
_LARGEST = 2**31  # rows of a factor: every one is sent whole
_MOST = 100  # conjugate gradient steps of the server
_SMALL = 1e-10  # a residual, against the first, with which the equations are solved


class LayerFisher(NamedTuple):
    """F's block A ⊗ G of a layer; each a matrix [groups, n, n], a diagonal [groups, n], or None for 1."""

    layer: Layer
    outputs: int
    A: Tensor
    G: Tensor | None


class Fisher(NamedTuple):
    """F_m: blocks of layers, and its diagonal at all other columns."""

    blocks: list[LayerFisher]
    columns: Tensor
    diagonal: Tensor

    def times(self, vector: Tensor) -> Tensor:
        """F_m v, [d]."""
        out = torch.zeros_like(vector)
        for layer, outputs, A, G in self.blocks:
            rows = layer.matrices(vector, len(A), outputs)
            rows = rows @ A if A.ndim == 3 else rows * A.unsqueeze(1)
            if G is not None:
                rows = G @ rows if G.ndim == 3 else G.unsqueeze(2) * rows
            layer.write(out, rows)
        out[self.columns] = self.diagonal * vector[self.columns]
        return out


class FisherUpdate(Update):
    """w_m as `weights`, and F_m: its diagonal as `fisher`, or factors of layers and the rest's diagonal."""

    additive = False

    def fisher(self, like: Tensor) -> Fisher:
        """F_m, everything checked, of the type and on the device of weights `like` [d]."""
        names = [name for name in self.arrays if name in (_DIAGONAL, REST) or "/" in name]
        arrays = {name: self.take(name, None, like) for name in names}
        everything = torch.arange(like.numel(), device=like.device)
        if _DIAGONAL in arrays:
            if arrays.keys() != {_DIAGONAL} or arrays[_DIAGONAL].shape != like.shape:
                raise MessageError(f"the Fisher information must be a diagonal of {like.numel()} numbers")
            return Fisher([], everything, arrays[_DIAGONAL])
        shaped = Sums({GRADIENT: like, **arrays}).layers()
        blocks = []
        for one in shaped:
            if one.inputs is None:
                raise MessageError(f"one factor of two of the layer at columns {one.layer.name}")
            A, G = _matrix(one.inputs), None if one.outputs is None else _matrix(one.outputs)
            if one.shared and G is not None:  # both have the block's trace
                trace = (G if G.ndim == 2 else G.diagonal(dim1=1, dim2=2)).sum(1)
                G = G / trace.clamp(min=torch.finfo(G.dtype).tiny).view(-1, *[1] * (G.ndim - 1))
            blocks.append(LayerFisher(one.layer, one.shape[1], A, G))
        columns = uncovered(tuple(one.layer for one in shaped), like.numel(), like.device)
        return Fisher(blocks, columns, arrays[REST] if len(columns) else like.new_zeros(0))

    def check(self, task: Task) -> None:
        super().check(task)
        self.fisher(task.like.cpu())

    def sizes(self, task: Task) -> Tensor:
        """As of any update, or the largest norm of F's parts where one is larger: [1, 1]."""
        norms = [array.double().norm() for name, array in self.arrays.items() if name == _DIAGONAL or "/" in name]
        return (
            torch.stack([*norms, task.like.cpu().double().norm(), self.arrays[WEIGHTS].double().norm()])
            .amax()
            .reshape(1, 1)
        )


class FedFisher(LocalTraining):
    """w ← argmin_v Σ_m p_m (v − w_m)ᵀ F_m (v − w_m) + δ ‖v − w̄‖² with w̄ = Σ_m p_m w_m, by conjugate gradients from w̄.

    F_m = Σ_i J_iᵀ H_i J_i / n at w_m, for cross-entropy the Fisher information: factored (K-FAC), or its diagonal. δ
    keeps the mean where no client minds; the authors stop Adam's steps from w̄ early instead, on validation data.
    """

    paper: ClassVar[str] = "Jhunjhunwala et al. 2024"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": FisherUpdate}

    fisher: Literal["kfac", "diagonal"] = Field("kfac", description="F: a Kronecker product per layer, or its diagonal")
    damping: float = Field(1e-3, gt=0, description="δ, how strongly the clients' mean is kept")
    local_steps: int = Field(100, ge=1, description="gradient steps a client takes towards its own optimum")

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        mean = self.combined(task, replies, p, "weights", w)
        fishers = [reply.fisher(w) for reply in replies]

        def product(v: Tensor) -> Tensor:
            return self.damping * v + weighted_sum([F.times(v) for F in fishers], p)

        pulls = [F.times(reply.vector("weights", w) - mean) for F, reply in zip(fishers, replies, strict=True)]
        change, steps = _conjugate_gradients(product, weighted_sum(pulls, p), _MOST)
        return self.outcome(replies, p, state | {"weights": mean + change}, server_steps=steps)

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        w = self.begin(task, question)
        trained = self.train(task, w, client)
        return self.update(client, trained, weights=trained.weights, **self._fisher(task, trained.weights, client))

    def _fisher(self, task: Task, w_m: Tensor, client: ClientRound) -> dict[str, Tensor]:
        """F_m at the client's own weights, as arrays of its reply."""
        Y, plan = task.training_targets(client.y), task.plan(client.x)
        if self.fisher == "diagonal":
            return {_DIAGONAL: self._squares(task, w_m, client.x, Y) / len(client)}
        sums = curvature_sums(task.at(w_m), client.x, Y, self.loss, plan, largest=_LARGEST).arrays
        return {name: array / len(client) for name, array in sums.items() if name not in (GRADIENT, SAMPLES)}

    def _squares(self, task: Task, w: Tensor, x: Tensor, Y: Tensor) -> Tensor:
        """The diagonal of Σ_i J_iᵀ H_i J_i: [d]."""
        total, rows = torch.zeros_like(w), max(1, numbers_at_once(x) // (w.numel() * task.outputs))
        for some, own in zip(torch.split(x, rows), torch.split(Y, rows), strict=True):
            R = find_loss(self.loss).hessian_root(task.predict(w, some), own)
            total += (R.mT @ task.jacobian(w, some).dense()).square().sum((0, 1))
        return total


def _matrix(factor: Factor) -> Tensor:
    return factor.values if factor.form else factor.square()


def _conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor, most: int) -> tuple[Tensor, int]:
    """(x with product(x) = target, from 0; the steps it took), for a product that is positive definite."""
    x, residual = torch.zeros_like(target), target.clone()
    direction, size = residual, residual.double().square().sum()
    first = size
    for step in range(most):
        if size <= _SMALL**2 * first or not bool(size > 0):
            return x, step
        image = product(direction)
        along = direction.double() @ image.double()
        if not bool(along > 0):
            raise MessageError("a Fisher information is not positive semidefinite")
        x = x + (size / along).to(x) * direction
        residual = residual - (size / along).to(x) * image
        before, size = size, residual.double().square().sum()
        direction = residual + (size / before).to(x) * direction
    return x, most
