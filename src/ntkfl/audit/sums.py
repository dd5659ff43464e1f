"""What sums over samples give away, of each client or of the whole cohort: pictures, labels, members.

A first linear layer's gradient is Σ δ vᵀ with v = [x, 1] and δ what the loss is sensitive to, its input factor
A = Σ v vᵀ. Of one sample x is read off either; of more a unit's ∂W/∂b is a mean of inputs, sharp where one sample moved
the unit. The last bias's gradient Σ (p − y) tells class counts. A record was in the sum where its leverage vᵀ A⁻¹ v is
at most 1, as long as there are not several times more samples than inputs; and where its own δ vᵀ lies in the gradient:
more samples do not hide it. An averaging method's update is read as a sum too: as one long step along the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer, linear_layers
from ntkfl.audit.capture import Capture, Records
from ntkfl.audit.finding import Finding, best_ssim, mix_finding
from ntkfl.audit.membership import TRIALS, by_scores, matched
from ntkfl.extras import missing
from ntkfl.methods.replies import Reply
from ntkfl.methods.sums.private_sums import is_whitening, read_whitening
from ntkfl.privacy.sum_noise import COUNT, GRAINS
from ntkfl.tangent import Sums
from ntkfl.tangent.clipping import whitened
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import column_slices, evaluating, trainable
from ntkfl.tangent.sums import CONSTANT, GRADIENT, INPUTS, SAMPLES, Factor, Layer

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
        columns = Layer((layer.weight.start, layer.weight.stop), (layer.bias.start, layer.bias.stop), False).name
        for name in (f"{columns}/{INPUTS}", f"{columns}/{CONSTANT}"):
            if name in self.sums.arrays:
                A = Factor(self.sums.arrays[name]).square()[0]
                return A if float(A[-1, -1]) > 0.5 else None  # zeros stand for one that was sent before
        return None

    def __add__(self, other: ReceivedSums) -> ReceivedSums:
        x, y = torch.cat([self.x, other.x]), torch.cat([self.y, other.y])
        return ReceivedSums(self.sums + other.sums, self.resolution, x, y)


def sums_of(capture: Capture) -> list[ReceivedSums]:
    """Each client's; none where replies are no sums."""
    order = range(len(capture.cohort)) if capture.order is None else capture.order.tolist()
    read = [(_read_sums(capture, reply), i) for i, reply in zip(order, capture.uploads, strict=False)]
    return [ReceivedSums(*found, capture.truth[i][0].flatten(1), capture.truth[i][1]) for found, i in read if found]


def total_of(clients: Sequence[ReceivedSums]) -> ReceivedSums:
    """What a secure sum leaves."""
    return reduce(add, clients)


def _read_sums(capture: Capture, reply: Reply) -> tuple[Sums, float] | None:
    """A reply as sums over its samples and their resolution: sums as they are, or a locally trained model, whose way
    from the broadcast weights is taken for one long step along the gradient. None where the reply is neither.
    """
    exact = torch.empty(0, dtype=torch.float64)
    if SAMPLES not in reply.arrays or reply.arrays[SAMPLES].numel() != 1:
        return None
    samples = reply.take(SAMPLES).reshape(()).to(exact)
    if GRADIENT not in reply.arrays:
        if (trained := capture.local_model(reply)) is None:
            return None
        weights, length = trained
        gradient, resolution = (capture.weights - weights).to(exact) * samples / length, 2.0**-20
        return Sums({GRADIENT: gradient, SAMPLES: samples}), resolution
    arrays = {name: reply.take(name, None, exact) for name in reply.arrays if name == GRADIENT or "/" in name}
    if reply.arrays[GRADIENT].is_floating_point():
        return Sums(arrays | {SAMPLES: samples}), 2.0**-11 if GRADIENT in reply.halves else 2.0**-23
    return Sums({GRADIENT: _unwhitened(capture, arrays[GRADIENT]), SAMPLES: samples / COUNT}), 2.0**-23


