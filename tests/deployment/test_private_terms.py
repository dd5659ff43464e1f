"""Clients of a private run answer nothing that its ε does not count, and terms that would are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.crypto.credentials import SigningKey
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Contract, Deployment
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import ConfigError, TrustError
from ntkfl.methods import PrivateSums
from ntkfl.services.announcement import EVALUATION, Announcement
from ntkfl.services.shuffler.batch import Batch
from ntkfl.wire import Message

METHOD: dict[str, Any] = {"name": "private-sums", "secure_sum": True, "budget_rounds": 7, "noise_clients": 3}


@pytest.fixture
def client(tmp_path: Path) -> tuple[ShuffledClient, SigningKey]:
    (tmp_path / "run.toml").write_text(
        "inputs = [4]\noutputs = 2\nrounds = 5\nretries = 2\nclients_per_round = 4\nevaluators = 1\n"
        '[method]\nname = "private-sums"\nsecure_sum = true\nbudget_rounds = 7\nnoise_clients = 3\n'
    )
    federation = init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=4, evaluators=1, min_clients=3))
    # Pinned with a lower floor, as somebody else's setup could have it: the client still counts on `noise_clients`.
    federation = federation.model_copy(update={"shuffler": federation.shuffler.model_copy(update={"min_clients": 2})})
    own = ShuffledClient.__new__(ShuffledClient)
    own.federation, own.ledger = federation, Ledger(tmp_path, federation.run)
    own.name, own.role = "client-0", "client"
    own.method = PrivateSums(secure_sum=True, budget_rounds=7, noise_clients=3)
    return own, SigningKey.load(tmp_path / "demo" / "aggregator" / "signing-key.pem")


def hear(client: tuple[ShuffledClient, SigningKey], kind: Any, key: BatchKey, least: int, asks: bool = False) -> object:
    own, signer = client
    batch = Batch(key, ("client-0", "client-1", "client-2", "client-3"), 1, 100, least, 60.0, numbers=10)
    arrays = {"weights": torch.zeros(3)} | ({"asks": torch.tensor(1, dtype=torch.uint8)} if asks else {})
    said = Announcement(kind, key, batch, Message("weights", 1, arrays), sealing_key=b"k" * 32)
    return own.heed(said.sign(signer, own.federation.federation, own.federation.run))


def test_rounds_that_the_budget_is_for_are_answered(client: tuple[ShuffledClient, SigningKey]) -> None:
    assert hear(client, "exchange", BatchKey(1, 0), 3, asks=True) is not None
    assert hear(client, "exchange", BatchKey(2, 0), 4) is not None


@pytest.mark.parametrize(
    ("kind", "key", "least", "asks", "why"),
    [
        ("exchange", BatchKey(1, 0), 2, False, "less noise"),
        ("exchange", BatchKey(2, 0), 3, True, "first 1 alone"),
        ("evaluate", BatchKey(1, EVALUATION), 3, False, "evaluators"),
        ("exchange", BatchKey(8, 0), 3, False, "none of the 7"),
        ("exchange", BatchKey(1, 1), 3, False, "second sum"),
    ],
)
def test_others_are_not(
    client: tuple[ShuffledClient, SigningKey], kind: str, key: BatchKey, least: int, asks: bool, why: str
) -> None:
    with pytest.raises(TrustError, match=why):
        hear(client, kind, key, least, asks)


def test_terms_beyond_the_budget_are_refused() -> None:
    terms: dict[str, Any] = {"inputs": (4,), "outputs": 2, "clients_per_round": 4, "method": METHOD}
    assert Contract(**terms, rounds=5, retries=2).most_rounds == 7
    with pytest.raises(ConfigError, match="rounds \\+ retries are 8"):
        Contract(**terms, rounds=5, retries=3)
    with pytest.raises(ConfigError, match="more than the 2 clients"):
        Contract(**(terms | {"clients_per_round": 2}), rounds=5, retries=2)
    with pytest.raises(ConfigError, match="needs evaluators"):
        Deployment(**terms, rounds=5, retries=2, clients=4)
    assert Deployment(**terms, rounds=5, retries=2, clients=4, evaluators=1).private
