"""A capture is what the aggregator decoded, in its order; replayed rounds are the played ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ntkfl.audit.capture import capture, capture_of_run
from ntkfl.audit.rows import rows_of
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.tangent import jacobian
from tests.audit.fixtures import config

ROWS = config({"name": "ntk-fl"}, privacy={"subsample_rate": 0.05})
HIDDEN = {"subsample_rate": 0.05, "projected_dim": 20, "sparsity": 0.5, "values": "float32"}
MIXED = config({"name": "cp-ntk-fl"}, privacy=HIDDEN)


def test_uploads_are_the_jacobians_of_the_true_inputs() -> None:
    caught = capture(ROWS, 2)
    rows = rows_of(caught)
    x, y, _ = caught.aligned()
    true = jacobian(caught.task.at(caught.weights), x)
    assert torch.equal(rows.labels, y)
    torch.testing.assert_close(rows.J.dense(), true.dense())
    assert caught.round == 2
    assert len(caught.uploads) == 3


def test_shuffled_rows_are_aligned_with_who_sent_them() -> None:
    caught = capture(MIXED, 1)
    rows = rows_of(caught)
    x, y, raw = caught.aligned()
    assert torch.equal(rows.labels, y)
    torch.testing.assert_close(caught.task.predict(caught.weights, x), rows.outputs)
    assert caught.projection is not None
    torch.testing.assert_close(caught.projection(raw), x)
    senders = [client for client, _ in caught.sent_by]
    own = {i: len(labels) for i, (_, labels) in zip(caught.cohort, caught.truth, strict=True)}
    assert {i: senders.count(i) for i in caught.cohort} == own
    assert sorted(senders) != senders  # mixed


def test_a_run_is_replayed_and_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    execute(ROWS, out=path)
    again = capture_of_run(path, 2)
    assert again.uploads[0].message(2).encode() == capture(ROWS, 2).uploads[0].message(2).encode()
    assert torch.equal(again.after, RunFolder(path).load_checkpoint()[1]["state/weights"])
    with pytest.raises(ConfigError, match="rounds 1 to 2, not 3"):
        capture_of_run(path, 3)
    lines = (path / "history.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"train_loss": 0.5}
    (path / "history.jsonl").write_text(json.dumps(first) + "\n" + lines[1] + "\n")
    with pytest.raises(RunFolderError, match="train_loss of round 1"):
        capture_of_run(path, 2)
