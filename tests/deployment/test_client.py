"""What a client answers, and what it leaves alone."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.receipt import issue_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.deployment.client import ShuffledClient, next_sequence
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import ConfigError, DataError, NTKFLError, TrustError
from ntkfl.federation.client import Client, SystemRandomness, check_data
from ntkfl.federation.evaluation import counts, question
from ntkfl.methods import NTKFL, Task
from ntkfl.services.announcement import EVALUATION, Announcement
from ntkfl.services.shuffler.batch import Batch


@pytest.fixture
def client(tmp_path: Path) -> tuple[ShuffledClient, SigningKey]:
    """A client that has enrolled, without the network, and the key of its aggregator."""
    (tmp_path / "run.toml").write_text(
        "inputs = [4]\noutputs = 2\nrounds = 5\nretries = 2\nclients_per_round = 3\nmax_rows = 100\n"
        '[method]\nname = "ntk-fl"\nsubsample_rate = 0.5\n'
    )
    federation = init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=4, min_clients=3))
    own = ShuffledClient.__new__(ShuffledClient)
    own.federation, own.ledger = federation, Ledger(tmp_path, federation.run)
    own.name, own.role = "client-0", "client"
    own.method, own.x, own.y, own._round = NTKFL(subsample_rate=0.5), torch.randn(40, 4), torch.arange(40) % 2, None
    task = Task(federation.terms.build_model(0), 2, "ce")
    own.client = Client(0, task, own.method, lambda: (own.x, own.y), SystemRandomness(), rows=federation.terms.max_rows)
    return own, SigningKey.load(tmp_path / "demo" / "aggregator" / "signing-key.pem")


def batch(key: BatchKey, **changes: Any) -> Batch:
    terms: dict[str, Any] = {
        "cohort": ("client-0", "client-1", "client-2"), "max_rows": 100, "row_bytes": 10, "min_clients": 3,
        "seconds": 60.0,
    }  # fmt: skip
    return Batch(key, **(terms | changes))


def signed(client: tuple[ShuffledClient, SigningKey], kind: Any, key: BatchKey, **changes: Any) -> bytes:
    own, signer = client
    said = Announcement(kind, key, batch(key, **changes), sealing_key=b"k" * 32)
    return said.sign(signer, own.federation.federation, own.federation.run)


def hear(client: tuple[ShuffledClient, SigningKey], kind: Any, key: BatchKey, **changes: Any) -> Announcement | None:
    return client[0].heed(signed(client, kind, key, **changes))


def test_a_fair_question_is_heeded_once(client: tuple[ShuffledClient, SigningKey], tmp_path: Path) -> None:
    key = BatchKey(3, 0)
    assert hear(client, "exchange", key) is not None
    assert hear(client, "exchange", key) is None
    assert hear(client, "exchange", BatchKey(2, 1)) is None  # older
    assert hear(client, "exchange", BatchKey(3, 1)) is not None
    newest, _ = Ledger(tmp_path, "run-0").read() or (None, "")
    assert newest == BatchKey(3, 1)  # also after a restart
    assert Ledger(tmp_path, "run-1").read() is None  # another run counts for itself


def test_the_end_is_heard_again_and_nothing_before_it(client: tuple[ShuffledClient, SigningKey]) -> None:
    own, signer = client
    end = Announcement("end", BatchKey(4, 0)).sign(signer, own.federation.federation, own.federation.run)
    for _ in range(2):  # as by a client that is started again
        said = own.heed(end)
        assert said is not None
        assert said.kind == "end"
    assert hear(client, "exchange", BatchKey(4, 0)) is None
    assert hear(client, "exchange", BatchKey(5, 0)) is not None
    assert own.heed(end) is None  # an old end is none


@pytest.mark.parametrize(
    ("kind", "key", "changes"),
    [
        ("exchange", BatchKey(1, 0), {"min_clients": 2}),
        ("exchange", BatchKey(1, 0), {"cohort": ("client-0", "client-1"), "min_clients": 2}),
        ("exchange", BatchKey(1, 0), {"cohort": ("client-0", "client-1", "client-2", "client-3")}),
        ("exchange", BatchKey(1, 0), {"seconds": 0.0}),
        ("exchange", BatchKey(1, 0), {"max_rows": 1}),
        ("exchange", BatchKey(1, 0), {"max_rows": 101}),
        ("exchange", BatchKey(0, 0), {}),
        ("exchange", BatchKey(8, 0), {}),  # five rounds, of which two may be tried again
        ("evaluate", BatchKey(8, EVALUATION), {}),
        ("exchange", BatchKey(1, 4), {}),
        ("exchange", BatchKey(1, EVALUATION), {}),
        ("evaluate", BatchKey(1, 1), {}),
    ],
)
def test_an_unfair_one_is_not(
    client: tuple[ShuffledClient, SigningKey], kind: str, key: BatchKey, changes: dict[str, Any]
) -> None:
    with pytest.raises(TrustError):
        hear(client, kind, key, **changes)
    assert hear(client, "exchange", BatchKey(1, 1)) is not None  # it has not used up a fair one


def test_a_round_has_one_cohort_before_and_after_a_restart(
    client: tuple[ShuffledClient, SigningKey], tmp_path: Path
) -> None:
    """Whatever a shuffler relays: with another cohort in its second exchange, one client's rows would stand out."""
    others = ("client-0", "client-1", "client-3")
    assert hear(client, "exchange", BatchKey(1, 0)) is not None
    with pytest.raises(TrustError, match="another cohort"):
        hear(client, "exchange", BatchKey(1, 1), cohort=others)
    client[0].ledger = Ledger(tmp_path, "run-0")
    with pytest.raises(TrustError, match="another cohort"):
        hear(client, "evaluate", BatchKey(1, EVALUATION), cohort=others)
    assert hear(client, "exchange", BatchKey(1, 1), cohort=("client-2", "client-1", "client-0")) is not None
    assert hear(client, "exchange", BatchKey(2, 0), cohort=others) is not None


