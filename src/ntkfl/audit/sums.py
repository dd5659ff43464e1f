"""Attack 6: sums over samples, by whoever sees them: of a client, of the whole cohort, less those who collude.

The same attacks (`sum_attacks.py`) on every sum, so that only its size and its holder differ. Sums of 1, 8, 64 and
1,024 samples are made by the method's own `answer` on records of the round, as clients with those would have sent them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import torch

from ntkfl.audit import membership
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.received import Seen, sums_of
from ntkfl.audit.sum_attacks import attacks
from ntkfl.methods import ClientRound
from ntkfl.methods.batchnorm import answer
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent import Sums
from ntkfl.tangent.sums import GRADIENT, SAMPLES
from ntkfl.wire import Message

SIZES = {1: 40, 8: 5, 64: 2, 1024: 1}  # samples of a sum, and how many such sums are attacked
_QUICK = {1: 10, 8: 2, 64: 1}
_CLIENTS = 5  # whose own replies are attacked


def attack(
    capture: Capture, seed: int = 0, *, quick: bool = False, sizes: Mapping[int, int] | None = None
) -> list[Finding]:
    """By a server that has each client's sums, one that has the cohort's total alone, that one and a minority of the
    cohort, and whoever compares the weights of two rounds. Inputs behind a secret projection are left alone.

    Where the run masks what clients send, there is no server of the first kind. `sizes`: samples of sums that are made
    beside them, and how many of each.
    """
    if capture.public is None or capture.projection is not None or not capture.truth[0][0].is_floating_point():
        return []
    clients = _clients(capture)
    if not clients:
        return []
    total = _added(clients)
    minority = (len(clients) - 1) // 2
    found = []
    for role, held in (
        ("aggregator", [] if capture.masked else clients[:_CLIENTS]),
        ("secure-sum", [total]),
        ("secure-sum+clients", [_less(total, clients[:minority], clients[minority:])] if minority else []),
        ("outsider", _between_rounds(capture, total)),
    ):
        found += attacks(capture, held, role, "sums", seed, quick)
    found += _by_loss(capture, seed)
    made = sizes if sizes is not None else {} if capture.masked else _QUICK if quick else SIZES
    for size, times in made.items():
        found += attacks(capture, _made(capture, size, times, seed), "aggregator", _named(size), seed, quick)
    return found


def _clients(capture: Capture) -> list[Seen]:
    """Each client's; none where replies are no sums, or one of them is not."""
    order = capture.senders if capture.senders is not None else capture.cohort
    places = {client: i for i, client in enumerate(capture.cohort)}
    found = []
    for sender, reply in zip(order, capture.uploads, strict=False):
        read = sums_of(capture, reply)
        if read is None:
            return []
        x, y = capture.truth[places[sender]]
        found.append(Seen(*read, x.flatten(1), y))
    return found


def _added(clients: Sequence[Seen]) -> Seen:
    sums = reduce(add, (one.sums for one in clients))
    x, y = torch.cat([one.x for one in clients]), torch.cat([one.y for one in clients])
    return Seen(sums, clients[0].resolution, x, y)


def _less(total: Seen, colluders: Sequence[Seen], others: Sequence[Seen]) -> Seen:
    """The total without the colluders' own sums, which is about the others alone."""
    known, rest = _added(colluders).sums.arrays, _added(others)
    return replace(rest, sums=Sums({name: array - known[name] for name, array in total.sums.arrays.items()}))


def _made(capture: Capture, size: int, times: int, seed: int) -> list[Seen]:
    """Sums over `size` records of the round, drawn anew for each, as a client with those alone answers."""
    x, y, _ = capture.rows_truth()
    order = torch.split(torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)), size)
    found = []
    for own in order[:times]:
        if len(own) < size:
            break
        client = ClientRound(0, x[own], y[own], Randomness.simulated(seed))
        reply = answer(capture.method, capture.task, capture.broadcast, [client])[0]
        read = sums_of(capture, Message.decode(reply.encode()))
        found += [] if read is None else [Seen(*read, x[own].flatten(1), y[own])]
    return found


def _between_rounds(capture: Capture, total: Seen) -> list[Seen]:
    """The way of the weights in the round taken for a gradient, which it is up to a factor, and to curvature."""
    after = membership.new_weights(capture)
    if after is None:
        return []
    way = (capture.weights - after).double().cpu() * total.samples
    return [replace(total, sums=Sums({GRADIENT: way, SAMPLES: total.sums.arrays[SAMPLES]}), resolution=2.0**-20)]


def _by_loss(capture: Capture, seed: int) -> list[Finding]:
    """An outsider who has the weights after the round asks which records they fit."""
    after = membership.new_weights(capture)
    if after is None:
        return []
    assert capture.public is not None
    own = (torch.cat([x for x, _ in capture.truth]), torch.cat([y for _, y in capture.truth]))
    others = (capture.public[0].to(own[0]), capture.public[1])
    return membership.infer(capture.task, after, own, others, role="outsider", on="the round's new weights", seed=seed)


def _named(size: int) -> str:
    return f"sum of {size:,} sample{'' if size == 1 else 's'}"
