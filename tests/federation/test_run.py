"""A finished run in Python."""

from __future__ import annotations

import ntkfl


def test_printing_a_run_is_one_line_without_its_history() -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=4), seed=0)
    run = ntkfl.train(ntkfl.models.mlp(64, 8, 10), fed, ntkfl.methods.FedAvg(), rounds=2, clients_per_round=2, seed=0)
    last = run.history[-1]
    assert repr(run) == (
        f"Run(fedavg: 2 rounds, test_accuracy {last['test_accuracy']:.4f}, test_loss {last['test_loss']:.4f})"
    )