def _unwhitened(capture: Capture, integers: Tensor) -> Tensor:
    """The integers [d] of `private-sums` as a gradient, with the public whitening taken back."""
    options, broadcast = capture.method.model_dump(), capture.broadcast
    sent = {name: broadcast.take(name, None, integers) for name in broadcast.arrays if is_whitening(name)}
    whitening = read_whitening(sent, capture.task.like.to(integers), options.get("damping", 0.0))
    inverse = {layer: torch.linalg.inv(P) for layer, P in whitening.items()}
    return whitened(integers * options["clip"] / GRAINS, inverse)


# -- Attacks -----------------------------------------------------------------------------------------------------------


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By a server that has each client's sums, where no masks hide them, and by one that has the cohort's total alone.
    Inputs behind a secret projection are left alone.
    """
    if capture.projection is not None or not capture.truth[0][0].is_floating_point():
        return []
    clients = sums_of(capture)
    if not clients:
        return []
    own = [] if capture.masked else on_sums(capture, clients[:_CLIENTS], "aggregator", seed)
    return own + on_sums(capture, [total_of(clients)], "secure-sum", seed)


def on_sums(capture: Capture, held: Sequence[ReceivedSums], role: str, seed: int = 0) -> list[Finding]:
    """Every attack on sums that somebody in this role has."""
    found = _class_counts(capture, held, role)
    first = next(iter(linear_layers(capture.task.at(capture.weights))), None)
    if first is None or first.module.in_features != held[0].x.shape[1]:  # it may see an input position by position
        return found
    return found + _pictures(capture, first, held, role) + _members(capture, first, held, role, seed)


def _pictures(capture: Capture, layer: LinearLayer, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """Each true picture behind a sum against whichever drawn one is most like it. The guess is as many public pictures,
    or for one the mean picture.
    """
    if not capture.pictures:
        return []
    values, chances, public = list[float](), list[float](), capture.public[0]
    for one in held:
        drawn = _inverted(layer, one)
        usual = public.mean(0, keepdim=True) if len(drawn) == 1 else public[: len(drawn)]
        original = capture.images(one.x[:_PICTURES])
        values += best_ssim(original, capture.images(drawn.to(one.x))).tolist()
        chances += best_ssim(original, capture.images(usual)).tolist()
    guess, details = sum(chances) / len(chances), {"samples": held[0].samples}
    return [Finding("analytic inversion, sums", role, "inputs", "best SSIM", values, guess, details)]


def _inverted(layer: LinearLayer, one: ReceivedSums) -> Tensor:
    """∂/∂W over ∂/∂b of each unit that the sum moved, [units, n_in]; of one sample its input, by least squares."""
    W, b = layer.matrices(one.gradient).tensor_split([-1], dim=1)
    if one.samples == 1:
        return b.T @ W / b.square().sum().clamp_min(torch.finfo(b.dtype).tiny)
    moved = b[:, 0].abs() > 1e-3 * b.abs().max()
    return W[moved] / b[moved]


# -- Labels ------------------------------------------------------------------------------------------------------------


def _class_counts(capture: Capture, held: Sequence[ReceivedSums], role: str) -> list[Finding]:
    """How many of each class, by the last bias's gradient Σ (p − y): the mix of public records that has it."""
    task, (x, labels) = capture.task, capture.others
    name, last = list(column_slices(trainable(task.model)).items())[-1]
    biased = name.endswith("bias") and last.stop - last.start == task.outputs
    if not biased or task.loss != "ce" or labels.is_floating_point():
        return []
    residuals = task.predict(capture.weights, x).softmax(1) - task.training_targets(labels)
    typical = torch.stack([residuals[labels == c].mean(0) for c in range(task.outputs)]).double()
    counts = torch.stack([counts_by_public(one.gradient[last], typical, one.samples) for one in held])
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1e-9)
    return [mix_finding("class counts, sums", role, shares, [one.y for one in held])]


def counts_by_public(seen: Tensor, typical: Tensor, samples: int) -> Tensor:
    """Class counts q ≥ 0 with Σ_c q_c typical_c nearest to what was seen [k]; `typical` [classes, k]: public means."""
    firm = 10 * typical.norm()  # there are `samples` of them: what is seen may not tell
    left = torch.cat([typical.T, firm.expand(1, len(typical))])
    counts, _ = nnls(left.numpy(), torch.cat([seen, samples * firm.reshape(1)]).numpy())
    return torch.from_numpy(counts)


