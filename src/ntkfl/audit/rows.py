"""Attacks on rows of samples, as the aggregator receives them: inputs, labels, senders, and who took part.

Inputs are read in closed form where the first layer has one, alone and with who has the projection. Labels travel with
their rows. Rows of one client resemble one another, which links them again where a shuffler has mixed them: clients'
classes are skewed, and their inputs alike. A record is looked up among the inputs that were read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.audit.analytic import Prior, Recovery, distances, gaussian_prior, invert, lift
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding, guesses, mix, mix_finding, relative_error, ssim
from ntkfl.audit.membership import TRIALS, by_scores, matched
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.tangent import Jacobian, concatenate

_INVERTED = 50  # rows whose inputs are scored
_ASKED = 500  # records that are looked up


class ReceivedRows(NamedTuple):
    """J [n, d2, d] in the form it came in, outputs [n, d2], labels [n] of all rows of the round."""

    J: Jacobian
    outputs: Tensor
    labels: Tensor


def rows_of(capture: Capture) -> ReceivedRows:
    """All rows, in the order the aggregator has them."""
    uploads = [upload for upload in capture.uploads if isinstance(upload, TangentRows)]
    outputs, labels = (torch.cat(own) for own in zip(*((u.outputs, u.labels) for u in uploads), strict=True))
    return ReceivedRows(concatenate([upload.J for upload in uploads]), outputs, labels)


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """Every attack on rows; none where clients send other replies. `seed` draws the records that are looked up."""
    if not issubclass(capture.reply, TangentRows):
        return []
    rows = rows_of(capture)
    seen = read(capture, rows.J)
    return [
        *inputs(capture, rows),
        *labels(capture, rows),
        *senders(capture, rows, seen),
        *members(capture, seen, seed),
    ]


def read(capture: Capture, J: Jacobian, prior: Prior | None = None) -> Recovery | None:
    """The network's inputs [n, d1] behind rows of J, read in closed form; None if they cannot be, or are tokens."""
    x = capture.truth[0][0]
    width = math.prod(x.shape[1:])
    found = invert(capture.task.at(capture.weights), J, prior) if x.is_floating_point() else None
    if found is None or found.x.shape[1] < width:
        return None
    # A first layer that is used again, further on, has those inputs behind its own.
    return Recovery(found.x[:, :width], found.known[:, :width], found.bound)


def inputs(capture: Capture, rows: ReceivedRows) -> list[Finding]:
    """Inputs of some rows, evenly spread over the round: by the aggregator, and with P by whoever has it. None where
    inputs cannot be read.
    """
    total, P, public = len(rows.labels), capture.projection, capture.public
    count = min(_INVERTED, total)
    some = torch.arange(count) * total // count
    prior = gaussian_prior(capture.others[0]) if P is None and rows.labels.ndim == 1 else None
    found = read(capture, rows.J[some], prior)
    if found is None:
        return []
    z, details = found.x, {"coordinates read off": float(found.known.double().mean())}
    everything, all_labels, _ = capture.aligned()
    x, y, raw = (t[some] for t in capture.aligned())

    def scored(role: str, attack: str, what: str, truth: Tensor, drawn: Tensor, chance: Tensor) -> Finding:
        """The relative error of `drawn` [n, d] beside that of a guess."""
        error, usual = (relative_error(truth.flatten(1), found.flatten(1)) for found in (drawn, chance))
        return Finding(attack, role, what, "relative error", error.tolist(), float(usual.mean()), details)

    attack, role = "analytic inversion", "aggregator"
    # The guess is the round's mean input of each row's label: what the label alone would tell.
    chance = guesses((everything.flatten(1), all_labels), y)
    findings = [scored(role, attack, "inputs" if P is None else "projected inputs z", x, z, chance)]
    chance = guesses(public, y)
    if P is not None:
        # What is not known lies within its bound, and the equations have said something of it: about a sixth is left.
        left = (~found.known).to(z) * found.bound.clamp(max=1e3).square().unsqueeze(1) / 6
        noise = float(left.mean() / z.square().mean())
        z, attack, role = lift(z, P, public[0], min(1.0, max(1e-4, noise))), f"{attack}, with P", capture.asker
        findings.append(scored(role, attack, "inputs", raw, z, chance))
    if capture.pictures:
        likeness, usual = (ssim(capture.images(raw), capture.images(drawn)) for drawn in (z, chance))
        findings.append(Finding(attack, role, "inputs", "SSIM", likeness.tolist(), float(usual.mean()), details))
    return findings


def labels(capture: Capture, rows: ReceivedRows) -> list[Finding]:
    """Labels row by row, and each client's class mix: of shuffled rows that of all. None where targets are real."""
    if rows.labels.is_floating_point() or capture.task.loss != "ce":
        return []
    classes, clients = capture.task.outputs, [y for _, y in capture.truth]
    right = float((rows.labels == capture.aligned()[1]).double().mean())
    found = Finding("labels of rows", "aggregator", "labels", "accuracy", [right], 1 / classes)
    each = torch.split(rows.labels, [len(y) for y in clients])
    parts = each if capture.order is None else [rows.labels] * len(clients)
    shares = torch.stack([mix(part, classes) for part in parts])
    return [found, mix_finding("class mix of clients", "aggregator", shares, clients)]


def senders(capture: Capture, rows: ReceivedRows, seen: Recovery | None) -> list[Finding]:
    """For each row the one likeliest of the same sender: of the same label, and nearest. `values` are the share of hits
    of each client's rows; the guess is a row picked at random.
    """
    attack, role, what, measure = "rows of one sender", "aggregator", "who sent a row", "accuracy"
    if capture.order is None:  # every reply comes from a known client
        return [Finding(attack, role, what, measure, [1.0], 1 / len(capture.cohort))]
    true = torch.cat([torch.full((len(y),), i) for i, (_, y) in enumerate(capture.truth)])[capture.order]
    if seen is None:
        distance = torch.cdist(rows.outputs.double(), rows.outputs.double())
    else:
        distance = distances(seen, seen).clamp_max(1e6)
    other_label = rows.labels.unsqueeze(0) != rows.labels.unsqueeze(1)
    distance = distance + other_label * (float(distance.max()) + 1)
    hit = (true[distance.fill_diagonal_(float("inf")).argmin(1)] == true).double()
    same = (true.unsqueeze(0) == true.unsqueeze(1)).double().fill_diagonal_(0)
    guess = float(same.sum() / (len(true) * (len(true) - 1)))
    values = [float(hit[true == c].mean()) for c in torch.unique(true)]
    return [Finding(attack, role, what, measure, values, guess, {"of all rows": float(hit.mean())})]


def members(capture: Capture, seen: Recovery | None, seed: int) -> list[Finding]:
    """Look a record up among the inputs that were read: the nearer the nearest, the likelier a member. To place a
    record beside projected inputs takes the projection.
    """
    if seen is None:
        return []
    pair = matched(capture.members, capture.others, seed)
    some = torch.randperm(len(pair[0][1]), generator=torch.Generator().manual_seed(seed))[:_ASKED]
    a, b = (-distances(seen, Recovery.whole(x[some].flatten(1))).amin(0) for x, _ in pair)
    return [by_scores("membership by looking rows up", capture.asker, [(a, b)] * TRIALS, seed)]
