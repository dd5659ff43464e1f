"""What sums over samples give away, of each client or of the whole cohort: pictures, their mean, labels, members.

A first linear layer's gradient is Σ δ vᵀ with v = [x, 1] and δ what the loss is sensitive to, its input factor
A = Σ v vᵀ. Of one sample x is read off either; of more a unit's ∂W/∂b is a mean of inputs, sharp where one sample moved
the unit. A record was in the sum where its leverage vᵀ A⁻¹ v is at most 1, as long as there are not several times more
samples than inputs; where v lies in the row space of the gradient, as long as there are fewer samples than units; and
where its own δ vᵀ lies in the gradient: more samples do not hide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer, linear_layers
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.labels import last_bias, mix_finding
from ntkfl.audit.measures import relative_error
from ntkfl.audit.membership import by_scores, matched
from ntkfl.audit.received import ReceivedSums, local_models, sums_of, total_of
from ntkfl.audit.reconstruction import score_pictures
from ntkfl.extras import missing
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import evaluating

try:
    from scipy.optimize import nnls
except ImportError:
    raise missing("the audit", "audit") from None

_CLIENTS = 5  # whose own sums are attacked
_ASKED = 2000  # records that membership is tried on, in all sums of a role
_RIDGE = 1e-3  # added to moments of public records, in units of their mean


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By a server that has each client's sums, where no masks hide them, and by one that has the cohort's total alone.
    Inputs behind a secret projection are left alone.
    """
    if capture.public is None or capture.projection is not None or not capture.truth[0][0].is_floating_point():
        return []
    clients = sums_of(capture)
    if not clients:
        return []
    own = [] if capture.masked else on_sums(capture, clients[:_CLIENTS], "aggregator", seed)
    return own + on_sums(capture, [total_of(clients)], "secure-sum", seed)


def on_sums(capture: Capture, held: Sequence[ReceivedSums], role: str, seed: int = 0) -> list[Finding]:
    """Every attack on sums that somebody in this role has."""
    layers = linear_layers(capture.task.at(capture.weights))
    found = [] if local_models(capture) and role == "aggregator" else _class_counts(capture, held, role)
    if not layers or layers[0].bias is None:
        return found
    pictures = [_inverted(layers[0], one) for one in held]
    more = {"samples": held[0].samples}
    found += score_pictures("analytic inversion, sums", role, capture, [one.x for one in held], pictures, more)
    found += _means(capture, layers[0], held, role)
    return found + _members(capture, layers[0], held, role, seed)


def layer_gradient(layer: LinearLayer, gradient: Tensor) -> Tensor:
    """A linear layer's columns of a gradient [d] as Σ δ vᵀ, [n_out, n_in + 1]."""
    assert layer.bias is not None
    W = gradient[layer.weight].view(layer.module.out_features, layer.module.in_features)
    return torch.cat([W, gradient[layer.bias].unsqueeze(1)], 1)


def _inverted(layer: LinearLayer, one: ReceivedSums) -> Tensor:
    """∂/∂W over ∂/∂b of each unit that the sum moved, [units, n_in]; of one sample its input, by least squares."""
    both = layer_gradient(layer, one.gradient)
    W, b = both[:, :-1], both[:, -1]
    if one.samples == 1:
        return (b @ W / b.square().sum().clamp_min(torch.finfo(b.dtype).tiny)).unsqueeze(0)
    moved = b.abs() > 1e-3 * b.abs().max()
    return W[moved] / b[moved, None]


