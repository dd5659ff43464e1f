"""What is tried on sums, whoever has them: inputs, membership and labels, out of the gradient and the factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ntkfl.audit.analytic import LinearLayer, linear_layers
from ntkfl.audit.capture import Capture
from ntkfl.audit.deep_leakage import Settings, match_gradient, reconstruct
from ntkfl.audit.descent import Loss
from ntkfl.audit.finding import Finding
from ntkfl.audit.labels import mix, overlap
from ntkfl.audit.measures import best_ssim, guesses, psnr, relative_error, ssim
from ntkfl.audit.received import Seen
from ntkfl.audit.sum_membership import members
from ntkfl.audit.unmixing import (
    counts_by_logits,
    counts_by_public,
    layer_gradient,
    ratios,
    single,
    unmix,
    whole,
)
from ntkfl.tangent.parameters import column_slices, trainable

_SCORED, _SHOWN = 8, 8  # pictures of a sum that are compared, and drawn
_UNMIXED = 64  # samples up to which inputs are searched for one by one
_OPTIMISED = 8  # and up to which all are optimised at once
_BOUND = 0.01  # weight of what dummies are beyond pixels
_STARTS, _STEPS = 10, 150  # random starts for each sample that is searched for; steps from each


def attacks(capture: Capture, held: list[Seen], role: str, of: str, seed: int, quick: bool) -> list[Finding]:
    if not held:
        return []
    found = _from_ratios(capture, held, role, of)
    found += _from_factor(capture, held, role, of, seed, quick)
    found += _optimised(capture, held, role, of, seed, quick)
    found += _means(capture, held, role, of)
    found += members(capture, _front(capture), held, role, of, seed)
    return found + ([] if role == "outsider" else _classes(capture, held, role, of))  # who does not know the scale


# -- Inputs ----------------------------------------------------------------------------------------------------------


def _front(capture: Capture) -> list[LinearLayer]:
    """The linear layers at the front, with the broadcast weights; a first one has to have a bias."""
    layers = linear_layers(capture.task.at(capture.weights))
    return layers if layers and layers[0].bias is not None else []


def _from_ratios(capture: Capture, held: list[Seen], role: str, of: str) -> list[Finding]:
    front = _front(capture)
    if not front:
        return []
    candidates = [(single if one.samples == 1 else ratios)(front[0], one.gradient) for one in held]
    return _pictures(f"analytic inversion, {of}", role, capture, held, candidates)


def _from_factor(capture: Capture, held: list[Seen], role: str, of: str, seed: int, quick: bool) -> list[Finding]:
    """One sample: the factor's eigenvector. More: unmixed with the gradient's help, in networks of two layers."""
    front, found = _front(capture), []
    most = _OPTIMISED if quick else _UNMIXED
    readable = len(front) == 2 and front[1].module.out_features == capture.task.outputs and capture.task.loss == "ce"
    factors = [one.factor(front[0]) if front else None for one in held]
    for one, A in zip(held, factors, strict=True):
        if A is None or one.samples > most or (one.samples > 1 and not readable) or capture.pixels is None:
            return []
        if one.samples == 1:
            v = torch.linalg.eigh(A).eigenvectors[:, -1]
            found.append((v[:-1] / v[-1]).unsqueeze(0))
            continue
        wanted = capture.task.training_targets(torch.arange(capture.task.outputs))
        told, starts = (A, one.gradient, one.samples, one.resolution, wanted), _STARTS * one.samples
        found.append(unmix(front[0], front[1], *told, _excess(capture), starts=starts, steps=_STEPS, seed=seed))
    return _pictures(f"unmixing, {of}", role, capture, held, found)


def _excess(capture: Capture) -> Callable[[Tensor], Tensor]:
    """How far inputs [N, d1] are outside of what pixels can be, Σ (distance to 0..1)², [N]."""
    assert capture.pixels is not None
    mean, std = (torch.tensor(v).view(-1, 1) for v in capture.pixels)  # [channels, 1]

    def excess(x: Tensor) -> Tensor:
        pixels = x.view(len(x), len(mean), -1) * std + mean
        return ((-pixels).relu() + (pixels - 1).relu()).square().flatten(1).sum(1)

    return excess


def _optimised(capture: Capture, held: list[Seen], role: str, of: str, seed: int, quick: bool) -> list[Finding]:
    """Deep leakage from the gradient alone, with the labels that it tells: where no factor tells the inputs' span.

    Dummies of a network that begins with a linear layer lie in the row space of its gradient, which the inputs span.
    """
    front, few = _front(capture), held[:2]
    if any(one.samples > _OPTIMISED or (front and one.factor(front[0]) is not None) for one in held):
        return []
    if capture.task.loss != "ce" or capture.pixels is None or (front and few[0].samples == 1):  # one is divided out
        return []
    shape, found = tuple(capture.truth[0][0].shape[1:]), []
    settings = Settings(steps=60 if quick else 300, restarts=4 if quick else 16, seed=seed)
    for one in few:
        counts = _counts(capture, one)
        if counts is None:
            return []
        y = torch.arange(capture.task.outputs).repeat_interleave(whole(counts, one.samples))
        target = (one.gradient / one.samples).to(capture.task.like)
        model = capture.task.at(capture.weights)
        match = match_gradient(model, shape, target, capture.task.training_targets(y), "ce")
        basis = torch.eye(math.prod(shape))
        if front:
            rows = torch.linalg.svd(layer_gradient(front[0], one.gradient), full_matrices=False)[2]
            basis = rows[: one.samples, :-1].float() * math.sqrt(rows.shape[1])
        loss = _within(match, basis, one.samples, _excess(capture))
        C, _ = reconstruct(loss, 1, one.samples * len(basis), settings)
        found.append(C.view(one.samples, -1) @ basis)
    return _pictures(f"deep leakage, {of}", role, capture, few, found)


def _within(match: Loss, basis: Tensor, samples: int, excess: Callable[[Tensor], Tensor]) -> Loss:
    """A loss of dummies as one of their coefficients in a basis [k, d1], with what they are beyond pixels added."""

    def loss(C: Tensor) -> Tensor:
        x = C.view(len(C) * samples, -1) @ basis
        beyond = excess(x).view(len(C), samples).mean(1)
        return match(x.view(len(C), -1)) + _BOUND * beyond

    return loss


def _pictures(
    attack: str, role: str, capture: Capture, held: Sequence[Seen], candidates: Sequence[Tensor]
) -> list[Finding]:
    """Each true picture against whichever candidate is most like it; the guess is as many public pictures, or for one
    candidate the mean picture. The mean picture's own likeness stands in the details.
    """
    if capture.pixels is None or not candidates:
        return []
    assert capture.public is not None
    values, chances, blank, noise, originals, shown = [], [], [], [], [], []
    public, labels = capture.public
    for one, found in zip(held, candidates, strict=True):
        original, seen = capture.images(one.x[:_SCORED]), capture.images(found.to(one.x))
        typical = capture.images(guesses((public, labels), torch.full((len(original),), -1)))
        likest = torch.stack([seen[ssim(o.expand_as(seen), seen).argmax()] for o in original])
        values += ssim(original, likest).tolist()
        blank += ssim(original, typical).tolist()
        chances += (
            ssim(original, typical) if len(seen) == 1 else best_ssim(original, capture.images(public[: len(seen)]))
        ).tolist()
        noise += psnr(original, likest).tolist()
        originals.append(original)
        shown.append(likest)
    mean, chance = sum(values) / len(values), sum(chances) / len(chances)
    details = {
        "mean picture": sum(blank) / len(blank),
        "PSNR": sum(noise) / len(noise),
        "pictures above 0.8": sum(value > 0.8 for value in values) / len(values),
        "samples": held[0].samples,
    }
    many = "The picture drawn" if len(candidates[0]) == 1 else f"The best of {len(candidates[0])} drawn pictures"
    says = f"{many} has an SSIM of {mean:.2f} (a guess: {chance:.2f}) where {held[0].samples:,} samples were added up."
    pictures = (torch.cat(originals)[:_SHOWN], torch.cat(shown)[:_SHOWN])
    what = "the pictures x behind a sum"
    return [Finding(attack, role, what, "best SSIM", tuple(values), chance, 1.0, says, None, None, details, pictures)]


def _means(capture: Capture, held: list[Seen], role: str, of: str) -> list[Finding]:
    """A factor's last column is Σ x: the mean input of those behind the sum, whatever their number."""
    front = _front(capture)
    factors = [one.factor(front[0]) for one in held] if front else []
    if not factors or any(A is None for A in factors):
        return []
    assert capture.public is not None
    truth = torch.stack([one.x.double().mean(0) for one in held])
    read = torch.stack([A[:-1, -1] / A[-1, -1] for A in factors if A is not None])
    usual = capture.public[0].flatten(1).double().mean(0).expand_as(truth)
    error, chance = relative_error(truth, read), float(relative_error(truth, usual).mean())
    says = f"The mean of {held[0].samples:,} inputs is read off to {float(error.mean()):.2%}; so are their covariances."
    attack, what = f"mean input, {of}", "the mean of the inputs x"
    return [Finding(attack, role, what, "relative error", tuple(error.tolist()), chance, 0.0, says)]


