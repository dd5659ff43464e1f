"""What sums over n samples give away, as mathematics: a gradient Σ δ xᵀ, input factors Σ v vᵀ, a last layer's G.

With v = [x, 1], A = Σ v vᵀ = RᵀR for R of rank n: the inputs are the rows of QR for an orthogonal Q that nobody sent.
One sample: v itself. Few: a record is in the sum just where it lies in the row space of R, and a row q of Q is found by
itself, because the first layer's gradient Σ δ vᵀ = D R tells the sensitivity δ = D q of the sample that q stands for,
which the public weights predict from its input and label. (Without A gradients are harder to unmix: Kariyappa et al.,
Cocktail Party Attack, ICML 2023; Dimitrov et al., SPEAR, NeurIPS 2024.) Many: vᵀ A⁻¹ v, the leverage, is at most 1 for
the samples of the sum, and larger for others, the more so the fewer there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.optimize import nnls
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer
from ntkfl.audit.descent import minimise

_FIRM, _NORM = 100.0, 5.0  # weights of the sensitivities, and of |q| = 1
_SOFT, _SHARP = 20.0, 2000.0  # a ReLU's kink, while rows are searched for and in the end
_ALIKE = 0.5  # |cos| from which two rows of Q are taken for one
_DRAWN = 4096


def layer_gradient(layer: LinearLayer, gradient: Tensor) -> Tensor:
    """A linear layer's columns of a gradient [d] as Σ δ vᵀ, [n_out, n_in + 1]."""
    assert layer.bias is not None
    W = gradient[layer.weight].view(layer.module.out_features, layer.module.in_features)
    return torch.cat([W, gradient[layer.bias].unsqueeze(1)], 1)


def ratios(layer: LinearLayer, gradient: Tensor) -> Tensor:
    """∂/∂W over ∂/∂b for each unit that a sum moved, [units, n_in]: of one sample its input, of more a blend each."""
    both = layer_gradient(layer, gradient)
    W, b = both[:, :-1], both[:, -1]
    moved = b.abs() > 1e-3 * b.abs().max()
    return W[moved] / b[moved, None]


def single(layer: LinearLayer, gradient: Tensor) -> Tensor:
    """The one input behind a gradient, [1, n_in], by least squares over units: Σ b W / Σ b²."""
    both = layer_gradient(layer, gradient)
    W, b = both[:, :-1], both[:, -1]
    return (b @ W / b.square().sum().clamp_min(torch.finfo(b.dtype).tiny)).unsqueeze(0)


def leverage(A: Tensor, v: Tensor, resolution: float) -> Tensor:
    """vᵀ (A + ε)⁻¹ v for rows v [N, m] and A [m, m], float64; ε is the error that rounding makes in A's eigenvalues."""
    values, vectors = torch.linalg.eigh(A)
    least = resolution * A.abs().max() * math.sqrt(len(A))
    found: Tensor = ((v @ vectors).square() / (values.clamp_min(0) + least)).sum(1)
    return found


def outside(gradient: Tensor, v: Tensor, resolution: float) -> Tensor:
    """The part of each v² [N, m] that lies outside the row space of a layer's gradient [units, m], [N]."""
    _, sizes, rows = torch.linalg.svd(gradient, full_matrices=False)
    unsure = resolution * gradient.abs().max() * (math.sqrt(gradient.shape[0]) + math.sqrt(gradient.shape[1]))
    # Directions count as far as they are above rounding: none is cut off, none that is noise is trusted.
    trust = sizes.square() / (sizes.square() + unsure.square())
    inside = ((v @ rows.T).square() * trust).sum(1)
    left: Tensor = 1 - inside / v.square().sum(1)
    return left


