"""Who took part: was this record among those trained on? How that is measured, and the attack by the loss at weights.

Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting, CSF 2018: members have a lower
loss. What counts is success at few false alarms: Carlini et al., Membership Inference Attacks From First Principles,
S&P 2022. What rows and sums tell of members is in `rows.py` and `sums.py`.

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
from ntkfl.data import Federated
from ntkfl.methods import Task
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.replies import Rows

FALSE_ALARMS = (0.001, 0.01)
_TRIALS = 5  # draws of records and of halves, an advantage each
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


def by_scores(attack: str, role: str, members: Tensor, others: Tensor, seed: int) -> Finding:
    """Scores of members and of others, larger for members, as a finding."""
    return _finding(attack, role, [(members, others)] * _TRIALS, seed)


def by_loss(
    task: Task, weights: Tensor, members: Records, others: Records, *, role: str, on: str, seed: int = 0
) -> list[Finding]:
    """Whether weights [d] fit a record better than others; none of too few records."""
    pairs = [matched(members, others, seed + trial) for trial in range(_TRIALS)]
    if min(len(y) for pair in pairs for _, y in pair) < 4:
        return []
    scores = [[-_losses(task, weights, each) for each in pair] for pair in pairs]
    return [_finding(f"membership by loss, {on}", role, [(a, b) for a, b in scores], seed)]


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the curious aggregator: on the weights that the round ended with, and on clients' local models where it
    receives such. Empty where clients send their samples, of which it has all.
    """
    samples = issubclass(capture.reply, Rows) and not issubclass(capture.reply, TangentRows)
    if capture.public is None or samples:
        return []
    members, others = records(capture)
    role, after = capture.asker, capture.after.to(capture.weights)
    found = by_loss(capture.task, after, members, others, role=role, on="the round's new weights", seed=seed)
    values = []
    for upload, own in zip(capture.uploads, capture.truth, strict=False):
        model = None if capture.sent_by else capture.local_model(upload)
        if model is not None:
            a, b = (-_losses(capture.task, model[0], each) for each in matched(own, others, seed))
            values.append(advantage(a, b, seed))
    if values:
        found.append(_named("membership by loss, each client's model", role, values, {}))
    return found


def on_final_model(
    capture: Capture, final: Tensor, fed: Federated, clients: Sequence[int], seed: int = 0
) -> list[Finding]:
    """By an outsider who was given the final model (weights [d], with the projection where there is one): was a record
    among those of the `clients` that took part in any round?
    """
    if capture.public is None:
        return []
    batches = [fed.client(i) for i in clients]
    members = capture.placed(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
    others = records(capture)[1]
    final = final.to(capture.weights)
    return by_loss(capture.task, final, members, others, role="outsider", on="the final model", seed=seed)


def records(capture: Capture) -> tuple[Records, Records]:
    """All records of the round, and public ones, as the network takes them."""
    assert capture.public is not None
    xs, ys = zip(*capture.truth, strict=True)
    return (torch.cat(xs), torch.cat(ys)), (capture.placed(capture.public[0]), capture.public[1])


def _losses(task: Task, weights: Tensor, each: Records) -> Tensor:
    return task.losses(task.predict(weights, each[0]), each[1])


def _finding(attack: str, role: str, trials: Sequence[tuple[Tensor, Tensor]], seed: int) -> Finding:
    """The advantage of each trial, with halves of its own; more measures of the first."""
    members, others = trials[0]
    details: dict[str, Any] = {f"TPR at {rate:.1%} FPR": recall(members, others, rate) for rate in FALSE_ALARMS}
    details |= {"AUC": area(members, others), "members": len(members)}
    return _named(attack, role, [advantage(a, b, seed + i) for i, (a, b) in enumerate(trials)], details)


def _named(attack: str, role: str, values: Sequence[float], details: dict[str, Any]) -> Finding:
    mean = sum(values) / len(values)
    says = f"Members are told from others with an advantage of {mean:.3f} (0 is guessing, 1 is certainty)."
    return Finding(attack, role, "who was trained on", "advantage", tuple(values), 0.0, 1.0, says, details)
