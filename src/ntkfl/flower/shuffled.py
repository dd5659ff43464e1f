"""CP-NTK-FL on Flower: the questions travel through Flower, the rows do not.

A client takes what the aggregator signed, gives its sealed rows to the shuffler, and hands the shuffler's receipt back
through Flower. The aggregator, in its ServerApp, fetches the released rows from the shuffler, as without Flower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.serverapp import Grid

from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import Participant
from ntkfl.errors import MessageError, NTKFLError, TooFew, TrustError
from ntkfl.federation.run_folder import Record
from ntkfl.federation.transport import Traffic
from ntkfl.flower.transport import GridCarrier
from ntkfl.services.announcement import Announcement


class FlowerAggregator(Aggregator):
    """The aggregator of the federation in `folder`, with `nodes` (node ids by client name) to carry what it says."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        grid: Grid,
        nodes: Mapping[str, int],
        say: Callable[[str], None] = print,
        *,
        allow_code: bool = False,
    ) -> None:
        super().__init__(folder, out, say, allow_code=allow_code)
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

    def _there(self, role: str) -> list[str]:
        """Clients are there once the shuffler has heard of them and their nodes are connected."""
        present = super()._there(role)
        if role != "client":
            return present
        online = set(self._carrier.grid.get_node_ids())
        return [name for name in present if name in self._numbers and self._node(name) in online]

    def _node(self, name: str) -> int:
        return self._carrier.nodes[self._numbers[name]]

    def _announce(self, said: Announcement) -> bytes:
        """Open the batch at the shuffler, and carry the announcement to those it asks.

        Where too few hand in a receipt, the shuffler would wait in vain.
        """
        signed = said.sign(self.signer, self.pins.federation, self.pins.run)
        self.shuffler.publish(signed)
        if said.batch is not None:
            traffic = Traffic()
            asked = [self._numbers[name] for name in said.batch.cohort]
            receipts = self._carrier.send(dict.fromkeys(asked, signed), traffic)
            self._silent |= traffic.failed
            announced = Announced.of(said.key, signed)
            found = {self._carrier.names(client): receipt for client, receipt in receipts.items()}
            good = {name for name, receipt in found.items() if self._holds(name, receipt, announced)}
            if len(good) < (said.batch.min_clients if said.key.exchange == 0 else self._answered):
                self.shuffler.cancel(said.key)
                self._dropped |= set(said.batch.cohort) - good
                raise TooFew(f"{len(good)} clients handed in a receipt, too few for the shuffler to release their rows")
        return signed

    def _holds(self, name: str, receipt: bytes, announced: Announced) -> bool:
        """Whether it is the shuffler's word that it holds rows of a client that heard this very announcement."""
        shuffler = bytes.fromhex(self.pins.shuffler.signing_key)
        try:
            check_receipt(receipt, shuffler, self.pins.federation, self.pins.run, announced)
        except TrustError:
            self._silent[name] = "handed back something that is no receipt of the shuffler's"
            return False
        return True


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