# -- Labels ----------------------------------------------------------------------------------------------------------


def _classes(capture: Capture, held: list[Seen], role: str, of: str) -> list[Finding]:
    """How many of each class: by the last bias's gradient, with its layer's inputs where they came; and by G alone."""
    if capture.task.loss != "ce" or capture.truth[0][1].is_floating_point():
        return []
    found = []
    for name, read in (("gradient", _counts), ("G", _counts_by_curvature)):
        told = [(one, counts) for one in held if (counts := read(capture, one)) is not None]
        if len(told) < len(held):
            continue
        classes = capture.task.outputs
        truth = torch.stack([mix(one.y, classes) for one, _ in told])
        rounded = torch.stack([whole(counts, one.samples) for one, counts in told])
        values = overlap(rounded / rounded.sum(1, keepdim=True), truth)
        right = rounded == torch.stack([torch.bincount(one.y, minlength=classes) for one, _ in told])
        guess = float(overlap(torch.full_like(truth, 1 / classes), truth).mean())
        part = float(values.mean())
        says = f"Of {held[0].samples:,} labels {part:.0%} are counted right (an even guess: {guess:.0%})."
        details = {"classes counted exactly": float(right.double().mean())}
        what, counted = "the class counts of a sum", f"class counts by {name}, {of}"
        found.append(Finding(counted, role, what, "overlap", tuple(values.tolist()), guess, 1.0, says, details=details))
    return found