# -- Membership --------------------------------------------------------------------------------------------------------


def _members(capture: Capture, layer: LinearLayer, held: Sequence[ReceivedSums], role: str, seed: int) -> list[Finding]:
    """Records looked up in the first layer's factor and in its gradient, all sums together."""
    x, y = capture.others
    # Moments come from other public records than those asked about, which would look a little unlike others.
    usual, fresh = ((x[start::2].flatten(1), y[start::2]) for start in (0, 1))
    moments = _first_layer(capture, layer, usual)
    scores = defaultdict[str, list[tuple[Tensor, Tensor]]](list)
    for number, one in enumerate(held):
        draws = torch.Generator().manual_seed(seed + number)
        some = torch.randperm(len(one.y), generator=draws)[: max(1, _ASKED // len(held))]
        asked = matched((one.x[some], one.y[some]), fresh, seed + number)
        a, b = (_first_layer(capture, layer, records) for records in asked)
        G, A = layer.matrices(one.gradient), one.factor(layer)
        scores["alignment"].append((alignment(G, a, moments), alignment(G, b, moments)))
        if A is not None:
            scores["input factor"].append((-leverage(A, a[0], one.resolution), -leverage(A, b[0], one.resolution)))
    found = []
    for name, pairs in scores.items():
        members, others = (torch.cat(side) for side in zip(*pairs, strict=True))
        if len(members) >= 4 and len(pairs) == len(held):
            found.append(by_scores(f"membership by {name}, sums", role, [(members, others)] * TRIALS, seed))
    return found


def _first_layer(capture: Capture, layer: LinearLayer, records: Records) -> tuple[Tensor, Tensor]:
    """Of each record v = [x, 1] [N, n_in + 1], and δ [N, units], the derivative of its training loss by the layer's
    outputs; float64.
    """
    task, kept = capture.task, list[Tensor]()
    model, x = task.at(capture.weights), records[0]
    handle = layer.module.register_forward_hook(lambda module, args, out: kept.append(out.requires_grad_()))
    try:
        with evaluating(model):
            outputs = model(x.view(len(x), *capture.truth[0][0].shape[1:]))
    finally:
        handle.remove()
    (delta,) = torch.autograd.grad(per_sample(task.loss, outputs, task.training_targets(records[1])).sum(), kept)
    return torch.cat([x, torch.ones_like(x[:, :1])], 1).double(), delta.double()


def leverage(A: Tensor, v: Tensor, resolution: float) -> Tensor:
    """vᵀ (A + ε)⁻¹ v for rows v [N, m] and A [m, m], float64; ε is the error that rounding makes in A's eigenvalues."""
    values, vectors = torch.linalg.eigh(A)
    least = resolution * A.abs().max() * math.sqrt(len(A))
    found: Tensor = ((v @ vectors).square() / (values.clamp_min(0) + least)).sum(1)
    return found


def alignment(G: Tensor, records: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor]) -> Tensor:
    """How much of each record's own gradient δ vᵀ lies in a layer's gradient G of a sum, [N]:

        δᵀ B⁻¹ G A⁻¹ v / √(δᵀ B⁻¹ δ · vᵀ A⁻¹ v),   A = E v vᵀ and B = E δ δᵀ over public records,

    so that what all records have in common does not count. A record in the sum adds √(units · inputs) on average where
    the others and the noise add numbers around 0. `records` and `public`: v [N, m] and δ [N, units].
    """

    def inverse(x: Tensor) -> Tensor:
        moments = x.T @ x / len(x)
        ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(x)
        inverted: Tensor = torch.linalg.inv(moments + ridge)
        return inverted

    (v, delta), (A, B) = records, map(inverse, public)
    sizes = ((v @ A) * v).sum(1) * ((delta @ B) * delta).sum(1)
    return ((delta @ (B @ G @ A)) * v).sum(1) / sizes.sqrt().clamp_min(1e-30)
