"""FedPM. Ishii et al., FedPM: Federated Learning Using Second-order Optimization with Preconditioned Mixing of Local
Parameters, 2026.

Clients take Newton-like steps, each with the curvature P_m of its own loss. The mean of where they end would be a step
with the mean of inverses; the server mixes by P_m instead, so that one local step of everybody is the step of the
pooled curvature: with the true Hessians, Newton's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector, weighted_sum
from ntkfl.tangent import jacobian
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock
from ntkfl.tangent.sums import INPUTS, Factor, Layer
from ntkfl.wire import Message

_MIXED, _DIAGONAL = "mixed", ".diagonal"


class Preconditioner(NamedTuple):
    """Columns of the weights, as matrices [outputs, m] (for each group), of which P multiplies the rows."""

    layer: Layer
    matrix: Tensor  # [groups, m, m], or the diagonal alone [groups, 1, m]
    diagonal: bool


class FedPM(LocalTraining):
    """v ← v − lr P_m⁻¹ ∇L_m(v) for K local steps from v = w, ending in w_m; then w ← (Σ_m p_m P_m)⁻¹ Σ_m p_m P_m w_m.

    P_m is taken at w, on all of a client's samples, with λ added to its diagonal. It is FOOF, the paper's choice for
    networks: a layer's P is Σ a aᵀ / n of the layer's inputs a (Benzing 2022), and 1 for weights of no such layer. A
    client sends P_m and P_m (w_m − w).
    """

    paper: ClassVar[str] = "Ishii et al. 2026"
    vectors: ClassVar[tuple[str, ...]] = (_MIXED,)

    damping: float = Field(1.0, gt=0, description="λ, added to the diagonal of P")
    local_steps: int = Field(1, ge=1, description="K, steps a client takes in a round; the paper's theory has 1")
    lr: float = Field(1.0, gt=0, description="local learning rate")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        if any(_shapes(reply) != _shapes(replies[0]) for reply in replies):
            raise MessageError("preconditioners of different networks cannot be mixed")
        names = _names(replies[0])
        mean = {name: weighted_sum((reply.take(name, None, w) for reply in replies), p) for name in names}
        mixed = self.combine((self.take(reply, _MIXED, w) for reply in replies), p)
        new = w + _apply(_inverses(self._parts(mean, w)), mixed)
        return Outcome({"weights": check_finite(new, "the mixed model")}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        own = [_second_moments(task, w, client) for client in clients]
        parts = [self._parts(arrays, w) for arrays in own]
        inverses = [_inverses(some) for some in parts]

        def precondition(gradients: Tensor, v: Tensor) -> Tensor:
            return torch.stack([_apply(inverse, g) for inverse, g in zip(inverses, gradients, strict=True)])

        replies = []
        trained = self.train(task, w, clients, precondition)
        for client, arrays, some, w_m, loss in zip(clients, own, parts, *trained, strict=True):
            mixed = {_MIXED: _apply(some, w_m - w)}
            replies.append(Message("update", message.round, mixed | arrays | report(client, loss)))
        return replies

    def _parts(self, arrays: Mapping[str, Tensor], w: Tensor) -> list[Preconditioner]:
        """P with λ, read from what `_second_moments` gives."""
        return [_part(name, array, w.numel(), self.damping) for name, array in arrays.items()]

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """As of any update, or the largest norm of P's parts where one is larger."""
        sizes = super().check(task, reply)
        like = task.like.cpu()
        parts = self._parts({name: reply.take(name, None, like) for name in _names(reply)}, like)
        norms = [part.matrix.double().norm() for part in parts]
        return torch.stack([*norms, *([] if sizes is None else [sizes[0, 0]])]).amax().reshape(1, 1)


def _second_moments(task: Task, w: Tensor, client: ClientRound) -> dict[str, Tensor]:
    """Σ a aᵀ / n over the samples, and all positions, at which a linear layer's or a convolution's weights are used: by
    columns, triangles [groups, m (m + 1) / 2], or diagonals [groups, m] of large ones.
    """
    plan = task.plan(client.x)
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    J = jacobian(task.at(w), client.x, plan=plan)
    assert isinstance(J, BlockJacobian)
    found = {}
    for block in J.blocks:
        if not isinstance(block, LinearBlock | ConvolutionBlock):
            continue
        assert block.weight is not None
        if isinstance(block, ConvolutionBlock):
            a = block.geometry.patches(block.a.flatten(0, 1)).permute(1, 0, 3, 2).flatten(1, 2)
        else:
            a = block.a.flatten(0, 1).unsqueeze(0)
        if block.bias is not None:
            a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], dim=-1)  # [groups, N · positions, m]
        bias = None if block.bias is None else (block.bias.start, block.bias.stop)
        name = f"{Layer((block.weight.start, block.weight.stop), bias, False).name}/{INPUTS}"
        if a.shape[2] > LARGEST:
            found[name + _DIAGONAL] = a.square().sum(1) / len(client)
        else:
            i, j = torch.triu_indices(a.shape[2], a.shape[2], device=a.device)
            found[name] = (a.mT @ a)[:, i, j] / len(client)
    return found


def _names(reply: Message) -> list[str]:
    return sorted(name for name in reply.arrays if "/" in name)


def _shapes(reply: Message) -> dict[str, tuple[int, ...]]:
    return {name: tuple(reply.arrays[name].shape) for name in _names(reply)}


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
