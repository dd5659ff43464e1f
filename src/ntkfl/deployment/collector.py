"""The aggregator's wait for a batch: until the shuffler releases it, or it is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ntkfl.crypto.mask_format import WORD_BYTES
from ntkfl.crypto.masking import add_packed
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, BatchKey
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.errors import TooFew
from ntkfl.federation.secure_sum import SumSchema, submission_bytes
from ntkfl.federation.shuffled import Mixed, RowSchema, ShuffledTransport
from ntkfl.federation.transport import Traffic
from ntkfl.methods import Method, Task
from ntkfl.services.http.client import SMALL, HttpClient
from ntkfl.services.shuffler.batch import EVALUATORS
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.services.status import StatusFile

LOOK_S = 0.05  # between two looks at a batch
SAY_S = 5.0  # of waiting in which no answer came, until it is said


class CollectingTransport(ShuffledTransport):
    """What the aggregator's transport has for that, and what it has heard of the round's clients so far."""

    def __init__(
        self,
        folder: Path,
        federation: Federation,
        settings: Deployment,
        task: Task,
        method: Method,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(task, method, federation.federation, federation.run)
        self.settings, self.say = settings, say
        self.shuffler = ShufflerClient(federation, folder)
        self.key_server = HttpClient(federation.key_server.url, folder / "ca.pem")
        self.status = StatusFile(folder, "aggregator", run=f"{federation.federation}/{federation.run}")
        self.answered = 0  # clients whose rows the round's first exchange released: later ones need exactly them
        self.dropped: set[str] = set()  # clients that answered a round's first exchange and not its next
        self._told: tuple[BatchKey, dict[str, int | None]] | None = None

    def collect(
        self, announced: Announced, schema: RowSchema | SumSchema, asked: int, traffic: Traffic, number: int
    ) -> Mixed:
        """The released rows of a batch, and of a secure sum the sum of their masks, as soon as the shuffler gives them.

        Past its deadline, a round's first exchange goes on without those that have not answered, and waits for enough
        clients as long as `patience` says; a later one can only be released whole, so the round has failed. The
        shuffler tells how many answered, and not which, so that is what is said and recorded. `number` is that of
        the round in training.
        """
        key, began = announced.key, time.monotonic()
        until = began + self.settings.round_seconds + self.settings.patience
        asked = self.answered if key.exchange not in (0, EVALUATORS) else asked
        answered, last, said = 0, began, False
        while True:
            status = self.shuffler.status(key)
            if status.clients > answered:
                answered, last = status.clients, time.monotonic()
            self._tell(key, asked, answered, status.seconds)
            waited = time.monotonic() - last if answered < asked else 0.0
            # As long as answers took so far, others may take too.
            usual = last - began if answered else self.settings.round_seconds / 2
            if status.state == "open" and waited > max(SAY_S, usual) and not said:
                said, left = True, status.seconds or until - time.monotonic()
                self.say(
                    f"round {number}: {answered} of {asked} clients have answered; "
                    f"waits for {asked - answered} more, {left:.0f} s at most"
                )
            if status.state in ("ready", "released"):
                rows = self.shuffler.release(announced)
                masks, more = b"", FRAME_BYTES
                if isinstance(schema, SumSchema):
                    masks, more = self._masks(announced, schema, len(rows)), submission_bytes(self.method.mask_holders)
                self.shuffler.forget(key)
                self.answered = status.clients if key.exchange == 0 else self.answered
                traffic.heard(asked, status.clients, waited)
                sent = sum(map(len, rows)) + more * status.clients
                return Mixed(rows, schema, announced, sent, masks)
            late = time.monotonic() > until or (key.exchange > 0 and status.seconds == 0)
            if status.state == "cancelled" or late:
                self.shuffler.cancel(key)
                traffic.heard(asked, status.clients, waited)
                self.dropped |= set(status.missing)
                later = key.exchange not in (0, EVALUATORS)
                whom = f"the {asked} that began the round" if later else f"{asked} clients"
                missing = f", missing: {', '.join(status.missing)}" if status.missing else ""
                raise TooFew(
                    f"{status.clients} of {whom} answered within {time.monotonic() - began:.0f} s{missing}; "
                    "too few for the shuffler to release their rows"
                )
            time.sleep(LOOK_S)

    def _masks(self, announced: Announced, schema: SumSchema, clients: int) -> bytes:
        """The sum of the released clients' masks: the shuffler's, and where there is a second holder its own of exactly
        the same clients.
        """
        masks = self.shuffler.masks(announced, schema.numbers)
        if self.method.mask_holders == 1:
            return masks
        signed, size = self.shuffler.tickets(announced, clients), WORD_BYTES * schema.numbers
        path = f"/v1/runs/{self.run}/masks/release"
        second = self.key_server.ask("POST", path, signed, most=max(SMALL, size)).content
        if len(second) != size:
            raise TooFew("the key server's masks are not those of this sum")
        return add_packed(masks, second)

    def _tell(self, key: BatchKey, asked: int, answered: int, left: float | None) -> None:
        batch = {"asked": asked, "answered": answered, "seconds_left": None if left is None else round(left)}
        if (key, batch) != self._told:
            self._told = key, batch
            self.status.update(state="training", key=key, batch=batch)
