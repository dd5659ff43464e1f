"""Attack 4b: whose row is it? Links that a shuffler leaves.

Within a round, rows of one client resemble one another (clients' classes are skewed, and their inputs alike). Across
rounds a record drawn again has the same projected input, and its sender is in both cohorts: the intersection attack
(Berthold, Langos, Dummy Traffic Against Long Term Intersection Attacks, PET 2002). A row of candidate losses can be
predicted from the upload it belongs to. And whoever knows the rows of all others knows the last one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.inputs import Inputs, distances, seen_inputs
from ntkfl.audit.received import ReceivedRows, rows_of, sends_rows
from ntkfl.wire.span import unpack_span

NAMES = {
    "rows of one sender, within a round": "which rows share a sender",
    "losses matched to uploads": "which two rows share a sender",
    "equal rows across rounds": "who sent a row",
}
_MOST = 2000  # rows of a round to be matched: an assignment costs their cube


def attack(capture: Capture, seed: int = 0, *, earlier: Sequence[Capture] = ()) -> list[Finding]:
    """By the aggregator, on one round; with `earlier` ones of the same run, also across them. Rows of samples only.

    `seed` is not used: nothing here is random.
    """
    if not sends_rows(capture):
        return []
    if not capture.method.shuffle:
        says = "Without a shuffler every reply comes from a known client: nothing is hidden."
        return [_finding(name, what, (1.0,), 1 / len(capture.cohort), says, {}) for name, what in NAMES.items()]
    rows = rows_of(capture)
    z = seen_inputs(capture, rows)
    found = [within(capture, rows, z)]
    losses = by_losses(capture, rows, z)
    found += [losses] if losses is not None else []
    if earlier and z is not None:
        before = [(c, seen_inputs(c, rows_of(c))) for c in earlier]
        found.append(across([(c, own) for c, own in before if own is not None] + [(capture, z)]))
    return [*found, *collusion(capture)]


def within(capture: Capture, rows: ReceivedRows, z: Inputs | None) -> Finding:
    """For each row, the row likeliest of the same sender: of the same label, and nearest. One value a client.

    `values` count hits; the guess is a row picked at random. Labels alone are in the details.
    """
    senders = torch.tensor(capture.senders)[rows.index]
    if z is None:
        distance = torch.cdist(rows.outputs.double(), rows.outputs.double())
    else:
        distance = distances(z, z).clamp_max(1e6)
    same_label = rows.labels.unsqueeze(0) == rows.labels.unsqueeze(1)
    distance = distance + (~same_label) * (float(distance.max()) + 1)
    distance.fill_diagonal_(float("inf"))
    hit = senders[distance.argmin(1)] == senders
    same = (senders.unsqueeze(0) == senders.unsqueeze(1)).double().fill_diagonal_(0)
    others = same_label.double().fill_diagonal_(0)
    by_label = (same * others).sum(1) / others.sum(1).clamp_min(1)
    guess = float(same.sum() / (len(senders) * (len(senders) - 1)))
    values = tuple(float(hit[senders == c].double().mean()) for c in sorted(set(senders.tolist())))
    rate = float(hit.double().mean())
    says = f"The most similar row is by the same sender in {rate:.0%} of cases (a random row: {guess:.0%})."
    details = {"by label alone": float(by_label.mean()), "of all rows": rate}
    return _finding("rows of one sender, within a round", "which rows share a sender", values, guess, says, details)


def by_losses(capture: Capture, rows: ReceivedRows, z: Inputs | None) -> Finding | None:
    """Rows of candidate losses matched to rows of the upload by the losses each upload predicts: from its input where
    that is had whole, else along its own Jacobian.
    """
    if capture.candidates is None or not capture.losses or capture.loss_senders is None:
        return None
    task = capture.task
    candidates = unpack_span(capture.candidates, task.like)
    came = torch.cat([m.take("losses") for m in capture.losses]).double()
    n = min(len(came), len(rows.labels))
    if n > _MOST:
        return None
    predicted = []
    x = z.x.view(-1, *capture.truth[0][0].shape[1:]) if z is not None and bool(z.known.all()) else None
    for w in candidates:
        outputs = task.predict(w, x) if x is not None else rows.outputs + rows.J.jvp(w - capture.weights)
        predicted.append(task.losses(outputs, rows.labels).double())
    ours, theirs = ((t.nan_to_num(posinf=1e30).clamp(1e-9, 1e30)).log() for t in (torch.stack(predicted, 1), came))
    left, right = linear_sum_assignment(torch.cdist(ours, theirs).numpy())
    senders, replies = torch.tensor(capture.senders)[rows.index], torch.tensor(capture.loss_senders)
    hit = senders[torch.from_numpy(left)] == replies[torch.from_numpy(right)]
    share = torch.bincount(senders).double() / len(senders)
    guess, rate = float(share.square().sum()), float(hit.double().mean())
    says = f"{rate:.0%} of loss rows are matched to an upload of the same sender (a random match: {guess:.0%})."
    return _finding("losses matched to uploads", "which two rows share a sender", (rate,), guess, says, {})


def across(rounds: Sequence[tuple[Capture, Inputs]], tolerance: float = 0.05) -> Finding:
    """Equal inputs in several rounds, and the clients that were in all of them: the chance to name a row's sender.

    Inputs are equal where they differ by less than `tolerance` of their size: sparsified rows tell theirs to a few per
    cent. A row's candidates are its round's cohort, less whoever missed a round that has an equal row.
    """
    values, named, met, alone, total = [], 0, 0, 0, 0
    for capture, z in rounds:
        candidates = [set(capture.cohort) for _ in range(len(z.x))]
        for other, theirs in rounds:
            if other is capture:
                continue
            equal = (distances(z, theirs).amin(1) < tolerance).nonzero()[:, 0].tolist()
            both = set(capture.cohort) & set(other.cohort)
            met += len(equal)
            alone += len(equal) if len(both) == 1 else 0
            for i in equal:  # where nobody was in both, it was another record that looks the same
                candidates[i] = (candidates[i] & both) or candidates[i]
        assert capture.senders is not None
        right = [(s in c) / len(c) for s, c in zip(capture.senders, candidates, strict=True)]
        values.append(sum(right) / len(right))
        named += sum(len(c) == 1 for c in candidates)
        total += len(right)
    guess = sum(1 / len(c.cohort) for c, _ in rounds) / len(rounds)
    says = f"Over {len(rounds)} rounds, equal rows and known cohorts leave one client for {named / total:.1%} of rows."
    details = {
        "rows with one client left": named / total,
        "coincidences": met // 2,
        "coincidences that leave one client": alone / met if met else 0.0,
    }
    return _finding("equal rows across rounds", NAMES["equal rows across rounds"], tuple(values), guess, says, details)


def collusion(capture: Capture) -> list[Finding]:
    """All other clients of a round tell the aggregator which rows are theirs; or half of them do.

    A colluder knows his own rows, and nothing else of who sent what is used. The others' are guessed among those left.
    """
    assert capture.senders is not None
    clients, found = set(capture.cohort), []
    for text, count in (
        ("all other clients collude", len(clients) - 1),
        ("half of the clients collude", len(clients) // 2),
    ):
        values = []
        for first in range(len(clients)):
            order = sorted(clients)[first:] + sorted(clients)[:first]
            colluders = set(order[:count])
            unknown = [s for s in capture.senders if s not in colluders]
            left = clients - colluders
            values.append(sum(s in left for s in unknown) / len(unknown) / len(left) if unknown else 0.0)
        rate = sum(values) / len(values)
        says = f"If {count} of {len(clients)} clients tell which rows are theirs, others' are guessed at {rate:.2f}."
        found.append(_finding(text, "who sent a row", tuple(values), 1 / len(clients), says, {}, "aggregator+client"))
    return found


def _finding(
    attack: str, recovers: str, values: tuple[float, ...], guess: float, says: str, details: dict[str, float],
    role: str = "aggregator",
) -> Finding:  # fmt: skip
    return Finding(attack, role, recovers, "accuracy", values, guess, 1.0, says, details=details)
