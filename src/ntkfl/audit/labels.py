"""Attack 4a: labels, and the class mix of each client.

NTK-FL sends a label with every row. An averaging method's update tells class counts by its last bias: Wainakh et al.,
User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022, after Zhao, Mopuri, Bilen, iDLG, 2020. A
local step moves bias c by lr (share of c − mean probability of c), so the share is had from the movement once the
probabilities are known. They are had by doing what the client did on public records of the presumed mix, and correcting
the mix until the movement is the one that came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.received import local_updates, rows_of, sends_rows
from ntkfl.methods import ClientRound
from ntkfl.methods.local_sgd import train_locally
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import column_slices, trainable

_CORRECTIONS = 8
_SAMPLES = 200  # of a presumed client


def overlap(shares: Tensor, truth: Tensor) -> Tensor:
    """Σ_c min(q̂_c, q_c) of class shares [m, classes]: the part of labels that is right, whatever their order. [m]"""
    return torch.minimum(shares, truth).sum(1)


def mix(labels: Tensor, classes: int) -> Tensor:
    """Class shares [classes] of labels [n]."""
    return torch.bincount(labels, minlength=classes).double() / max(1, len(labels))


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the aggregator: labels row by row, and each client's class mix. Empty where targets are no classes."""
    classes = capture.task.outputs
    if capture.truth[0][1].is_floating_point() or capture.task.loss != "ce":
        return []
    truth = torch.stack([mix(y, classes) for _, y in capture.truth])
    even = torch.full_like(truth, 1 / classes)
    if sends_rows(capture):
        return _from_rows(capture, truth, even)
    found = infer_mix(capture, seed)
    return [] if found is None else [_mixes(found, truth, even, "the last bias of each client's update")]


def infer_mix(capture: Capture, seed: int = 0) -> Tensor | None:
    """Class shares [clients, classes] from averaging updates; None where they do not come as weights with a bias."""
    task, updates = capture.task, local_updates(capture)
    if not updates or capture.public is None:
        return None
    w = capture.weights
    name, last = list(column_slices(trainable(task.model)).items())[-1]
    if not name.endswith("bias") or last.stop - last.start != task.outputs:
        return None
    moved = torch.stack([update.weights[last] - w[last] for update in updates]).double()
    public, labels = capture.public
    x = (public if capture.projection is None else capture.projection(public)).to(w)
    steps, lr = updates[0].steps, updates[0].lr  # of `local_epochs` the number is the client's to know
    shares = torch.full_like(moved, 1 / task.outputs)
    draws = torch.Generator().manual_seed(seed)
    pools = [(labels == c).nonzero()[:, 0] for c in range(task.outputs)]
    pools = [pool[torch.randperm(len(pool), generator=draws)] for pool in pools]
    for _ in range(_CORRECTIONS):
        presumed = [_client(i, q, pools, x, labels) for i, q in enumerate(shares)]
        result = train_locally(task, w, presumed, steps, lr, _SAMPLES)
        simulated = (result.weights[:, last] - w[last]).double()
        # The samples that were drawn have the shares they have, by rounding.
        drawn = torch.stack([mix(client.y, task.outputs) for client in presumed])
        shares = (drawn + (moved - simulated) / (lr * steps)).clamp_min(0)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1e-9)
    return shares


def _client(i: int, shares: Tensor, pools: list[Tensor], x: Tensor, labels: Tensor) -> ClientRound:
    """A presumed client: public records in these shares, at least one."""
    counts = (shares * _SAMPLES).round().long().tolist()
    if not sum(counts):
        counts[int(shares.argmax())] = 1
    rows = torch.cat([pool[:n] for pool, n in zip(pools, counts, strict=True)])
    return ClientRound(i, x[rows], labels[rows], Randomness.simulated(i))


def _from_rows(capture: Capture, truth: Tensor, even: Tensor) -> list[Finding]:
    classes = capture.task.outputs
    sent, true = rows_of(capture).labels, capture.aligned()[1]
    right = float((sent == true).double().mean())
    says = f"Labels travel with their rows: {right:.0%} of them are read off."
    if capture.method.shuffle:
        shares = mix(sent, classes).expand(len(capture.cohort), -1)
        by = "the round's mix for everybody, since rows are shuffled"
    else:
        parts = torch.split(sent, [len(y) for _, y in capture.truth])
        shares, by = torch.stack([mix(part, classes) for part in parts]), "the labels each client sent"
    rows = Finding(
        "labels of rows", "aggregator", "the label of each row", "accuracy", (right,), 1 / classes, 1.0, says
    )
    return [rows, _mixes(shares, truth, even, by)]


def _mixes(shares: Tensor, truth: Tensor, even: Tensor, by: str) -> Finding:
    values = overlap(shares, truth)
    present, claimed = truth > 0, shares > 1 / (2 * _SAMPLES)
    guess = float(overlap(even, truth).mean())
    says = f"A client's class mix is known to {float(values.mean()):.0%} (an even guess: {guess:.0%}), by {by}."
    details = {"classes rightly called present or absent": float((present == claimed).double().mean())}
    name, what = "class mix of clients", "each client's class shares"
    return Finding(name, "aggregator", what, "overlap", tuple(values.tolist()), guess, 1.0, says, details=details)
