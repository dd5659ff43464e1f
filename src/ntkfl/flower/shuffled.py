"""CP-NTK-FL on Flower: the questions travel through Flower, the rows do not.

A client takes what the aggregator signed, gives its sealed rows to the shuffler, and hands the shuffler's receipt back
through Flower. The aggregator, in its ServerApp, fetches the released rows from the shuffler, as without Flower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.serverapp import Grid

from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.deployment.shuffler_transport import ShufflerTransport
from ntkfl.errors import MessageError, NTKFLError, TooFew, TrustError
from ntkfl.federation.transport import Traffic
from ntkfl.flower.transport import FlowerTransport
from ntkfl.methods import Method, Task
from ntkfl.services.announcement import Announcement
from ntkfl.services.shuffler.batch import EVALUATORS


class FlowerShufflerTransport(ShufflerTransport):
    """With `nodes` (node ids by client name) on `grid` to carry what the aggregator says."""

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        folder: Path,
        federation: Federation,
        settings: Deployment,
        task: Task,
        method: Method,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(folder, federation, settings, task, method, say)
        self._numbers = {name: number for number, name in enumerate(nodes)}
        names, seconds = list(nodes), settings.round_seconds
        self._flower = FlowerTransport(
            grid, dict(enumerate(nodes.values())), names.__getitem__, seconds=seconds, say=say
        )

    def present(self, role: str) -> list[str]:
        """Clients are there once the shuffler has heard of them and their nodes are connected."""
        present = super().present(role)
        if role != "client":
            return present
        online = {self._flower.names(client) for client in self._flower.available(0)}
        return [name for name in present if name in online]

    def lapsed(self) -> list[str]:
        """Whether a client is there, its node's connection says: it calls the shuffler only when it is asked."""
        return []

    def announce(self, said: Announcement, traffic: Traffic) -> bytes:
        """Open the batch at the shuffler, and carry the announcement to those it asks.

        Where too few hand in a receipt, the shuffler would wait in vain.
        """
        signed = super().announce(said, traffic)
        if said.batch is not None and said.key.exchange != EVALUATORS:  # who are at the shuffler, and at no node
            receipts = self.carry(dict.fromkeys(said.batch.cohort, signed), traffic)
            announced = Announced.of(said.key, signed)
            good = {name for name, receipt in receipts.items() if self._holds(name, receipt, announced, traffic)}
            if len(good) < (said.batch.min_clients if said.key.exchange == 0 else self.answered):
                self.shuffler.cancel(said.key)
                self.dropped |= set(said.batch.cohort) - good
                raise TooFew(f"{len(good)} clients handed in a receipt, too few for the shuffler to release their rows")
        return signed

    def carry(self, each: Mapping[str, bytes], traffic: Traffic) -> dict[str, bytes]:
        """Take to each client what was signed for it; what they hand back, by name."""
        found = self._flower.send({self._numbers[name]: signed for name, signed in each.items()}, traffic)
        return {self._flower.names(number): receipt for number, receipt in found.items()}

    def _holds(self, name: str, receipt: bytes, announced: Announced, traffic: Traffic) -> bool:
        """Whether it is the shuffler's word that it holds rows of a client that heard this very announcement."""
        shuffler = bytes.fromhex(self.peers.shuffler.signing_key)
        try:
            check_receipt(receipt, shuffler, self.federation, self.run, announced)
        except TrustError:
            traffic.failed[name] = "handed back something that is no receipt of the shuffler's"
            return False
        return True


def deliver(client: ShuffledClient, signed: bytes) -> bytes:
    """A client's answer to an announcement that came through Flower: the shuffler's receipt.

    Through Flower goes nothing else of it: of an error, its kind alone.
    """
    began = time.perf_counter()
    try:
        said = client.heed(signed)
        receipt = None if said is None else client.answer(said)
        if said is not None and receipt and said.key.exchange == 0:
            client.say(f"answered round {said.key.round} in {time.perf_counter() - began:.1f} s")
    except NTKFLError as error:
        client.say(f"not answered: {error}")
        raise MessageError(type(error).__name__) from None
    if not receipt:
        raise MessageError("not a question for this client")
    return receipt
