"""Are inputs readable from rows, alone and with who has the projection? In closed form, where the first layer has one.

What sums tell, and updates taken for sums, is in `sums.py`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ntkfl.audit.analytic import gaussian_prior, invert, lift
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.measures import best_ssim, guesses, relative_error, ssim
from ntkfl.audit.received import ReceivedRows, rows_of, sends_rows, spread

_INVERTED = 50  # rows that are attacked
_SCORED = 10  # pictures of each client or sum that are compared


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the aggregator, and with P by whoever has it. Empty where inputs are token ids, or no rows are sent. `seed` is
    not used: nothing here is random.
    """
    if not capture.truth[0][0].is_floating_point() or not sends_rows(capture):
        return []
    rows = rows_of(capture, spread(capture, _INVERTED))
    prior = None
    if capture.projection is None and capture.public is not None and rows.labels.ndim == 1:
        prior = gaussian_prior(capture.public[0])
    found, width = invert(capture.task.at(capture.weights), rows.J, prior), math.prod(_shape(capture))
    if found is None or found.x.shape[1] < width:
        return []
    x, known = found.x[:, :width], found.known[:, :width]  # what a layer is given again, further on, lies behind
    more = {"coordinates read off": float(known.double().mean())}
    # What is not known lies within its bound, and the equations have said something of it: about a sixth is left.
    left = (~known).to(x) * found.bound.clamp(max=1e3).square().unsqueeze(1) / 6
    return _score_rows("analytic inversion", capture, rows, x, more, float(left.mean() / x.square().mean()))


def _score_rows(
    attack: str, capture: Capture, rows: ReceivedRows, found: Tensor, more: dict[str, Any], noise: float
) -> list[Finding]:
    """Findings of network inputs recovered for these rows: of z or x, and, with P, of x behind z, which takes `noise`
    for the part of z² that is wrong.
    """
    everything, labels, _ = capture.aligned()
    x, y, raw = (t[rows.index] for t in capture.aligned())
    hidden = capture.projection is not None
    error = relative_error(x.flatten(1), found)
    # The guess is the round's mean input of each row's label: what the label alone would tell.
    chance = relative_error(x.flatten(1), guesses((everything.flatten(1), labels), y)).mean()
    what = "projected inputs z" if hidden else "inputs"
    says = f"The network's inputs are recovered to {float(error.mean()):.1%} of their size."
    values = tuple(error.tolist())
    scored = [Finding(attack, "aggregator", what, "relative error", values, float(chance), 0.0, says, more)]
    if capture.public is None:
        return scored
    role, name = ("aggregator+insider", f"{attack}, with P") if hidden else ("aggregator", attack)
    if capture.projection is not None:
        found = lift(found, capture.projection, capture.public[0], min(1.0, max(1e-4, noise)))
        error = relative_error(raw.flatten(1), found)
        chance = relative_error(raw.flatten(1), guesses(capture.public, y).flatten(1)).mean()
        says = f"With P, the inputs themselves are recovered to {float(error.mean()):.1%} of their size."
        values = tuple(error.tolist())
        scored.append(Finding(name, role, "inputs", "relative error", values, float(chance), 0.0, says, more))
    if capture.pixels is not None:
        original, seen = capture.images(raw), capture.images(found)
        likeness, usual = ssim(original, seen), float(ssim(original, capture.images(guesses(capture.public, y))).mean())
        says = f"Pictures come back with an SSIM of {float(likeness.mean()):.2f} (a guess by the label: {usual:.2f})."
        scored.append(Finding(name, role, "inputs", "SSIM", tuple(likeness.tolist()), usual, 1.0, says, more))
    return scored


def score_pictures(
    attack: str, role: str, capture: Capture, raw: list[Tensor], candidates: list[Tensor], more: dict[str, Any]
) -> list[Finding]:
    """Each true picture behind an update or a sum against whichever candidate is most like it. The guess is as many
    public pictures, or for one candidate the mean picture.
    """
    if capture.pixels is None or capture.public is None:
        return []
    values, chances = [], []
    for own, found in zip(raw, candidates, strict=False):
        original, public = capture.images(own[:_SCORED]), capture.public[0][: len(found)]
        if len(found) == 1:
            public = capture.public[0].mean(0, keepdim=True)
        values += best_ssim(original, capture.images(found.to(own))).tolist()
        chances += best_ssim(original, capture.images(public)).tolist()
    mean, chance = sum(values) / len(values), sum(chances) / len(chances)
    many = "The picture drawn" if len(candidates[0]) == 1 else f"The best of {len(candidates[0])} drawn pictures"
    says = f"{many} has an SSIM of {mean:.2f} (a guess: {chance:.2f})."
    return [Finding(attack, role, "inputs", "best SSIM", tuple(values), chance, 1.0, says, more)]


def _shape(capture: Capture) -> tuple[int, ...]:
    """Of one input as the network takes it."""
    return tuple(capture.truth[0][0].shape[1:])
