"""A capture is what the aggregator decoded, in its order."""

from __future__ import annotations

import torch

from ntkfl.audit.capture import capture
from ntkfl.audit.rows import rows_of
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
    assert caught.order is not None
    assert caught.order.sort().values.tolist() == list(range(len(y)))
    assert caught.order.tolist() != list(range(len(y)))  # mixed
