"""The guard around an ordinary Flower app: what was asked about leaves, in the ledger first, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from ntkfl.errors import Refused
from ntkfl.flower.mod import guard
from ntkfl.privacy.ledger import Ledger, LedgerEntry

POLICY = 'methods = ["updates"]\n[flower]\nmetrics = ["train_loss", "num-examples"]\nmax_mb = 0.001\n'
WEIGHTS = {"weight": np.ones((3, 4), np.float32), "bias": np.zeros(3, np.float32)}
METRICS: dict[str, int | float | list[float]] = {"train_loss": 0.5, "num-examples": 20}


def arrays(**changed: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in (WEIGHTS | changed).items()})


def asked(folder: Path, content: Callable[[], RecordDict], policy: str = POLICY) -> RecordDict:
    """What leaves a node with this policy whose app, a real ClientApp, replies so."""
    app = ClientApp(mods=[guard])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return Message(content(), reply_to=msg)

    (folder / "policy.toml").write_text(policy)
    context = Context(7, 1, {"policy": str(folder / "policy.toml")}, RecordDict(), {})
    question = RecordDict({"arrays": arrays(), "config": ConfigRecord({"server-round": 3, "lr": 0.1})})
    metadata = Metadata(7, "question", 0, 1, "", "", time.time(), 60.0, "train")  # as a SuperLink fills it in
    return app(Message(content=question, metadata=metadata), context).content


def entries(folder: Path) -> list[LedgerEntry]:
    ledger = Ledger(folder / "ledger")
    with ledger.locked():
        return ledger.entries


def reply(**records: ArrayRecord | MetricRecord | ConfigRecord) -> RecordDict:
    return RecordDict({"arrays": arrays(), "metrics": MetricRecord(METRICS)} | records)


def test_an_ordinary_reply_leaves_as_it_is_and_is_in_the_ledger(tmp_path: Path) -> None:
    left = asked(tmp_path, lambda: reply(arrays=arrays(bias=np.full(3, 2, np.float32))))
    assert left.array_records["arrays"]["bias"].numpy().tolist() == [2, 2, 2]
    assert dict(left.metric_records["metrics"]) == METRICS
    (entry,) = entries(tmp_path)
    assert (entry.run, entry.node, entry.method, entry.round, entry.epsilon) == ("7", "1", "flower", 3, None)
    assert entry.bytes > 15 * 4


RANDOM = np.random.default_rng(0).bytes(5_000)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: reply(arrays=arrays(rows=np.ones((3, 4), np.float32))), "array 'rows'"),
        (lambda: reply(arrays=arrays(bias=np.ones(4, np.float32))), "array 'bias'"),
        (lambda: reply(more=arrays()), "is not one that was asked"),
        (lambda: reply(arrays=arrays(weight=np.ones((3, 4), np.float64))), "array 'weight', float64"),
        (
            lambda: reply(arrays=ArrayRecord({"bias": Array("float32", (3,), "x", RANDOM)})),
            "more than its numbers take",
        ),
        (lambda: reply(metrics=MetricRecord(METRICS | {"age of patient 3": 71})), "metric 'age of patient 3'"),
        (lambda: reply(metrics=MetricRecord({"train_loss": [0.1, 0.2, 0.3]})), "metric 'train_loss'"),
        (lambda: reply(notes=ConfigRecord({"note": "patient 3"})), "'note' in a ConfigRecord"),
    ],
)
def test_what_was_not_asked_about_does_not_leave(tmp_path: Path, content: Callable[[], RecordDict], said: str) -> None:
    with pytest.raises(Refused, match=said) as error:
        asked(tmp_path, content)
    assert "\n" not in str(error.value)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('methods = ["sums"]', "do not name 'flower'"),
        ('methods = ["updates"]\n[privacy]\nepsilon_per_run = 1\nepsilon_per_year = 1', "do not name 'flower'"),
        ('methods = ["updates"]\nsecure_sum = "required"', "secure sums"),
        ('methods = ["updates"]\nmin_clients = 4', "least number of clients"),
        ('methods = ["updates"]\ncode = ["sha256:0"]', "the code of ntkfl"),
        (
            'methods = ["updates"]\n[flower]\nmax_mb = 0.0001\nmetrics = ["train_loss", "num-examples"]',
            "max_mb = 0.0001",
        ),
        ("methods = 3", "policy.toml"),
    ],
)
def test_policies_that_an_ordinary_app_cannot_keep_refuse_it(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        asked(tmp_path, reply, line)


def test_an_error_of_the_app_says_nothing_of_the_data(tmp_path: Path) -> None:
    def fails() -> RecordDict:
        raise ValueError("cannot parse 'patient 3, 71 years'")

    with pytest.raises(Refused, match="the app failed with ValueError: see the log of this site") as error:
        asked(tmp_path, fails)
    assert error.value.__suppress_context__
    assert entries(tmp_path) == []


def test_nothing_leaves_where_the_ledger_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("no folder")
    with pytest.raises(Refused, match="nothing was sent"):
        asked(tmp_path, reply)