def _counts(capture: Capture, one: Seen) -> Tensor | None:
    """Class counts [d2] from Σ (p − y); None where the network does not end with a bias of one entry per class."""
    task, w = capture.task, capture.weights
    name, last = list(column_slices(trainable(task.model)).items())[-1]
    if not name.endswith("bias") or last.stop - last.start != task.outputs:
        return None
    bias = one.gradient[last]
    shaped = next((s for s in one.layers() if s.layer.bias == (last.start, last.stop)), None)
    if shaped is None or shaped.inputs is None or shaped.inputs.form or not float(shaped.inputs.values.abs().max()):
        seen = _probabilities(capture)
        typical = _by_class(capture, seen - _trained_towards(capture))
        return counts_by_public(bias, typical, one.samples)
    readout = shaped.layer.matrices(w.double().cpu(), 1, task.outputs)[0]
    moments = shaped.inputs.square()[0] / one.samples
    centre = moments[:, -1] / moments[-1, -1]
    spread = readout @ (moments - torch.outer(centre, centre)) @ readout.T
    return counts_by_logits(bias, (readout @ centre, spread), one.samples, task.label_smoothing)


def _counts_by_curvature(capture: Capture, one: Seen) -> Tensor | None:
    """Class counts from the last layer's Σ (diag p − p pᵀ) alone, as the mix of public records that has it."""
    shaped = next((s for s in reversed(one.layers()) if s.outputs is not None), None)
    K = capture.task.outputs
    if shaped is None or shaped.outputs is None or shaped.outputs.form or shaped.outputs.size != K:
        return None
    p = _probabilities(capture)
    i, j = torch.triu_indices(K, K)
    G = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return counts_by_public(shaped.outputs.values[0], _by_class(capture, G[:, i, j]), one.samples)


def _probabilities(capture: Capture) -> Tensor:
    assert capture.public is not None
    return capture.task.predict(capture.weights, capture.public[0].to(capture.task.like)).softmax(1).double().cpu()


def _trained_towards(capture: Capture) -> Tensor:
    assert capture.public is not None
    return capture.task.training_targets(capture.public[1]).double().cpu()


def _by_class(capture: Capture, values: Tensor) -> Tensor:
    """The public mean of each class, [classes, k]."""
    assert capture.public is not None
    return torch.stack([values[capture.public[1] == c].mean(0) for c in range(capture.task.outputs)])
