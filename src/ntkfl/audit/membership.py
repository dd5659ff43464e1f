"""Attack 5: was this record among those trained on?

Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting, CSF 2018: members have a lower
loss. Salem et al., ML-Leaks, NDSS 2019: and a more confident prediction, for attackers without the label. What counts
is success at few false alarms: Carlini et al., Membership Inference Attacks From First Principles, S&P 2022.

Members and others are compared class by class in equal numbers: clients' classes are skewed, and a loss that only tells
the class would otherwise look like one that tells members. Thresholds come from one half of the records, the advantage
from the other, so that a model that knows nothing scores zero and not the best of many chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.inputs import Inputs, distances, seen_inputs
from ntkfl.audit.received import local_updates, rows_of, sends_rows
from ntkfl.data import Federated
from ntkfl.methods import Task

FALSE_ALARMS = (0.001, 0.01)
Records = tuple[Tensor, Tensor]  # x as the network takes it, y


@dataclass(frozen=True)
class Roc:
    """Scores of members and of others, larger for more likely members; both sorted downwards."""

    members: Tensor
    others: Tensor

    @staticmethod
    def of(members: Tensor, others: Tensor) -> Roc:
        return Roc(members.double().sort(descending=True).values, others.double().sort(descending=True).values)

    def rates(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """(true positives, false positives) as parts, of those whose score is at least each threshold."""
        true, false = (
            (own.unsqueeze(0) >= thresholds.unsqueeze(1)).double().mean(1) for own in (self.members, self.others)
        )
        return true, false

    def recall(self, false_alarms: float) -> float:
        """The largest part of members found with at most this part of others taken for members."""
        allowed = int(false_alarms * len(self.others) + 1e-9)
        # Above the score of the first one too many: equal scores cannot be told apart, so ties count against.
        return float((self.members > self.others[allowed]).double().mean()) if allowed < len(self.others) else 1.0

    def area(self) -> float:
        """The chance that a member scores above another record, ties counting half."""
        others = self.others.sort().values
        below, up_to = (int(torch.searchsorted(others, self.members, right=ties).sum()) for ties in (False, True))
        return (below + up_to) / 2 / (len(self.members) * len(self.others))

    def curve(self, points: int = 40) -> list[tuple[float, float]]:
        """(false positives, true positives) at `points` rates of false positives, denser towards zero."""
        at = torch.logspace(-3, 0, points)
        return [(round(float(f), 5), round(self.recall(float(f)), 5)) for f in at]


def advantage(members: Tensor, others: Tensor, seed: int) -> float:
    """True less false positives on one half of the records, at the threshold best on the other half."""
    draws = torch.Generator().manual_seed(seed)
    halves = [own[torch.randperm(len(own), generator=draws)].tensor_split(2) for own in (members, others)]
    learn, judge = Roc.of(halves[0][0], halves[1][0]), Roc.of(halves[0][1], halves[1][1])
    ordered = torch.cat([learn.members, learn.others]).sort().values
    thresholds = (ordered[1:] + ordered[:-1]) / 2
    if len(thresholds) > 500:
        thresholds = thresholds[torch.linspace(0, len(thresholds) - 1, 500).long()]
    true, false = learn.rates(thresholds)
    best = thresholds[(true - false).argmax()].unsqueeze(0)
    true, false = judge.rates(best)
    return float(true - false)


def matched(members: Records, others: Records, seed: int) -> tuple[Records, Records]:
    """As many of each class from both, drawn at random; all of both where targets are no classes."""
    if members[1].is_floating_point():
        return members, others
    draws = torch.Generator().manual_seed(seed)
    picked: tuple[list[Tensor], list[Tensor]] = ([], [])
    for c in sorted(set(members[1].tolist())):
        places = [(y == c).nonzero()[:, 0] for _, y in (members, others)]
        count = min(map(len, places))
        for chosen, own in zip(picked, places, strict=True):
            chosen.append(own[torch.randperm(len(own), generator=draws)[:count]])
    first, second = (torch.cat(own) for own in picked)
    return (members[0][first], members[1][first]), (others[0][second], others[1][second])


def scores(task: Task, weights: Tensor, records: Records) -> dict[str, Tensor]:
    """What each rule says of every record, larger for members."""
    outputs = task.predict(weights, records[0])
    found = {"loss": -task.losses(outputs, records[1])}
    if task.loss == "ce":
        found["confidence"] = outputs.softmax(1).amax(1)
    return found


def infer(
    task: Task,
    weights: Tensor,
    members: Records,
    others: Records,
    *,
    role: str,
    on: str,
    seed: int = 0,
    trials: int = 5,
) -> list[Finding]:
    """Each rule against one set of weights; one advantage for each of `trials` draws of records and halves."""
    values: dict[str, list[float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for trial in range(trials):
        known, unknown = matched(members, others, seed + trial)
        if len(known[1]) < 4:
            return []
        a, b = scores(task, weights, known), scores(task, weights, unknown)
        for rule in a:
            values.setdefault(rule, []).append(advantage(a[rule], b[rule], seed + trial))
            if trial == 0:
                details[rule] = _details(Roc.of(a[rule], b[rule]))
    return [_finding(f"membership by {rule}, {on}", role, tuple(v), details[rule]) for rule, v in values.items()]


def attack(capture: Capture, seed: int = 0, *, members: Records | None = None) -> list[Finding]:
    """By the curious aggregator: on the round's own new weights, on clients' local models where it receives such, and
    on the rows, where it can look a record up. With a projection it needs a client's help to ask about a record.

    `members` are records of earlier rounds, for the weights that were broadcast; the round's own without them.
    """
    if capture.public is None or capture.method.shows == "samples":  # of which it has all
        return []
    own = (torch.cat([x for x, _ in capture.truth]), torch.cat([y for _, y in capture.truth]))
    public, labels = capture.public
    others = ((public if capture.projection is None else capture.projection(public)).to(own[0]), labels)
    role = "aggregator" if capture.projection is None else "aggregator+client"
    found = []
    if members is not None:
        found += infer(capture.task, capture.weights, members, others, role=role, on="broadcast weights", seed=seed)
    after = new_weights(capture)
    if after is not None:
        found += infer(capture.task, after, own, others, role=role, on="the round's new weights", seed=seed)
    if sends_rows(capture):
        found += _in_rows(capture, own, others, role, seed)
    elif not capture.method.shuffle:
        found += _on_local_models(capture, others, role, seed)
    return found


def on_final_model(
    capture: Capture, final: Tensor, fed: Federated, clients: Sequence[int], seed: int = 0
) -> list[Finding]:
    """By an outsider who was given the final model (weights [d], with the projection where there is one): was a record
    among those of the `clients` that took part in any round?
    """
    if capture.public is None:
        return []

    def asked(x: Tensor) -> Tensor:
        placed = x.to(capture.weights) if x.is_floating_point() else x
        return placed if capture.projection is None else capture.projection(placed)

    batches = [fed.client(i) for i in clients]
    members = asked(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
    others = asked(capture.public[0]), capture.public[1]
    final = final.to(capture.weights)
    return infer(capture.task, final, members, others, role="outsider", on="the final model", seed=seed)


def new_weights(capture: Capture) -> Tensor | None:
    """What the round ended with, by its messages, or as it was played; None where neither tells."""
    ended = capture.method.ends_with(capture.weights, capture.uploads, capture.candidates, capture.losses)
    return capture.after if ended is None else ended


def _on_local_models(capture: Capture, others: Records, role: str, seed: int) -> list[Finding]:
    """Each client's own model, which the aggregator receives: one advantage a client."""
    updates = local_updates(capture)
    if not updates:
        return []
    values = []
    for update, own in zip(updates, capture.truth, strict=True):
        known, unknown = matched(own, others, seed)
        a, b = (scores(capture.task, update.weights, records)["loss"] for records in (known, unknown))
        values.append(advantage(a, b, seed))
    return [_finding("membership by loss, each client's model", role, tuple(values), {})]


