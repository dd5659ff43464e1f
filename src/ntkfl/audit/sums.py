"""What sums over samples give away, of each client or of the whole cohort: pictures, labels, members.

A first linear layer's gradient is Σ δ vᵀ with v = [x, 1] and δ what the loss is sensitive to, its input factor
A = Σ v vᵀ. Of one sample x is read off either; of more a unit's ∂W/∂b is a mean of inputs, sharp where one sample moved
the unit. The last bias's gradient Σ (p − y) tells class counts. A record was in the sum where its leverage vᵀ A⁻¹ v is
at most 1, as long as there are not several times more samples than inputs; where v lies in the row space of the
gradient, as long as there are fewer samples than units; and where its own δ vᵀ lies in the gradient: more samples do
not hide it. An averaging method's update is read as a sum too: as one long step along the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer, linear_layers
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding, best_ssim, mix_finding
from ntkfl.audit.membership import by_scores, matched
from ntkfl.extras import missing
from ntkfl.methods.replies import Reply
from ntkfl.methods.sums.private_sums import is_whitening, read_whitening
from ntkfl.privacy.sum_noise import COUNT, GRAINS
from ntkfl.tangent import Sums
from ntkfl.tangent.clipping import whitened
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import column_slices, evaluating, trainable
from ntkfl.tangent.sums import GRADIENT, REST, SAMPLES

try:
    from scipy.optimize import nnls
except ImportError:
    raise missing("the audit", "audit") from None

_CLIENTS = 5  # whose own sums are attacked
_PICTURES = 10  # of each sum that are compared
_ASKED = 2000  # records that membership is tried on, in all sums of a role
_RIDGE = 1e-3  # added to moments of public records, in units of their mean


@dataclass(frozen=True)
class ReceivedSums:
    """Sums as somebody has them, in float64, `resolution` being the part of an entry that rounding leaves unsure; and,
    for scoring only, the records behind them: x [n, d1] as the network takes it, y.
    """

    sums: Sums
    resolution: float
    x: Tensor
    y: Tensor

    @property
    def samples(self) -> int:
        """How many records are in the sum, as the sum itself tells."""
        return int(self.sums.arrays[SAMPLES])

    @property
    def gradient(self) -> Tensor:
        """∂L/∂w summed over the records, [d]."""
        return self.sums.arrays[GRADIENT]

    def factor(self, layer: LinearLayer) -> Tensor | None:
        """A linear layer's Σ v vᵀ [m, m] with v = [input, 1]; None where it did not come whole."""
        layers = self.sums.layers() if any("/" in name for name in self.sums.arrays) else []
        shaped = next((shaped for shaped in layers if shaped.layer.weight[0] == layer.weight.start), None)
        if shaped is None or shaped.inputs is None or shaped.inputs.form or layer.bias is None:
            return None
        A = shaped.inputs.square()[0]
        return A if float(A[-1, -1]) > 0.5 else None  # zeros stand for one that was sent before

    def __add__(self, other: ReceivedSums) -> ReceivedSums:
        x, y = torch.cat([self.x, other.x]), torch.cat([self.y, other.y])
        return ReceivedSums(self.sums + other.sums, self.resolution, x, y)


def sums_of(capture: Capture) -> list[ReceivedSums]:
    """Each client's; none where replies are no sums."""
    order = [client for client, _ in capture.sent_by] or capture.cohort
    found = []
    for sender, reply in zip(order, capture.uploads, strict=False):
        read = _read_sums(capture, reply)
        if read is not None:
            x, y = capture.truth[capture.cohort.index(sender)]
            found.append(ReceivedSums(*read, x.flatten(1), y))
    return found


def total_of(clients: Sequence[ReceivedSums]) -> ReceivedSums:
    """What a secure sum leaves."""
    return reduce(add, clients)


def _read_sums(capture: Capture, reply: Reply) -> tuple[Sums, float] | None:
    """A reply as sums over its samples and their resolution: sums as they are, or a locally trained model, whose way
    from the broadcast weights is taken for one long step along the gradient. None where the reply is neither.
    """
    exact = capture.task.like.new_empty(0, dtype=torch.float64, device="cpu")
    if SAMPLES not in reply.arrays or reply.arrays[SAMPLES].numel() != 1:
        return None
    samples = reply.take(SAMPLES).reshape(()).to(exact)
    if GRADIENT in reply.arrays and not reply.arrays[GRADIENT].is_floating_point():
        return _read_private(capture, reply, exact), 2.0**-23
    if GRADIENT in reply.arrays:
        names = [name for name in reply.arrays if name in (GRADIENT, REST) or "/" in name]
        rounding = 2.0**-11 if GRADIENT in reply.halves else 2.0**-23
        return Sums({name: reply.take(name, None, exact) for name in names} | {SAMPLES: samples}), rounding
    trained = capture.local_model(reply)
    if trained is None:
        return None
    weights, length = trained
    return Sums({GRADIENT: (capture.weights - weights).to(exact) * samples / length, SAMPLES: samples}), 2.0**-20


def _read_private(capture: Capture, reply: Reply, exact: Tensor) -> Sums:
    """The integers of `private-sums` as a gradient and a count, with the public whitening taken back."""
    clip = float(capture.method.model_dump()["clip"])
    gradient, broadcast = reply.take(GRADIENT, None, exact) * clip / GRAINS, capture.broadcast
    sent = {name: broadcast.take(name, None, exact) for name in broadcast.arrays if is_whitening(name)}
    like, damping = capture.task.like.to(exact), capture.method.model_dump().get("damping", 0.0)
    inverse = {layer: torch.linalg.inv(P) for layer, P in read_whitening(sent, like, damping).items()}
    count = reply.take(SAMPLES).reshape(()).to(exact) / COUNT
    return Sums({GRADIENT: whitened(gradient, inverse), SAMPLES: count})


# -- Attacks -----------------------------------------------------------------------------------------------------------


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
    found = _class_counts(capture, held, role)
    if not layers or layers[0].bias is None:
        return found
    return found + _pictures(capture, layers[0], held, role) + _members(capture, layers[0], held, role, seed)


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


def _pictures(capture: Capture, layer: LinearLayer, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """Each true picture behind a sum against whichever drawn one is most like it. The guess is as many public pictures,
    or for one the mean picture.
    """
    if capture.pixels is None or capture.public is None:
        return []
    values, chances = [], []
    for one in held:
        drawn, public = _inverted(layer, one), capture.public[0]
        usual = public.mean(0, keepdim=True) if len(drawn) == 1 else public[: len(drawn)]
        original = capture.images(one.x[:_PICTURES])
        values += best_ssim(original, capture.images(drawn.to(one.x))).tolist()
        chances += best_ssim(original, capture.images(usual)).tolist()
    mean, chance = sum(values) / len(values), sum(chances) / len(chances)
    says = f"The best of the drawn pictures has an SSIM of {mean:.2f} (a guess: {chance:.2f})."
    details = {"samples": held[0].samples}
    name, measure = "analytic inversion, sums", "best SSIM"
    return [Finding(name, role, "inputs", measure, tuple(values), chance, 1.0, says, details)]


# -- Labels ------------------------------------------------------------------------------------------------------------


def _class_counts(capture: Capture, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """How many of each class, by the last bias's gradient Σ (p − y): the mix of public records that has it."""
    assert capture.public is not None
    task, (x, labels) = capture.task, capture.public
    name, last = list(column_slices(trainable(task.model)).items())[-1]
    biased = name.endswith("bias") and last.stop - last.start == task.outputs
    if not biased or task.loss != "ce" or capture.truth[0][1].is_floating_point():
        return []
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