def test_an_evaluator_is_no_more_exact_than_the_contract_says(client: tuple[ShuffledClient, SigningKey]) -> None:
    own, terms = client[0], client[0].federation.terms
    task = own.client.task
    asked = question(1, task.like)

    def under(**changes: Any) -> dict[str, torch.Tensor]:
        own.federation = own.federation.model_copy(update={"terms": terms.model_copy(update=changes)})
        return dict(own._counts(asked).arrays)

    exact = counts(task, asked, own.x, own.y).arrays
    assert all(torch.equal(exact[name], found) for name, found in under().items())
    assert all(float(found) % 16 == 0 for found in under(count_multiple=16).values())
    found = [under(method=terms.method | {"clip": 1.0})["samples"].item() for _ in range(20)]
    assert len(set(found)) > 1  # noise of scale 3, no value of which is likelier than 1/6


def test_two_processes_of_one_client_answer_once(client: tuple[ShuffledClient, SigningKey], tmp_path: Path) -> None:
    """However many take the same questions at the same time."""
    ledgers = [Ledger(tmp_path, "run-0") for _ in range(4)]
    keys = [BatchKey(number, 0) for number in range(1, 30)]
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda ledger: [key for key in keys if ledger.take(key, "ab")], ledgers))
    answered = [key for own in taken for key in own]
    assert len(answered) == len(set(answered))
    assert (keys[-1], "ab") == ledgers[0].read()


def test_a_receipt_for_another_announcement_is_not_believed(client: tuple[ShuffledClient, SigningKey]) -> None:
    own, said = client[0], Announced.of(BatchKey(1, 0), b"these weights")
    shuffler = SigningKey.generate()
    own.federation = own.federation.model_copy(
        update={"shuffler": own.federation.shuffler.model_copy(update={"signing_key": shuffler.public.hex()})}
    )
    own._path = ""

    def answering(receipt: bytes) -> Any:
        return SimpleNamespace(ask=lambda *_: SimpleNamespace(json=lambda: {"receipt": receipt.hex()}))

    where = (own.federation.federation, own.federation.run)
    own.shuffler = answering(receipt := issue_receipt(shuffler, *where, said))
    assert own._send("rows", said, b"") == receipt
    own.shuffler = answering(issue_receipt(shuffler, *where, Announced.of(said.key, b"other weights")))
    with pytest.raises(TrustError):
        own._send("rows", said, b"")


def test_a_killed_client_has_counted_what_it_was_about_to_answer(
    client: tuple[ShuffledClient, SigningKey], tmp_path: Path
) -> None:
    asked = signed(client, "exchange", BatchKey(2, 0))
    child = os.fork()
    if child == 0:
        client[0].heed(asked)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    client[0].ledger = Ledger(tmp_path, "run-0")
    assert client[0].heed(asked) is None


@pytest.mark.parametrize("content", [b"", b"rubbish", b"3 0 1", b"[3]", b"[3, 0, 1]", b'[3.0, 0, ""]', b'[3, 256, ""]'])
def test_without_a_ledger_that_can_be_read_nothing_is_answered(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answered-run-0.json").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        Ledger(tmp_path, "run-0")


def test_another_signer_is_not_heard(client: tuple[ShuffledClient, SigningKey]) -> None:
    with pytest.raises(TrustError):
        hear((client[0], SigningKey.generate()), "exchange", BatchKey(1, 0))


def test_a_round_that_is_tried_again_sees_other_samples(client: tuple[ShuffledClient, SigningKey]) -> None:
    own = client[0]
    first = own.at(BatchKey(1, 0), 1)
    assert len(first) == 20
    assert own.at(BatchKey(1, 1), 1) is first
    assert own.at(BatchKey(1, EVALUATION), 1) is first
    second = own.at(BatchKey(2, 0), 1)  # the same round of training
    assert second is not first
    assert second.randomness.seed("noise") != first.randomness.seed("noise")  # a round's noise is its own
    assert not torch.equal(second.x, first.x)
    with pytest.raises(ConfigError, match="not there at its beginning"):
        own.at(BatchKey(1, 1), 1)
    own.client.rows = 7
    assert len(own.at(BatchKey(3, 0), 3)) == 7  # no more than was agreed
    with pytest.raises(ConfigError, match="not there at its beginning"):
        own.at(BatchKey(4, 1), 4)


def test_a_client_draws_from_its_operating_system() -> None:
    draws = SystemRandomness()
    assert isinstance(draws.subsampling(1), random.SystemRandom)
    assert draws.of_round(1).seed("batches") != draws.of_round(1).seed("batches")


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
    assert next_sequence(said, 4) == after