def unmix(
    first: LinearLayer,
    second: LinearLayer,
    A: Tensor,
    gradient: Tensor,
    samples: int,
    resolution: float,
    targets: Tensor,
    excess: Callable[[Tensor], Tensor],
    *,
    starts: int,
    steps: int,
    seed: int,
) -> Tensor:
    """Inputs [≤ samples, n_in] behind A and the gradient of a network of two layers with cross-entropy, best first.

    `targets` [classes, d2] are what a sample of each class is trained towards; `excess` says how far inputs [N, n_in]
    are outside what inputs can be. Every row of Q is searched for alone, from `starts` random ones, a class each.
    """
    values, vectors = torch.linalg.eigh(A)
    kept = min(samples, int((values > resolution * A.abs().max() * math.sqrt(len(A)) / 4).sum()))
    values, R = values[-kept:], (values[-kept:].sqrt() * vectors[:, -kept:]).T  # [kept, n_in + 1]
    D = (layer_gradient(first, gradient) @ R.T / values).float()  # [units, kept]
    R, readout = R.float(), second.module.weight.detach().float()
    wanted = targets[torch.arange(starts) % len(targets)].float()
    typical = (wanted @ readout).square().sum(1)

    def loss(q: Tensor, gate: float = _SOFT, wanted: Tensor = wanted, typical: Tensor = typical) -> Tensor:
        v = q @ R
        before: Tensor = first.module(v[:, :-1])
        error = second.module(before.relu()).softmax(1) - wanted
        delta = error @ readout * (gate * before).sigmoid()
        apart = (q @ D.T - delta).square().sum(1) / typical
        size = (q.square().sum(1) - 1).square() + 10 * (v[:, -1] - 1).square()
        total: Tensor = excess(v[:, :-1]) + _FIRM * apart + _NORM * size
        return total

    start = torch.randn(starts, kept, generator=torch.Generator().manual_seed(seed))
    start = start / start.norm(dim=1, keepdim=True)
    q, match = minimise(loss, start * (start @ R[:, -1:]).sign(), steps)
    directions = q / q.norm(dim=1, keepdim=True)
    found: list[int] = []
    for i in match.argsort().tolist():
        if all(abs(float(directions[i] @ directions[j])) < _ALIKE for j in found):
            found.append(i)
        if len(found) == samples:
            break
    # What a soft kink did for the search it spoils in the end.
    few, sizes = wanted[found], typical[found]
    q, _ = minimise(lambda q: loss(q, _SHARP, few, sizes), q[found], steps)
    inputs: Tensor = q @ R[:, :-1]
    return inputs


def counts_by_logits(bias: Tensor, logits: tuple[Tensor, Tensor], samples: int, smoothing: float) -> Tensor:
    """Class counts [d2] from Σ (p − y), the last bias's gradient, and mean and covariance of the logits.

    Σ p is taken for that of Gaussian logits; of one sample, whose covariance is zero, it is exact.
    """
    mean, covariance = logits
    values, vectors = torch.linalg.eigh(covariance)
    draws = torch.randn(_DRAWN, len(mean), dtype=mean.dtype, generator=torch.Generator().manual_seed(0))
    p = (mean + draws * values.clamp_min(0).sqrt() @ vectors.T).softmax(1).mean(0)
    counts: Tensor = (samples * (p - smoothing / len(mean)) - bias) / (1 - smoothing)
    return counts.clamp(0, samples)


def counts_by_public(seen: Tensor, typical: Tensor, samples: int) -> Tensor:
    """Class counts q ≥ 0 with Σ_c q_c typical_c nearest to what was seen [k]; `typical` [classes, k]: public means."""
    firm = 10 * typical.double().norm()  # there are `samples` of them: what is seen may not tell
    left = torch.cat([typical.T.double(), firm.expand(1, len(typical))])
    counts, _ = nnls(left.numpy(), torch.cat([seen.double(), samples * firm.reshape(1)]).numpy())
    return torch.from_numpy(counts)


def whole(counts: Tensor, samples: int) -> Tensor:
    """Counts as whole numbers that add up to `samples`, by largest remainders."""
    scaled = counts.double() * samples / counts.sum().clamp_min(1e-9)
    base = scaled.floor()
    left = samples - int(base.sum())
    base[(scaled - base).topk(left).indices] += 1
    return base.long()
