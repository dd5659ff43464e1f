"""CP-NTK-FL on Flower: the questions travel through Flower, the rows do not.

A client takes what the aggregator signed, gives its sealed rows to the shuffler, and hands the shuffler's receipt back
through Flower. The aggregator, in its ServerApp, fetches the released rows from the shuffler, as without Flower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.serverapp import Grid

from ntkfl.engine.conversation import Traffic
from ntkfl.engine.flower.carrier import GridCarrier
from ntkfl.engine.folder import Record
from ntkfl.engine.services.aggregator import Aggregator
from ntkfl.engine.services.announcement import Announcement
from ntkfl.engine.services.participant import Participant
from ntkfl.engine.services.receipt import check_receipt
from ntkfl.errors import MessageError, NTKFLError, TrustError


class FlowerAggregator(Aggregator):
    """The aggregator of the federation in `folder`, with `nodes` (node ids by client name) to carry what it says."""

    def __init__(
        self, folder: Path, out: Path, grid: Grid, nodes: Mapping[str, int], say: Callable[[str], None] = print
    ) -> None:
        super().__init__(folder, out, say)
        self._numbers = {name: number for number, name in enumerate(nodes)}
        names = list(nodes)
        self._carrier = GridCarrier(
            grid,
            dict(enumerate(nodes.values())),
            names.__getitem__,
            seconds=self.deployment.round_seconds,
            say=say,
        )
        self._silent: dict[str, str] = {}

    def play(self, number: int) -> tuple[Record, Record]:
        self._silent = {}
        record, timing = super().play(number)
        return record | ({"failed": dict(self._silent)} if self._silent else {}), timing

    def _announce(self, said: Announcement) -> int:
        """Open the batch at the shuffler, and carry the announcement to those it asks."""
        signed = said.sign(self.signer, self.pins.federation, self.pins.run)
        self.shuffler.publish(signed)
        if said.batch is not None:
            for name in set(said.batch.cohort) - set(self._numbers):
                self._silent[name] = "has no node: its key is not known to this SuperLink"
            asked = [self._numbers[name] for name in said.batch.cohort if name in self._numbers]
            traffic = Traffic()
            receipts = self._carrier.send(dict.fromkeys(asked, signed), traffic)
            self._silent |= traffic.failed
            for client, receipt in receipts.items():
                self._check(self._carrier.names(client), receipt, said)
        return len(signed)

    def _check(self, name: str, receipt: bytes, said: Announcement) -> None:
        shuffler = bytes.fromhex(self.pins.shuffler.signing_key)
        try:
            check_receipt(receipt, shuffler, self.pins.federation, self.pins.run, said.key)
        except TrustError:
            self._silent[name] = "handed back something that is no receipt of the shuffler's"


def deliver(participant: Participant, signed: bytes) -> bytes:
    """A client's answer to an announcement that came through Flower: the shuffler's receipt.

    Through Flower goes nothing else of it: of an error, its kind alone.
    """
    try:
        said = participant.heed(signed)
        receipt = None if said is None else participant.answer(said)
    except NTKFLError as error:
        participant.say(f"{participant.name}: not answered: {error}")
        raise MessageError(type(error).__name__) from None
    if not receipt:
        raise MessageError("not a question for this client")
    return receipt
