"""FedPM. Ishii et al., FedPM: Federated Learning Using Second-order Optimization with Preconditioned Mixing of Local
Parameters, 2026.

Clients take Newton-like steps, each with the curvature P_m of its own loss. The mean of where they end would be a step
with the mean of inverses; the server mixes by P_m instead, so that one local step of everybody is the step of the
pooled curvature: with the true Hessians, Newton's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.robust import weighted_sum
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.tangent import jacobian
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.layers import ConvolutionBlock, LinearBlock
from ntkfl.tangent.sums import INPUTS, Factor, Layer
from ntkfl.wire.message import Message

_MIXED, _DIAGONAL = "mixed", ".diagonal"


class Preconditioner(NamedTuple):
    """Columns of the weights, as matrices [outputs, m] (for each group), of which P multiplies the rows."""

    layer: Layer
    matrix: Tensor  # [groups, m, m], or the diagonal alone [groups, 1, m]
    diagonal: bool


class MixedUpdate(Update):
    """P_m (w_m − w) as `mixed` [d], and P_m without λ as an array for each layer."""

    additive = False
    vectors = (_MIXED,)

    def parts(self, like: Tensor) -> dict[str, Tensor]:
        """The arrays of P_m, of the type and on the device of `like`."""
        return {name: self.take(name, None, like) for name in sorted(self.arrays) if "/" in name}

    def check(self, task: Task) -> None:
        super().check(task)
        _read(self.parts(task.like.cpu()), task.like.numel(), 0.0)

    def sizes(self, task: Task) -> Tensor:
        """As of any update, or the largest norm of P's parts where one is larger: [1, 1]."""
        like = task.like.cpu()
        norms = [part.matrix.double().norm() for part in _read(self.parts(like), like.numel(), 0.0)]
        return (
            torch.stack([*norms, like.double().norm(), self.vector(_MIXED, like).double().norm()]).amax().reshape(1, 1)
        )


class FedPM(LocalTraining):
    """v ← v − lr P_m⁻¹ ∇L_m(v) for K local steps from v = w, ending in w_m; then w ← (Σ_m p_m P_m)⁻¹ Σ_m p_m P_m w_m.

    P_m is taken at w, on all of a client's samples, with λ added to its diagonal. It is FOOF, the paper's choice for
    networks: a layer's P is Σ a aᵀ / n of the layer's inputs a (Benzing 2022), and 1 for weights of no such layer. A
    client sends P_m and P_m (w_m − w).
    """

    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": MixedUpdate}

    damping: float = Field(1.0, gt=0, description="λ, added to the diagonal of P")
    local_steps: int = Field(1, ge=1, description="K, steps a client takes in a round; the paper's theory has 1")
    lr: float = Field(1.0, gt=0, description="local learning rate")

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        parts = [reply.parts(w) for reply in replies]
        if any(_shapes(own) != _shapes(parts[0]) for own in parts):
            raise MessageError("preconditioners of different networks cannot be mixed")
        mean = {name: weighted_sum([own[name] for own in parts], p) for name in parts[0]}
        mixed = self.combined(task, replies, p, _MIXED)
        new = w + _apply(_inverses(_read(mean, w.numel(), self.damping)), mixed)
        return self.outcome(replies, p, state | {"weights": new})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        w = self.begin(task, question)
        arrays = _second_moments(task, w, client)
        parts = _read(arrays, w.numel(), self.damping)
        inverses = _inverses(parts)
        trained = self.train(task, w, client, lambda gradient, v: _apply(inverses, gradient))
        return self.update(client, trained, **{_MIXED: _apply(parts, trained.weights - w)}, **arrays)


def _second_moments(task: Task, w: Tensor, client: ClientRound) -> dict[str, Tensor]:
    """Σ a aᵀ / n over the samples, and all positions, at which a linear layer's or a convolution's weights are used: by
    columns, triangles [groups, m (m + 1) / 2], or diagonals [groups, m] of large ones.
    """
    plan = task.plan(client.x)
    J = jacobian(task.at(w), client.x, plan=plan.factored())
    found = {}
    for block in J.blocks:
        if not isinstance(block, LinearBlock | ConvolutionBlock):
            continue
        assert block.weight is not None
        a = block.seen().transpose(0, 1).flatten(1, 2)
        if block.bias is not None:
            a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], dim=-1)  # [groups, N · positions, m]
        name = f"{Layer.at(block.weight, block.bias).name}/{INPUTS}"
        if a.shape[2] > LARGEST:
            found[name + _DIAGONAL] = a.square().sum(1) / len(client)
        else:
            i, j = torch.triu_indices(a.shape[2], a.shape[2], device=a.device)
            found[name] = (a.mT @ a)[:, i, j] / len(client)
    return found


def _shapes(arrays: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _read(arrays: Mapping[str, Tensor], d: int, damping: float) -> list[Preconditioner]:
    """P with λ, from what `_second_moments` gives."""
    return [_part(name, array, d, damping) for name, array in arrays.items()]


def _part(name: str, array: Tensor, d: int, damping: float) -> Preconditioner:
    """One array of a preconditioner; `MessageError` where it is of another network than one of d weights."""
    columns, _, role = name.partition("/")
    layer, factor = Layer.parse(columns), Factor(array, _DIAGONAL if role.endswith(_DIAGONAL) else "")
    m = factor.size if array.ndim == 2 and array.numel() else -1
    weights = layer.weight[1] - layer.weight[0]
    inputs, biases = m - (layer.bias is not None), 0 if layer.bias is None else layer.bias[1] - layer.bias[0]
    fits = role.removesuffix(_DIAGONAL) == INPUTS and m > 0 and inputs > 0 and not layer.transposed
    fits = fits and weights > 0 and weights % (len(array) * inputs) == 0 and layer.weight[1] <= d
    if not fits or (layer.bias is not None and (biases * inputs != weights or layer.bias[1] > d)):
        raise MessageError(f"{name!r} of shape {list(array.shape)} is no preconditioner of this network")
    if factor.form:
        return Preconditioner(layer, array.unsqueeze(1) + damping, True)
    return Preconditioner(
        layer, factor.square() + damping * torch.eye(m, dtype=array.dtype, device=array.device), False
    )


def _inverses(parts: Sequence[Preconditioner]) -> list[Preconditioner]:
    return [part._replace(matrix=1 / part.matrix if part.diagonal else _inverse(part.matrix)) for part in parts]


def _inverse(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix.double())
    if bool(failed.any()):
        raise MessageError("a preconditioner is not positive definite: it cannot be inverted")
    inverse: Tensor = torch.cholesky_inverse(factor).to(matrix)
    return inverse


def _apply(parts: Sequence[Preconditioner], vector: Tensor) -> Tensor:
    """P times a vector [d]; columns of no part stay as they are."""
    out = vector.clone()
    for layer, matrix, diagonal in parts:
        groups, m = matrix.shape[0], matrix.shape[2]
        outputs = (layer.weight[1] - layer.weight[0]) // (groups * (m - (layer.bias is not None)))
        rows = layer.matrices(vector, groups, outputs)
        layer.write(out, rows * matrix if diagonal else rows @ matrix)
    return out
