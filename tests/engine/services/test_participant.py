"""What a client answers, and what it leaves alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.engine.draws import SystemDraws
from ntkfl.engine.services.announcement import EVALUATION, Announcement
from ntkfl.engine.services.participant import Participant, _read_seen, _sequence, check_data
from ntkfl.engine.services.trial import Trial, init
from ntkfl.errors import ConfigError, DataError, NTKFLError, TrustError
from ntkfl.methods import NTKFL
from ntkfl.privacy.batches import Batch
from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.sealing import SigningKey


@pytest.fixture
def client(tmp_path: Path) -> tuple[Participant, SigningKey]:
    """A client that has enrolled, without the network, and the key of its aggregator."""
    (tmp_path / "run.toml").write_text('inputs = [4]\noutputs = 2\n[method]\nname = "ntk-fl"\nsubsample_rate = 0.5\n')
    pins = init(tmp_path / "trial", tmp_path / "run.toml", Trial(clients=4, min_clients=3))
    own = Participant.__new__(Participant)
    own.pins, own.seen, own._seen_file, own.name = pins, None, tmp_path / "seen", "client-0"
    own.method, own.draws, own._client, own._memory = NTKFL(subsample_rate=0.5), SystemDraws(), None, {}
    own.x, own.y = torch.randn(40, 4), torch.arange(40) % 2
    return own, SigningKey.load(tmp_path / "trial" / "aggregator" / "signing-key.pem")


def batch(key: BatchKey, **changes: Any) -> Batch:
    terms: dict[str, Any] = {
        "cohort": ("client-0", "client-1", "client-2"), "max_rows": 100, "row_bytes": 10, "min_clients": 3,
        "seconds": 60.0,
    }  # fmt: skip
    return Batch(key, **(terms | changes))


def hear(client: tuple[Participant, SigningKey], kind: Any, key: BatchKey, **changes: Any) -> Announcement | None:
    own, signer = client
    said = Announcement(kind, key, batch(key, **changes))
    return own.heed(said.sign(signer, own.pins.federation, own.pins.run))


def test_a_fair_question_is_heeded_once(client: tuple[Participant, SigningKey]) -> None:
    key = BatchKey(3, 0, 0)
    assert hear(client, "exchange", key) is not None
    assert hear(client, "exchange", key) is None
    assert hear(client, "exchange", BatchKey(2, 5, 1)) is None  # older
    assert hear(client, "exchange", BatchKey(3, 0, 1)) is not None
    assert _read_seen(client[0]._seen_file) == BatchKey(3, 0, 1)  # also after a restart
    (client[0]._seen_file).write_text("rubbish")
    assert _read_seen(client[0]._seen_file) is None


@pytest.mark.parametrize(
    ("kind", "key", "changes"),
    [
        ("exchange", BatchKey(1, 0, 0), {"min_clients": 2}),
        ("exchange", BatchKey(1, 0, 0), {"cohort": ("client-0", "client-1"), "min_clients": 2}),
        ("exchange", BatchKey(1, 0, 0), {"seconds": 0.0}),
        ("exchange", BatchKey(1, 8, 0), {}),
        ("exchange", BatchKey(1, 0, 4), {}),
        ("exchange", BatchKey(1, 0, EVALUATION), {}),
        ("evaluate", BatchKey(1, 0, 1), {}),
    ],
)
def test_an_unfair_one_is_not(
    client: tuple[Participant, SigningKey], kind: str, key: BatchKey, changes: dict[str, Any]
) -> None:
    with pytest.raises(TrustError):
        hear(client, kind, key, **changes)


def test_another_signer_is_not_heard(client: tuple[Participant, SigningKey]) -> None:
    with pytest.raises(TrustError):
        hear((client[0], SigningKey.generate()), "exchange", BatchKey(1, 0, 0))


def test_attempts_at_a_round_see_the_same_samples(client: tuple[Participant, SigningKey]) -> None:
    own = client[0]
    first = own._sampled(BatchKey(1, 0, 0), 100)
    assert len(first) == 20
    for attempt in range(8):
        assert own._sampled(BatchKey(1, attempt, 0), 100) is first
    assert own._sampled(BatchKey(1, 0, EVALUATION), 0) is first
    second = own._sampled(BatchKey(2, 0, 0), 100)
    assert second is not first
    assert second.randomness.seed("noise") != first.randomness.seed("noise")  # a round's noise is its own
    assert not torch.equal(second.x, first.x)
    assert len(own._sampled(BatchKey(3, 0, 0), 7)) == 7  # no more than was agreed
    with pytest.raises(ConfigError, match="not there at its beginning"):
        own._sampled(BatchKey(4, 0, 1), 100)


def test_a_client_draws_from_its_operating_system() -> None:
    draws = SystemDraws()
    assert isinstance(draws.subsampling(1), random.SystemRandom)
    assert draws.randomness(1).seed("batches") != draws.randomness(1).seed("batches")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(0, 4), torch.zeros(0).long()),
        (torch.zeros(3, 5), torch.zeros(3).long()),
        (torch.zeros(3, 4), torch.zeros(2).long()),
        (torch.full((3, 4), float("nan")), torch.zeros(3).long()),
        (torch.zeros(3, 4), torch.tensor([0, 1, 2])),
        (torch.zeros(3, 4), torch.tensor([0, 1, -1])),
        (torch.zeros(3, 4), torch.zeros(3, 3)),
    ],
)
def test_data_that_are_not_the_terms_are_refused(x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises(DataError) as caught:
        check_data(x, y, (4,), 2)
    assert isinstance(caught.value, NTKFLError)


@pytest.mark.parametrize(("said", "after"), [("5", 5), ("9", 9), ("2", 5), ("", 5), ("-3", 5), ("x", 5), ("9" * 30, 5)])
def test_the_next_announcement_is_never_skipped_nor_asked_for_twice(said: str, after: int) -> None:
    assert _sequence(said, 4) == after
