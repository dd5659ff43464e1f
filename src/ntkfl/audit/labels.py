"""Labels, and the class mix of each client.

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
from ntkfl.audit.received import local_models, rows_of, sends_rows
from ntkfl.methods import ClientRound
from ntkfl.methods.averaging.local_training import train_locally
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


def last_bias(capture: Capture) -> slice | None:
    """Where the weights end with a bias of one entry per class; None where they do not."""
    name, last = list(column_slices(trainable(capture.task.model)).items())[-1]
    return last if name.endswith("bias") and last.stop - last.start == capture.task.outputs else None


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the aggregator: labels row by row, and each client's class mix. Empty where targets are no classes."""
    if capture.truth[0][1].is_floating_point() or capture.task.loss != "ce":
        return []
    if sends_rows(capture):
        return _from_rows(capture)
    shares = infer_mix(capture, seed)
    if shares is None:
        return []
    return [mix_finding("class mix of clients", "aggregator", shares, [y for _, y in capture.truth])]


def infer_mix(capture: Capture, seed: int = 0) -> Tensor | None:
    """Class shares [clients, classes] from averaging updates; None where they do not come as weights with a bias."""
    task, updates, last = capture.task, local_models(capture), last_bias(capture)
    if not updates or last is None or capture.public is None:
        return None
    w = capture.weights
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
        trained = [train_locally(task, w, client, steps, lr, _SAMPLES).weights[last] for client in presumed]
        simulated = torch.stack([after - w[last] for after in trained]).double()
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


def _from_rows(capture: Capture) -> list[Finding]:
    classes, clients = capture.task.outputs, [y for _, y in capture.truth]
    sent, true = rows_of(capture).labels, capture.aligned()[1]
    right = float((sent == true).double().mean())
    says = f"Labels travel with their rows: {right:.0%} of them are read off."
    if capture.task.privacy.shuffle:
        shares = mix(sent, classes).expand(len(clients), -1)
    else:
        shares = torch.stack([mix(part, classes) for part in torch.split(sent, [len(y) for y in clients])])
    rows = Finding("labels of rows", "aggregator", "labels", "accuracy", (right,), 1 / classes, 1.0, says)
    return [rows, mix_finding("class mix of clients", "aggregator", shares, clients)]


def mix_finding(attack: str, role: str, shares: Tensor, labels: list[Tensor]) -> Finding:
    """Class shares [m, classes] against those of `labels`; the guess is that all classes are as frequent."""
    truth = torch.stack([mix(y, shares.shape[1]) for y in labels])
    values = overlap(shares, truth)
    guess = float(overlap(torch.full_like(truth, 1 / shares.shape[1]), truth).mean())
    says = f"The class mix is known to {float(values.mean()):.0%} (an even guess: {guess:.0%})."
    return Finding(attack, role, "labels", "overlap", tuple(values.tolist()), guess, 1.0, says)