def _in_rows(capture: Capture, own: Records, others: Records, role: str, seed: int) -> list[Finding]:
    """Look a record up among the inputs recovered from rows: the nearer the nearest, the likelier a member."""
    rows = rows_of(capture)
    recovered = seen_inputs(capture, rows)
    if recovered is None:
        return []
    known, unknown = matched(own, others, seed)
    few = min(len(known[1]), 500)
    draws = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(known[1]), generator=draws)[:few]
    asked = (x[some].flatten(1) for x, _ in (known, unknown))
    a, b = (-distances(recovered, Inputs(x, torch.ones_like(x, dtype=torch.bool))).amin(0) for x in asked)
    return [by_scores("membership by looking rows up", role, a, b, seed)]


def by_scores(attack: str, role: str, members: Tensor, others: Tensor, seed: int) -> Finding:
    """Scores of members and of others, larger for members, as a finding: one advantage for each of five draws."""
    values = tuple(advantage(members, others, seed + trial) for trial in range(5))
    return _finding(attack, role, values, _details(Roc.of(members, others)))


def _details(roc: Roc) -> dict[str, Any]:
    low = {f"TPR at {rate:.1%} FPR": roc.recall(rate) for rate in FALSE_ALARMS}
    return {**low, "AUC": roc.area(), "members": len(roc.members), "ROC": roc.curve()}


def _finding(attack: str, role: str, values: tuple[float, ...], details: dict[str, Any]) -> Finding:
    mean = sum(values) / len(values)
    says = f"Members are told from others with an advantage of {mean:.3f} (0 is guessing, 1 is certainty)."
    return Finding(
        attack, role, "whether a record was trained on", "advantage", values, 0.0, 1.0, says, details=details
    )
