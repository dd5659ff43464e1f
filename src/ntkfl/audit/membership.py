"""Who took part: was this record among those trained on? By the loss at weights, and by looking it up among rows.

Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting, CSF 2018: members have a lower
loss. What counts is success at few false alarms: Carlini et al., Membership Inference Attacks From First Principles,
S&P 2022. What sums tell of members is in `sums.py`.

Members and others are compared class by class in equal numbers: clients' classes are skewed, and a loss that only tells
the class would otherwise look like one that tells members. Thresholds come from one half of the records, the advantage
from the other, so that a model that knows nothing scores zero and not the best of many chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.inputs import Inputs, distances, seen_inputs
from ntkfl.audit.received import local_models, rows_of, sends_rows, sends_samples
from ntkfl.data import Federated
from ntkfl.methods import Task

FALSE_ALARMS = (0.001, 0.01)
_TRIALS = 5  # draws of records and of halves, an advantage each
_ASKED = 500  # records that are looked up among rows
Records = tuple[Tensor, Tensor]  # x as the network takes it, y


def advantage(members: Tensor, others: Tensor, seed: int) -> float:
    """True less false positives on one half of the scores, at the threshold best on the other half."""
    draws = torch.Generator().manual_seed(seed)
    halves = [own[torch.randperm(len(own), generator=draws)].double().tensor_split(2) for own in (members, others)]
    (learn_members, judge_members), (learn_others, judge_others) = halves
    ordered = torch.cat([learn_members, learn_others]).sort().values
    thresholds = (ordered[1:] + ordered[:-1]) / 2
    if len(thresholds) > 500:
        thresholds = thresholds[torch.linspace(0, len(thresholds) - 1, 500).long()]

    def gain(members: Tensor, others: Tensor, thresholds: Tensor) -> Tensor:
        true, false = ((own >= thresholds.unsqueeze(1)).double().mean(1) for own in (members, others))
        return true - false

    best = thresholds[gain(learn_members, learn_others, thresholds).argmax()].unsqueeze(0)
    return float(gain(judge_members, judge_others, best))


def recall(members: Tensor, others: Tensor, false_alarms: float) -> float:
    """The largest part of members found with at most this part of others taken for members."""
    allowed = int(false_alarms * len(others) + 1e-9)
    # Above the score of the first one too many: equal scores cannot be told apart, so ties count against.
    ordered = others.sort(descending=True).values
    return float((members > ordered[allowed]).double().mean()) if allowed < len(others) else 1.0


def area(members: Tensor, others: Tensor) -> float:
    """The chance that a member scores above another record, ties counting half."""
    ordered = others.sort().values
    below, up_to = (int(torch.searchsorted(ordered, members, right=ties).sum()) for ties in (False, True))
    return (below + up_to) / 2 / (len(members) * len(others))


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


def by_loss(
    task: Task, weights: Tensor, members: Records, others: Records, *, role: str, on: str, seed: int = 0
) -> list[Finding]:
    """Whether weights [d] fit a record better than others; none of too few records."""
    scores = []
    for trial in range(_TRIALS):
        pair = matched(members, others, seed + trial)
        if len(pair[0][1]) < 4:
            return []
        scores.append([-task.losses(task.predict(weights, x), y) for x, y in pair])
    values = tuple(advantage(a, b, seed + trial) for trial, (a, b) in enumerate(scores))
    return [_finding(f"membership by loss, {on}", role, values, _details(*scores[0]))]


def by_scores(attack: str, role: str, members: Tensor, others: Tensor, seed: int) -> Finding:
    """Scores of members and of others, larger for members, as a finding."""
    values = tuple(advantage(members, others, seed + trial) for trial in range(_TRIALS))
    return _finding(attack, role, values, _details(members, others))


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the curious aggregator: on the weights that the round ended with, on clients' local models where it receives
    such, and on the rows, where it can look a record up. With a projection it needs help to ask about a record.
    """
    if capture.public is None or sends_samples(capture):  # of which it has all
        return []
    role = "aggregator" if capture.projection is None else "aggregator+insider"
    own, others = _records(capture), (asked(capture, capture.public[0]), capture.public[1])
    after = capture.after.to(capture.weights)
    found = by_loss(capture.task, after, own, others, role=role, on="the round's new weights", seed=seed)
    if sends_rows(capture):
        return found + _in_rows(capture, own, others, role, seed)
    return found + _on_local_models(capture, others, role, seed)


def on_final_model(
    capture: Capture, final: Tensor, fed: Federated, clients: Sequence[int], seed: int = 0
) -> list[Finding]:
    """By an outsider who was given the final model (weights [d], with the projection where there is one): was a record
    among those of the `clients` that took part in any round?
    """
    if capture.public is None:
        return []
    batches = [fed.client(i) for i in clients]
    members = asked(capture, torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
    others = asked(capture, capture.public[0]), capture.public[1]
    final = final.to(capture.weights)
    return by_loss(capture.task, final, members, others, role="outsider", on="the final model", seed=seed)


def asked(capture: Capture, x: Tensor) -> Tensor:
    """Raw inputs as the network takes them."""
    placed = x.to(capture.weights) if x.is_floating_point() else x
    return placed if capture.projection is None else capture.projection(placed)


def _records(capture: Capture) -> Records:
    return torch.cat([x for x, _ in capture.truth]), torch.cat([y for _, y in capture.truth])


def _on_local_models(capture: Capture, others: Records, role: str, seed: int) -> list[Finding]:
    """Each client's own model, which the aggregator receives: one advantage a client."""
    values = []
    for update, own in zip(local_models(capture), capture.truth, strict=False):
        a, b = (-capture.task.losses(capture.task.predict(update.weights, x), y) for x, y in matched(own, others, seed))
        values.append(advantage(a, b, seed))
    return [_finding("membership by loss, each client's model", role, tuple(values), {})] if values else []


def _in_rows(capture: Capture, own: Records, others: Records, role: str, seed: int) -> list[Finding]:
    """Look a record up among the inputs recovered from rows: the nearer the nearest, the likelier a member."""
    recovered = seen_inputs(capture, rows_of(capture))
    if recovered is None:
        return []
    pair = matched(own, others, seed)
    some = torch.randperm(len(pair[0][1]), generator=torch.Generator().manual_seed(seed))[:_ASKED]
    wanted = (x[some].flatten(1) for x, _ in pair)
    a, b = (-distances(recovered, Inputs(x, torch.ones_like(x, dtype=torch.bool))).amin(0) for x in wanted)
    return [by_scores("membership by looking rows up", role, a, b, seed)]


def _details(members: Tensor, others: Tensor) -> dict[str, Any]:
    low = {f"TPR at {rate:.1%} FPR": recall(members, others, rate) for rate in FALSE_ALARMS}
    return {**low, "AUC": area(members, others), "members": len(members)}


def _finding(attack: str, role: str, values: tuple[float, ...], details: dict[str, Any]) -> Finding:
    mean = sum(values) / len(values)
    says = f"Members are told from others with an advantage of {mean:.3f} (0 is guessing, 1 is certainty)."
    return Finding(attack, role, "who was trained on", "advantage", values, 0.0, 1.0, says, details)
