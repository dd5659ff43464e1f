"""Attacks on rows of samples, as the aggregator receives them: inputs, labels, senders, and who took part.

Inputs are read in closed form where the first layer has one, alone and with who has the projection. Labels travel with
their rows. Rows of one client resemble one another, which links them again where a shuffler has mixed them: clients'
classes are skewed, and their inputs alike. A record is looked up among the inputs that were read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.audit.analytic import Recovery, distances, gaussian_prior, invert, lift
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding, guesses, mix, mix_finding, relative_error, ssim
from ntkfl.audit.membership import by_scores, matched, records
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.tangent import Jacobian, concatenate

_INVERTED = 50  # rows whose inputs are scored
_ASKED = 500  # records that are looked up


@dataclass(frozen=True)
class ReceivedRows:
    """J [n, d2, d] in the form it came in, outputs [n, d2], labels [n]; `index` are the rows' places in the round."""

    J: Jacobian
    outputs: Tensor
    labels: Tensor
    index: Tensor


def rows_of(capture: Capture, wanted: Sequence[int] | None = None) -> ReceivedRows:
    """The rows `wanted` (places in the round, ascending; all if None)."""
    at, parts = 0, []
    for upload in capture.uploads:
        assert isinstance(upload, TangentRows)
        n = len(upload.J)
        here = range(n) if wanted is None else [i - at for i in wanted if 0 <= i - at < n]
        if len(here):
            index = torch.tensor(list(here))
            parts.append((upload.J[index], upload.outputs[index], upload.labels[index], index + at))
        at += n
    Js, *tensors = zip(*parts, strict=True)
    return ReceivedRows(concatenate(list(Js)), *(torch.cat(t) for t in tensors))


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """Every attack on rows; none where clients send other replies. `seed` draws the records that are looked up."""
    if not issubclass(capture.reply, TangentRows):
        return []
    rows = rows_of(capture)
    seen = invert(capture.task.at(capture.weights), rows.J) if capture.truth[0][0].is_floating_point() else None
    return [*inputs(capture), *labels(capture, rows), *senders(capture, rows, seen), *_members(capture, seen, seed)]


