"""What an attack found: numbers, the same number for a guess, and a sentence; and the measures of nearness."""

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


# Of each measure its value when everything is recovered, so that larger and smaller need no convention, and a sentence.
MEASURES = {
    "SSIM": (1.0, "Pictures come back with an SSIM of {mean:.2f} (a guess by the label: {guess:.2f})."),
    "best SSIM": (1.0, "The best of the drawn pictures has an SSIM of {mean:.2f} (a guess: {guess:.2f})."),
    "relative error": (0.0, "Recovered but for {mean:.1%} of their size (a guess: {guess:.1%})."),
    "accuracy": (1.0, "{mean:.0%} of them are right (a guess: {guess:.0%})."),
    "overlap": (1.0, "The class mix is known to {mean:.0%} (an even guess: {guess:.0%})."),
    "advantage": (1.0, "Members are told from others with an advantage of {mean:.3f} (0 is guessing, 1 is certainty)."),
}


@dataclass(frozen=True)
class Finding:
    """One attack by one role. `values` has one number per trial (an image, a seed), `guess` the same for guessing."""

    attack: str
    role: str  # a key of ROLES
    recovers: str  # what it claims to recover, e.g. "inputs"
    measure: str  # a key of MEASURES
    values: list[float]
    guess: float
    details: dict[str, Any] = field(default_factory=dict)  # more measures, plain numbers

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
        gain = MEASURES[self.measure][0] - self.guess
        return 0.0 if gain == 0 else min(1.0, max(0.0, (self.mean - self.guess) / gain))

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON."""
        says = MEASURES[self.measure][1].format(mean=self.mean, guess=self.guess)
        return asdict(self) | {"mean": self.mean, "spread": self.spread, "success": self.success, "says": says}


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
    return Finding(attack, role, "labels", "overlap", values.tolist(), guess)
