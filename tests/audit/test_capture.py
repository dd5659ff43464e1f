"""A capture is what the aggregator decoded, in its order; recorded and replayed rounds are the played ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ntkfl.audit.capture import capture, captures, captures_of_run, read_capture
from ntkfl.audit.received import rows_of, spread
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.simulation import execute
from ntkfl.federation.transcript import recorded_rounds
from ntkfl.tangent import jacobian
from tests.audit.fixtures import config

ROWS = {"name": "ntk-fl", "subsample_rate": 0.05}
MIXED = {"name": "cp-ntk-fl", "subsample_rate": 0.05, "projected_dim": 20, "sparsity": 0.5, "values": "float32"}


def test_uploads_are_the_jacobians_of_the_true_inputs() -> None:
    caught = capture(config(ROWS), 2)
    rows = rows_of(caught)
    x, y, _ = caught.aligned()
    true = jacobian(caught.task.at(caught.weights), x)
    assert torch.equal(rows.labels, y)
    torch.testing.assert_close(rows.J.dense(), true.dense())
    assert caught.round == 2
    assert len(caught.uploads) == len(caught.losses) == 3
    assert caught.candidates is not None


def test_shuffled_rows_are_aligned_with_who_sent_them() -> None:
    caught = capture(config(MIXED), 1)
    rows = rows_of(caught)
    x, y, raw = caught.aligned()
    assert torch.equal(rows.labels, y)
    torch.testing.assert_close(caught.task.predict(caught.weights, x), rows.outputs)
    assert caught.projection is not None
    torch.testing.assert_close(caught.projection(raw), x)
    assert caught.senders is not None
    own = {i: len(labels) for i, (_, labels) in zip(caught.cohort, caught.truth, strict=True)}
    assert {i: caught.senders.count(i) for i in caught.cohort} == own
    assert sorted(caught.senders) != caught.senders  # mixed


@pytest.mark.parametrize("method", [ROWS, MIXED, {"name": "fedavg", "local_steps": 2}], ids=lambda m: str(m["name"]))
def test_recording_and_bytes_agree_with_the_history(method: dict[str, object], tmp_path: Path) -> None:
    run = execute(config(method), out=tmp_path / "run", record=[2])
    assert recorded_rounds(tmp_path / "run") == [2]
    caught, played = read_capture(tmp_path / "run", 2), capture(config(method), 2)
    assert (caught.bytes_up, caught.bytes_down) == (run.history[1]["uplink_bytes"], run.history[1]["downlink_bytes"])
    assert caught.senders == played.senders
    for one, other in zip(caught.uploads + caught.losses, played.uploads + played.losses, strict=True):
        assert one.encode() == other.encode()


def test_a_run_without_a_recording_is_replayed_and_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    execute(config(ROWS), out=path)
    with pytest.raises(RunFolderError, match="no whole recording of round 2"):
        read_capture(path, 2)
    again = captures_of_run(path, [1, 2])
    assert again[2].uploads[0].encode() == captures(config(ROWS), [2])[2].uploads[0].encode()
    with pytest.raises(ConfigError, match="rounds 1 to 2, not 3"):
        captures_of_run(path, [3])
    lines = (path / "history.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"train_loss": 0.5}
    (path / "history.jsonl").write_text(json.dumps(first) + "\n" + lines[1] + "\n")
    with pytest.raises(RunFolderError, match="train_loss of round 1"):
        captures_of_run(path, [2])


def test_damaged_recordings_are_refused(tmp_path: Path) -> None:
    execute(config(ROWS), out=tmp_path / "run", record=[1])
    (tmp_path / "run/wire/round-001/0-up-1").unlink()
    with pytest.raises(RunFolderError, match="no whole recording"):
        read_capture(tmp_path / "run", 1)


def test_rounds_beyond_the_run_cannot_be_recorded() -> None:
    with pytest.raises(ConfigError, match="rounds 1 to 2"):
        execute(config(ROWS), record=[3])


def test_spread_covers_the_round_and_no_more() -> None:
    caught = capture(config(ROWS), 1)
    total = sum(len(y) for _, y in caught.truth)
    assert spread(caught, total + 5) == list(range(total))
    few = spread(caught, 3)
    assert torch.equal(rows_of(caught, few).index, torch.tensor(few))