def inputs(capture: Capture) -> list[Finding]:
    """Inputs of some rows, evenly spread over the round: by the aggregator, and with P by whoever has it. None where
    inputs are token ids, or no closed form is known.
    """
    if not capture.truth[0][0].is_floating_point():
        return []
    total = sum(len(y) for _, y in capture.truth)
    rows = rows_of(capture, [i * total // min(_INVERTED, total) for i in range(min(_INVERTED, total))])
    prior = None
    if capture.projection is None and capture.public is not None and rows.labels.ndim == 1:
        prior = gaussian_prior(capture.public[0])
    width = math.prod(capture.truth[0][0].shape[1:])
    found = invert(capture.task.at(capture.weights), rows.J, prior)
    if found is None or found.x.shape[1] < width:
        return []
    z, known = found.x[:, :width], found.known[:, :width]  # what a layer is given again, further on, lies behind
    details = {"coordinates read off": float(known.double().mean())}
    everything, all_labels, _ = capture.aligned()
    x, y, raw = (t[rows.index] for t in capture.aligned())

    def scored(role: str, attack: str, what: str, truth: Tensor, drawn: Tensor, chance: Tensor) -> Finding:
        """The relative error of `drawn` [n, d] beside that of a guess."""
        error = relative_error(truth.flatten(1), drawn)
        usual = float(relative_error(truth.flatten(1), chance.flatten(1)).mean())
        says = f"{what[0].upper()}{what[1:]} are recovered to {float(error.mean()):.1%} of their size."
        return Finding(attack, role, what, "relative error", tuple(error.tolist()), usual, 0.0, says, details)

    attack, role, P = "analytic inversion", "aggregator", capture.projection
    # The guess is the round's mean input of each row's label: what the label alone would tell.
    chance = guesses((everything.flatten(1), all_labels), y)
    findings = [scored(role, attack, "inputs" if P is None else "projected inputs z", x, z, chance)]
    if capture.public is None:
        return findings
    chance = guesses(capture.public, y)
    if P is not None:
        # What is not known lies within its bound, and the equations have said something of it: about a sixth is left.
        left = (~known).to(z) * found.bound.clamp(max=1e3).square().unsqueeze(1) / 6
        noise = float(left.mean() / z.square().mean())
        z, attack, role = lift(z, P, capture.public[0], min(1.0, max(1e-4, noise))), f"{attack}, with P", capture.asker
        findings.append(scored(role, attack, "inputs", raw, z, chance))
    if capture.pixels is not None:
        likeness = ssim(capture.images(raw), capture.images(z))
        usual = float(ssim(capture.images(raw), capture.images(chance)).mean())
        says = f"Pictures come back with an SSIM of {float(likeness.mean()):.2f} (a guess by the label: {usual:.2f})."
        findings.append(Finding(attack, role, "inputs", "SSIM", tuple(likeness.tolist()), usual, 1.0, says, details))
    return findings


def labels(capture: Capture, rows: ReceivedRows) -> list[Finding]:
    """Labels row by row, and each client's class mix: of shuffled rows that of all. None where targets are real."""
    if rows.labels.is_floating_point() or capture.task.loss != "ce":
        return []
    classes, clients = capture.task.outputs, [y for _, y in capture.truth]
    right = float((rows.labels == capture.aligned()[1]).double().mean())
    says = f"Labels travel with their rows: {right:.0%} of them are read off."
    found = Finding("labels of rows", "aggregator", "labels", "accuracy", (right,), 1 / classes, 1.0, says)
    parts = [rows.labels] * len(clients) if capture.sent_by else torch.split(rows.labels, [len(y) for y in clients])
    shares = torch.stack([mix(part, classes) for part in parts])
    return [found, mix_finding("class mix of clients", "aggregator", shares, clients)]


def senders(capture: Capture, rows: ReceivedRows, seen: Recovery | None) -> list[Finding]:
    """For each row the one likeliest of the same sender: of the same label, and nearest. `values` are the share of hits
    of each client's rows; the guess is a row picked at random.
    """
    name, what = "rows of one sender", "who sent a row"
    if not capture.sent_by:
        says = "Without a shuffler every reply comes from a known client: nothing is hidden."
        return [Finding(name, "aggregator", what, "accuracy", (1.0,), 1 / len(capture.cohort), 1.0, says)]
    true = torch.tensor([client for client, _ in capture.sent_by])[rows.index]
    if seen is None:
        distance = torch.cdist(rows.outputs.double(), rows.outputs.double())
    else:
        distance = distances(seen, seen).clamp_max(1e6)
    other_label = rows.labels.unsqueeze(0) != rows.labels.unsqueeze(1)
    distance = distance + other_label * (float(distance.max()) + 1)
    hit = true[distance.fill_diagonal_(float("inf")).argmin(1)] == true
    same = (true.unsqueeze(0) == true.unsqueeze(1)).double().fill_diagonal_(0)
    guess = float(same.sum() / (len(true) * (len(true) - 1)))
    values = tuple(float(hit[true == c].double().mean()) for c in sorted(set(true.tolist())))
    rate = float(hit.double().mean())
    says = f"The most similar row is by the same sender in {rate:.0%} of cases (a random row: {guess:.0%})."
    return [Finding(name, "aggregator", what, "accuracy", values, guess, 1.0, says, {"of all rows": rate})]


def _members(capture: Capture, seen: Recovery | None, seed: int) -> list[Finding]:
    """Look a record up among the inputs that were read: the nearer the nearest, the likelier a member. To place a
    record beside projected inputs takes the projection.
    """
    if seen is None or capture.public is None:
        return []
    pair = matched(*records(capture), seed)
    some = torch.randperm(len(pair[0][1]), generator=torch.Generator().manual_seed(seed))[:_ASKED]
    a, b = (-distances(seen, Recovery.whole(x[some].flatten(1))).amin(0) for x, _ in pair)
    return [by_scores("membership by looking rows up", capture.asker, a, b, seed)]
