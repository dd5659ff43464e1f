"""CP-NTK-FL on Flower, with the key server and the shuffler as processes: rows go past Flower, receipts through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

import ntkfl
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.receipt import check_receipt, issue_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.errors import TooFew, TrustError
from ntkfl.federation.build import build_network
from ntkfl.federation.client import SeededRandomness
from ntkfl.federation.config import ModelConfig
from ntkfl.federation.shuffled import RowSchema
from ntkfl.federation.simulation import Simulation
from ntkfl.federation.transport import Traffic
from ntkfl.flower.apps import client_app
from ntkfl.flower.records import payload_of
from ntkfl.flower.shuffled import FlowerShufflerTransport
from ntkfl.methods import CPNTKFL
from ntkfl.services.announcement import Announcement
from ntkfl.services.key_server.client import Identity
from tests.deployment.roles import METHOD, Roles
from tests.flower.local_grid import LocalGrid
from tests.own_data import read_client

NODES = {f"client-{i}": 1000 + i for i in range(4)}


class Listening(LocalGrid):
    """Also keeps what clients sent through Flower."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.replies: list[Message] = []

    def _reply(self, asked: Message, node: int) -> Message:
        self.replies.append(super()._reply(asked, node))
        return self.replies[-1]


def participant(roles: Roles, number: int, said: list[str]) -> ShuffledClient:
    folder, data = roles.folder / "clients" / f"client-{number}", roles.data / f"client-{number}.npz"
    own = ShuffledClient(folder, *read_client(data), randomness=SeededRandomness(7, number), say=said.append)
    own.hello()
    return own


def test_rows_go_past_flower_and_the_weights_are_the_simulations(tmp_path: Path) -> None:
    said: list[str] = []
    with Roles(tmp_path, seed=7, evaluators=0) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        members = {NODES[f"client-{i}"]: participant(roles, i, said) for i in range(4)}
        grid = Listening({node: client_app(member) for node, member in members.items()})
        # None can be made once the run has ended.
        other = aggregator(roles, tmp_path / "other", grid, said, round_seconds=1.0)
        history = aggregator(roles, roles.out, grid, said).run().history
        simulated = simulation(roles)
        deployed = load_file(roles.out / "model.safetensors")
        for name, tensor in simulated.model.state_dict().items():
            assert (tensor - deployed[name]).abs().max() < 1e-6
        for here, there in zip(simulated.history, history, strict=True):
            assert there["uplink_bytes"] == here["uplink_bytes"]
            assert there["dropped_rows"] == 0
            assert "failed" not in there

        # Through Flower came receipts alone: 64 bytes, the same for all clients of an exchange.
        receipts = [payload_of(reply) for reply in grid.replies]
        assert {len(receipt) for receipt in receipts} == {64}
        assert len(receipts) == 3 * 3 * 3  # three rounds of upload, losses and evaluation, three clients each
        assert len(set(receipts)) == 3 * 3
        assert not any(reply.content.config_records for reply in grid.replies)
        rho = Identity.of(roles.folder / "clients" / "client-0").run_secret().seed.reveal()
        for message in (*grid.sent, *grid.replies):
            assert rho not in payload_of(message)

        # Whose node is not connected is not drawn, however present it is at the shuffler.
        transport = other.transport
        grid.online = set(list(NODES.values())[1:])
        assert transport.present("client") == ["client-1", "client-2", "client-3"]
        # Nobody answers: the batch is cancelled, and nothing is waited for.
        grid.silent, at = set(NODES.values()), BatchKey(9, 0)
        assert len(transport.available(2)) == 3
        batch = transport.batch(at, [0, 1], RowSchema("", b"", b"", 99, sampled=True))
        asked = Announcement("exchange", at, batch, sealing_key=transport.opener.public)
        with pytest.raises(TooFew, match="0 clients handed in a receipt"):
            transport.announce(asked, Traffic())
        assert transport.shuffler.status(at).state == "cancelled"
        grid.silent = set()

        # An announcement that comes again is not answered; of the reason, the server learns nothing.
        again = grid._reply(grid.sent[0], grid.sent[0].metadata.dst_node_id)
        assert again.has_error()
        assert again.error.reason == "not a question for this client"

        # A shuffler that cannot be reached: the client says why at home, and through Flower only that it failed.
        shuffler.kill()
        fresh = participant_without_shuffler(roles)
        asked = next(message for message in grid.sent if message.metadata.dst_node_id == NODES["client-0"])
        refused = LocalGrid({1: client_app(fresh)})._reply(asked, 1)
        assert refused.error.reason == "Refused"


def aggregator(roles: Roles, out: Path, grid: LocalGrid, said: list[str], **changed: Any) -> Aggregator:
    def reach(folder: Path, federation: Federation, settings: Deployment, *others: Any) -> FlowerShufflerTransport:
        return FlowerShufflerTransport(grid, NODES, folder, federation, settings.model_copy(update=changed), *others)

    return Aggregator(roles.folder / "aggregator", out, said.append, reach=reach)


def participant_without_shuffler(roles: Roles) -> ShuffledClient:
    """A client that was asked and, as it had seen nothing yet, would answer."""
    folder = roles.folder / "clients" / "client-0"
    (folder / "answered-run-0.json").unlink(missing_ok=True)
    return ShuffledClient(folder, *read_client(roles.data / "client-0.npz"), patience=0.1, say=lambda line: None)


def simulation(roles: Roles) -> ntkfl.Run:
    method = CPNTKFL(**{k: v for k, v in METHOD.items() if k != "name"})  # type: ignore[arg-type]
    model = build_network(ModelConfig(hidden=(12,)).suited(method), (20,), 10, 7).to(torch.float64)
    secret = Identity.of(roles.folder / "clients" / "client-0").run_secret()
    simulation = Simulation(model, roles.fed, method, clients_per_round=3, seed=7, secret=secret)
    return simulation.run(3)


def test_a_receipt_is_for_one_announcement_of_one_run() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    at = Announced.of(BatchKey(3, 1), b"these weights")
    receipt = issue_receipt(key, "federation", "run", at)
    check_receipt(receipt, key.public, "federation", "run", at)
    assert receipt == issue_receipt(key, "federation", "run", at)
    for wrong in (
        (receipt, other.public, "federation", "run", at),
        (receipt, key.public, "another", "run", at),
        (receipt, key.public, "federation", "another", at),
        (receipt, key.public, "federation", "run", Announced(BatchKey(3, 0), at.digest)),
        (receipt, key.public, "federation", "run", Announced.of(at.key, b"other weights")),
        (bytes([receipt[0] ^ 1]) + receipt[1:], key.public, "federation", "run", at),
        (b"", key.public, "federation", "run", at),
    ):
        with pytest.raises(TrustError):
            check_receipt(*wrong)
