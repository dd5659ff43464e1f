"""Was a record in a sum? By the span of the gradient, by leverage in the factors, by its own gradient in the sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkfl.audit import membership
from ntkfl.audit.analytic import LinearLayer
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.received import Seen
from ntkfl.audit.unmixing import layer_gradient, leverage, outside
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import evaluating

_ASKED = 2000  # records that membership is tried on, in all sums of a size or role
_RIDGE = 1e-3  # added to moments of public records, in units of their mean


def members(
    capture: Capture, front: list[LinearLayer], held: list[Seen], role: str, of: str, seed: int
) -> list[Finding]:
    """Records looked up in the factors of the two front layers and in the first one's gradient, all sums together."""
    if not front:
        return []
    assert capture.public is not None
    others = (capture.public[0].flatten(1).to(held[0].x), capture.public[1])
    scores: dict[str, list[tuple[Tensor, Tensor]]] = {}
    # Alignment is judged on public records that its moments were not estimated from: those would look a little unlike.
    usual, fresh = ((others[0][start::2], others[1][start::2]) for start in (0, 1))
    moments = _with_one(usual[0]), _sensitivities(capture, front[0], usual)
    for number, one in enumerate(held):
        draws = torch.Generator().manual_seed(seed + number)
        some = torch.randperm(len(one.y), generator=draws)[: max(1, _ASKED // len(held))]
        pair = membership.matched((one.x[some], one.y[some]), others, seed + number)
        inputs = [_with_one(x) for x, _ in pair]
        hidden = [_with_one(front[0].module(x).detach().relu()) for x, _ in pair]
        first = layer_gradient(front[0], one.gradient)
        ways = {"gradient": tuple(-outside(first, v, one.resolution) for v in inputs)}
        asked = membership.matched((one.x[some], one.y[some]), fresh, seed + number)
        known = [(_with_one(records[0]), _sensitivities(capture, front[0], records)) for records in asked]
        ways["alignment"] = tuple(alignment(front[0], one.gradient, known, moments))
        for name, layer, vs in zip(("input factor", "hidden factor"), front, (inputs, hidden), strict=False):
            A = one.factor(layer)
            if A is not None:
                ways[name] = tuple(-leverage(A, v, one.resolution) for v in vs)
        for name, (a, b) in ways.items():
            scores.setdefault(name, []).append((a, b))
    found = []
    for name, pairs in scores.items():
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        if len(a) < 4 or len(pairs) < len(held):
            continue
        found.append(membership.by_scores(f"membership by {name}, {of}", role, a, b, seed))
    return found


def alignment(
    front: LinearLayer, gradient: Tensor, pair: Sequence[tuple[Tensor, Tensor]], public: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """How much of each record's own gradient δ vᵀ lies in a layer's gradient G of a sum, [N] for each of two sets:

        δᵀ B⁻¹ G A⁻¹ v / √(δᵀ B⁻¹ δ · vᵀ A⁻¹ v),   A = E v vᵀ and B = E δ δᵀ over public records,

    so that what all records have in common does not count. A record in the sum adds √(units · inputs) on average where
    the others and the noise add numbers around 0. `pair` and `public`: v [N, m] and δ [N, units].
    """

    def inverse(x: Tensor) -> Tensor:
        moments = x.T @ x / len(x)
        inverted: Tensor = torch.linalg.inv(
            moments + _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(x)
        )
        return inverted

    A, B = (inverse(values) for values in public)
    whitened = B @ layer_gradient(front, gradient) @ A
    found = []
    for v, delta in pair:
        sizes = ((v @ A) * v).sum(1) * ((delta @ B) * delta).sum(1)
        found.append(((delta @ whitened) * v).sum(1) / sizes.sqrt().clamp_min(1e-30))
    return found


def _sensitivities(capture: Capture, front: LinearLayer, records: tuple[Tensor, Tensor]) -> Tensor:
    """δ, the derivative of each record's training loss by the layer's outputs, float64 [N, units]."""
    task, kept = capture.task, list[Tensor]()
    x = records[0].view(len(records[0]), *capture.truth[0][0].shape[1:]).to(task.like)
    model = task.at(capture.weights)
    handle = front.module.register_forward_hook(lambda module, args, out: kept.append(out.requires_grad_()))
    try:
        with evaluating(model):
            outputs = model(x)
    finally:
        handle.remove()
    Y = task.training_targets(records[1].to(task.like.device))
    (delta,) = torch.autograd.grad(per_sample(task.loss, outputs, Y).sum(), kept)
    return delta.double().cpu()


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1).double()
