"""The aggregator's wait for clients: it looks at the shuffler again and again, and says when it takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment.contract import Deployment
from ntkfl.errors import TooFew
from ntkfl.progress import plural
from ntkfl.services.shuffler.batch import Status
from ntkfl.services.shuffler.client import ShufflerClient

_LOOK_S = 0.05  # between two looks
SAY_S = 5.0  # of waiting in which no answer came, until it is said

Say = Callable[[str], None]


class Waited(NamedTuple):
    """A batch at the end of the wait for it: ready to be released, or not, and then it never will be."""

    ready: bool
    status: Status
    silent: float  # seconds since the last answer, where some are missing
    seconds: float  # in all


def wait_for_batch(
    shuffler: ShufflerClient, key: BatchKey, asked: int, settings: Deployment, say: Say, number: int
) -> Waited:
    """Until the shuffler would release the batch, was told to cancel it, or it is late. `asked` clients may answer;
    `number` is that of the round in training.

    Past its deadline, a round's first exchange goes on without those that have not answered, and waits for enough
    clients as long as `patience` says; a later one can only be released whole, so it is late. The shuffler tells how
    many answered, and not which, so that is what is said.
    """
    began = time.monotonic()
    until = began + settings.round_seconds + settings.patience
    answered, last, said = 0, began, False
    while True:
        status = shuffler.status(key)
        if status.clients > answered:
            answered, last = status.clients, time.monotonic()
        silent = time.monotonic() - last if answered < asked else 0.0
        # As long as answers took so far, others may take too.
        usual = last - began if answered else settings.round_seconds / 2
        if status.state == "open" and silent > max(SAY_S, usual) and not said:
            said = True
            say(
                f"round {number}: {answered} of {asked} clients have answered; "
                f"waits for {asked - answered} more, {status.seconds or until - time.monotonic():.0f} s at most"
            )
        ready = status.state in ("ready", "released")
        late = time.monotonic() > until or (key.exchange > 0 and status.seconds == 0)
        if ready or late or status.state == "cancelled":
            return Waited(ready, status, silent, time.monotonic() - began)
        time.sleep(_LOOK_S)


def wait_for_reports(
    shuffler: ShufflerClient, key: BatchKey, wanted: int, seconds: float, say: Say, number: int
) -> list[bytes]:
    """The sealed reports of so many evaluators, or of those that have answered once `seconds` have passed: a round that
    nobody measures is still a round.
    """
    began, said = time.monotonic(), False
    while len(reports := shuffler.reports(key)) < wanted and time.monotonic() < began + seconds:
        if not said and time.monotonic() > began + max(SAY_S, seconds / 2):
            said, left = True, began + seconds - time.monotonic()
            asked = plural(wanted, "evaluator")
            say(f"round {number}: {len(reports)} of {asked} answered; waits {left:.0f} s more at most")
        time.sleep(_LOOK_S)
    shuffler.forget(key)
    if not reports:
        raise TooFew(f"no evaluator answered within {seconds:g} s")
    return reports