def _means(capture: Capture, layer: LinearLayer, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """A factor's last column is Σ x: the mean input of those behind the sum, whatever their number."""
    factors = [A for one in held if (A := one.factor(layer)) is not None]
    if len(factors) < len(held):
        return []
    assert capture.public is not None
    truth = torch.stack([one.x.double().mean(0) for one in held])
    read = torch.stack([A[:-1, -1] / A[-1, -1] for A in factors])
    usual = capture.public[0].flatten(1).double().mean(0).expand_as(truth)
    error, chance = relative_error(truth, read), float(relative_error(truth, usual).mean())
    says = f"The mean of {held[0].samples:,} inputs is read off to {float(error.mean()):.2%}; so are their covariances."
    values = tuple(error.tolist())
    return [Finding("mean input, sums", role, "inputs' mean", "relative error", values, chance, 0.0, says)]


# -- Labels ------------------------------------------------------------------------------------------------------------


def _class_counts(capture: Capture, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """How many of each class, by the last bias's gradient Σ (p − y): the mix of public records that has it."""
    last = last_bias(capture)
    if last is None or capture.task.loss != "ce" or capture.truth[0][1].is_floating_point():
        return []
    assert capture.public is not None
    task, (x, labels) = capture.task, capture.public
    residuals = task.predict(capture.weights, x.to(task.like)).softmax(1) - task.training_targets(labels).to(task.like)
    typical = torch.stack([residuals[labels == c].mean(0) for c in range(task.outputs)]).double().cpu()
    counts = torch.stack([counts_by_public(one.gradient[last], typical, one.samples) for one in held])
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1e-9)
    return [mix_finding("class counts, sums", role, shares, [one.y for one in held])]


def counts_by_public(seen: Tensor, typical: Tensor, samples: int) -> Tensor:
    """Class counts q ≥ 0 with Σ_c q_c typical_c nearest to what was seen [k]; `typical` [classes, k]: public means."""
    firm = 10 * typical.double().norm()  # there are `samples` of them: what is seen may not tell
    left = torch.cat([typical.T.double(), firm.expand(1, len(typical))])
    counts, _ = nnls(left.numpy(), torch.cat([seen.double(), samples * firm.reshape(1)]).numpy())
    return torch.from_numpy(counts)


# -- Membership --------------------------------------------------------------------------------------------------------


def _members(capture: Capture, layer: LinearLayer, held: Sequence[ReceivedSums], role: str, seed: int) -> list[Finding]:
    """Records looked up in the first layer's factor and in its gradient, all sums together."""
    assert capture.public is not None
    others = (capture.public[0].flatten(1).to(held[0].x), capture.public[1])
    # Moments come from other public records than those asked about, which would look a little unlike others.
    usual, fresh = ((others[0][start::2], others[1][start::2]) for start in (0, 1))
    moments = _with_one(usual[0]), _sensitivities(capture, layer, usual)
    scores: dict[str, list[tuple[Tensor, ...]]] = {}
    for number, one in enumerate(held):
        draws = torch.Generator().manual_seed(seed + number)
        some = torch.randperm(len(one.y), generator=draws)[: max(1, _ASKED // len(held))]
        pair = matched((one.x[some], one.y[some]), fresh, seed + number)
        known = [(_with_one(records[0]), _sensitivities(capture, layer, records)) for records in pair]
        G = layer_gradient(layer, one.gradient)
        ways = {"alignment": tuple(alignment(G, known, moments))}
        ways["row space"] = tuple(-outside(G, v, one.resolution) for v, _ in known)
        A = one.factor(layer)
        if A is not None:
            ways["input factor"] = tuple(-leverage(A, v, one.resolution) for v, _ in known)
        for name, way in ways.items():
            scores.setdefault(name, []).append(way)
    found = []
    for name, pairs in scores.items():
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        if len(a) >= 4 and len(pairs) == len(held):
            found.append(by_scores(f"membership by {name}, sums", role, a, b, seed))
    return found


def leverage(A: Tensor, v: Tensor, resolution: float) -> Tensor:
    """vᵀ (A + ε)⁻¹ v for rows v [N, m] and A [m, m], float64; ε is the error that rounding makes in A's eigenvalues."""
    values, vectors = torch.linalg.eigh(A)
    least = resolution * A.abs().max() * math.sqrt(len(A))
    found: Tensor = ((v @ vectors).square() / (values.clamp_min(0) + least)).sum(1)
    return found


def outside(G: Tensor, v: Tensor, resolution: float) -> Tensor:
    """The part of each v² [N, m] that lies outside the row space of a layer's gradient [units, m], [N]."""
    _, sizes, rows = torch.linalg.svd(G, full_matrices=False)
    unsure = resolution * G.abs().max() * (math.sqrt(G.shape[0]) + math.sqrt(G.shape[1]))
    # Directions count as far as they are above rounding: none is cut off, none that is noise is trusted.
    trust = sizes.square() / (sizes.square() + unsure.square())
    inside = ((v @ rows.T).square() * trust).sum(1)
    left: Tensor = 1 - inside / v.square().sum(1)
    return left


def alignment(G: Tensor, pair: Sequence[tuple[Tensor, Tensor]], public: tuple[Tensor, Tensor]) -> list[Tensor]:
    """How much of each record's own gradient δ vᵀ lies in a layer's gradient G of a sum, [N] for each of two sets:

        δᵀ B⁻¹ G A⁻¹ v / √(δᵀ B⁻¹ δ · vᵀ A⁻¹ v),   A = E v vᵀ and B = E δ δᵀ over public records,

    so that what all records have in common does not count. A record in the sum adds √(units · inputs) on average where
    the others and the noise add numbers around 0. `pair` and `public`: v [N, m] and δ [N, units].
    """

    def inverse(x: Tensor) -> Tensor:
        moments = x.T @ x / len(x)
        ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(x)
        inverted: Tensor = torch.linalg.inv(moments + ridge)
        return inverted

    A, B = (inverse(values) for values in public)
    whitened = B @ G @ A
    found = []
    for v, delta in pair:
        sizes = ((v @ A) * v).sum(1) * ((delta @ B) * delta).sum(1)
        found.append(((delta @ whitened) * v).sum(1) / sizes.sqrt().clamp_min(1e-30))
    return found


def _sensitivities(capture: Capture, layer: LinearLayer, records: tuple[Tensor, Tensor]) -> Tensor:
    """δ, the derivative of each record's training loss by the layer's outputs, float64 [N, units]."""
    task, kept = capture.task, list[Tensor]()
    x = records[0].view(len(records[0]), *capture.truth[0][0].shape[1:]).to(task.like)
    model = task.at(capture.weights)
    handle = layer.module.register_forward_hook(lambda module, args, out: kept.append(out.requires_grad_()))
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
