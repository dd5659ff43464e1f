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
from dataclasses import replace

import torch
from torch import Tensor

from ntkfl.audit.capture import Capture, Records
from ntkfl.audit.finding import Finding
from ntkfl.methods import Task
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.replies import Rows

FALSE_ALARMS = (0.001, 0.01)
TRIALS = 5  # draws of records and of halves, an advantage each


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
    draws, picked = torch.Generator().manual_seed(seed), []
    for c in torch.unique(members[1]):
        places = [(y == c).nonzero()[:, 0] for _, y in (members, others)]
        count = min(map(len, places))
        picked.append([own[torch.randperm(len(own), generator=draws)[:count]] for own in places])
    a, b = (torch.cat(own) for own in zip(*picked, strict=True))
    return (members[0][a], members[1][a]), (others[0][b], others[1][b])


def by_loss(
    task: Task, weights: Tensor, members: Records, others: Records, *, role: str, on: str, seed: int = 0
) -> list[Finding]:
    """Whether weights [d] fit a record better than others; none of too few records."""
    pairs = [matched(members, others, seed + trial) for trial in range(TRIALS)]
    if min(len(y) for pair in pairs for _, y in pair) < 4:
        return []
    return [by_scores(f"membership by loss, {on}", role, [_fits(task, weights, pair) for pair in pairs], seed)]


def attack(capture: Capture, seed: int = 0) -> list[Finding]:
    """By the curious aggregator: on the weights that the round ended with, and on clients' local models where it
    receives such. Empty where clients send their samples, of which it has all.
    """
    if issubclass(capture.reply, Rows) and not issubclass(capture.reply, TangentRows):
        return []
    task, others, role = capture.task, capture.others, capture.asker
    after = capture.after.to(capture.weights)
    found = by_loss(task, after, capture.members, others, role=role, on="the round's new weights", seed=seed)
    local = [] if capture.order is not None else map(capture.local_model, capture.uploads)
    trials = [
        _fits(task, trained[0], matched(own, others, seed))
        for trained, own in zip(local, capture.truth, strict=False)
        if trained
    ]
    if trials:
        found.append(replace(by_scores("membership by loss, each client's model", role, trials, seed), details={}))
    return found


def on_final_model(capture: Capture, final: Tensor, clients: Sequence[int], seed: int = 0) -> list[Finding]:
    """By an outsider who was given the final model, and the projection if it is used: was a record among those of the
    `clients` that took part in any round? `final` begins with the weights [d].
    """
    xs, ys = zip(*(capture.clients.place(capture.clients.fed.client(i)) for i in clients), strict=True)
    members, weights = (torch.cat(xs), torch.cat(ys)), final[: capture.weights.numel()].to(capture.weights)
    return by_loss(capture.task, weights, members, capture.others, role="outsider", on="the final model", seed=seed)


def _fits(task: Task, weights: Tensor, pair: Sequence[Records]) -> tuple[Tensor, Tensor]:
    """How well weights [d] fit each of two sets of records: −loss, [n] each."""
    a, b = (-task.losses(task.predict(weights, x), y) for x, y in pair)
    return a, b


def by_scores(attack: str, role: str, trials: Sequence[tuple[Tensor, Tensor]], seed: int) -> Finding:
    """Scores of members and of others, larger for members: the advantage of each trial, with halves of its own; more
    measures of the first.
    """
    members, others = trials[0]
    details = {f"TPR at {rate:.1%} FPR": recall(members, others, rate) for rate in FALSE_ALARMS}
    details |= {"AUC": area(members, others), "members": len(members)}
    values = [advantage(a, b, seed + i) for i, (a, b) in enumerate(trials)]
    return Finding(attack, role, "who was trained on", "advantage", values, 0.0, details)
