"""What an attack found: numbers, the same number for a guess, and one sentence; and the measures of nearness."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ntkfl.extras import missing

ROLES = {
    "aggregator": "curious aggregator",
    "aggregator+insider": "aggregator and whoever knows the projection: a client or the key server",
    "aggregator+shuffler": "aggregator and shuffler together",
    "secure-sum": "aggregator that sees totals alone",
    "shuffler": "curious shuffler",
    "key-server": "curious key server",
    "outsider": "outsider",
}


@dataclass(frozen=True)
class Finding:
    """One attack by one role. `values` has one number per trial (an image, a seed), `guess` the same for guessing.

    `perfect` is the measure's value when everything is recovered (1 for SSIM and accuracy, 0 for a relative error), so
    that larger and smaller need no convention.
    """

    attack: str
    role: str  # a key of ROLES
    recovers: str  # what it claims to recover, e.g. "inputs"
    measure: str  # e.g. "SSIM", "accuracy", "relative error"
    values: list[float]
    guess: float
    says: str = ""  # one plain sentence
    details: dict[str, Any] = field(default_factory=dict)  # more measures, plain numbers
    perfect: float = 1.0

    @property
    def mean(self) -> float:
        """The mean over trials."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over trials; 0 for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def success(self) -> float:
        """How far from guessing (0) to recovering everything (1), clipped to that range."""
        gain = self.perfect - self.guess
        return 0.0 if gain == 0 else min(1.0, max(0.0, (self.mean - self.guess) / gain))

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"mean": self.mean, "spread": self.spread, "success": self.success}


# -- Measures ----------------------------------------------------------------------------------------------------------


def ssim(original: Tensor, recovered: Tensor) -> Tensor:
    """Structural similarity of pictures [n, C, H, W] in 0..1, one number each, [n]. 1: the same; about 0: unrelated.

    Wang et al. 2004 with Gaussian windows of σ = 1.5 (11×11), σ = 0.5 for pictures smaller than 16 pixels.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as measure
    except ImportError:
        raise missing("the audit", "audit") from None
    sigma = 1.5 if min(original.shape[-2:]) >= 16 else 0.5
    a, b = original.float(), recovered.nan_to_num().clamp(0, 1).float()
    values = measure(b, a, data_range=1.0, sigma=sigma, reduction="none")
    assert isinstance(values, Tensor)
    return values.reshape(len(original))


def best_ssim(originals: Tensor, candidates: Tensor) -> Tensor:
    """Of each original [n, C, H, W], its SSIM to whichever candidate [m, C, H, W] is most like it, [n]."""
    return torch.stack([ssim(x.expand_as(candidates), candidates).max() for x in originals])


def relative_error(original: Tensor, recovered: Tensor) -> Tensor:
    """‖x̂ − x‖/‖x‖ for each row, [n]; 0: exact; 1: as good as zero."""
    difference = (recovered - original).flatten(1).norm(dim=1)
    size: Tensor = original.flatten(1).norm(dim=1).clamp_min(torch.finfo(original.dtype).tiny)
    return torch.div(difference, size)


def guesses(public: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The public mean input of each label in `labels`, [n, ...]; of all where a label is unknown."""
    (x, y), everything = public, public[0].mean(0)
    if y.is_floating_point():
        return everything.expand(len(labels), *x.shape[1:])
    means = {int(c): x[y == c].mean(0) for c in torch.unique(y)}
    return torch.stack([means.get(int(c), everything) for c in labels])


def overlap(shares: Tensor, truth: Tensor) -> Tensor:
    """Σ_c min(q̂_c, q_c) of class shares [m, classes]: the part of labels that is right, whatever their order. [m]"""
    return torch.minimum(shares, truth).sum(1)


def mix(labels: Tensor, classes: int) -> Tensor:
    """Class shares [classes] of labels [n]."""
    return torch.bincount(labels, minlength=classes).double() / max(1, len(labels))


def mix_finding(attack: str, role: str, shares: Tensor, labels: list[Tensor]) -> Finding:
    """Class shares [m, classes] against those of `labels`; the guess is that all classes are as frequent."""
    truth = torch.stack([mix(y, shares.shape[1]) for y in labels])
    values = overlap(shares, truth)
    guess = float(overlap(torch.full_like(truth, 1 / shares.shape[1]), truth).mean())
    says = f"The class mix is known to {float(values.mean()):.0%} (an even guess: {guess:.0%})."
    return Finding(attack, role, "labels", "overlap", values.tolist(), guess, says)
