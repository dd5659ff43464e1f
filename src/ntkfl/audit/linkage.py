"""Whose row is it? What links the rows of a client that a shuffler has mixed with others'.

Rows of one client resemble one another: clients' classes are skewed, and their inputs alike.
"""

from __future__ import annotations

import torch

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.inputs import distances, seen_inputs
from ntkfl.audit.received import rows_of, sends_rows


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the aggregator, of rows of samples: for each, the row likeliest of the same sender, of the same label and
    nearest. `values` are the share of hits of each client's rows; the guess is a row picked at random. `seed` is not
    used: nothing here is random.
    """
    if not sends_rows(capture):
        return []
    name, what = "rows of one sender", "who sent a row"
    if capture.senders is None:
        says = "Without a shuffler every reply comes from a known client: nothing is hidden."
        return [Finding(name, "aggregator", what, "accuracy", (1.0,), 1 / len(capture.cohort), 1.0, says)]
    rows = rows_of(capture)
    inputs, senders = seen_inputs(capture, rows), torch.tensor(capture.senders)[rows.index]
    if inputs is None:
        distance = torch.cdist(rows.outputs.double(), rows.outputs.double())
    else:
        distance = distances(inputs, inputs).clamp_max(1e6)
    other_label = rows.labels.unsqueeze(0) != rows.labels.unsqueeze(1)
    distance = distance + other_label * (float(distance.max()) + 1)
    distance.fill_diagonal_(float("inf"))
    hit = senders[distance.argmin(1)] == senders
    same = (senders.unsqueeze(0) == senders.unsqueeze(1)).double().fill_diagonal_(0)
    guess = float(same.sum() / (len(senders) * (len(senders) - 1)))
    values = tuple(float(hit[senders == c].double().mean()) for c in sorted(set(senders.tolist())))
    rate = float(hit.double().mean())
    says = f"The most similar row is by the same sender in {rate:.0%} of cases (a random row: {guess:.0%})."
    return [Finding(name, "aggregator", what, "accuracy", values, guess, 1.0, says, {"of all rows": rate})]
