"""A server whose rows lie in files ends a run with the weights of one that has them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ntkfl
from ntkfl.methods import NTKFL
from ntkfl.tangent import Stack


@pytest.mark.parametrize("kernel", ["full", "trace"])
def test_a_run_equals_the_one_in_memory(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x, y = torch.randn(60, 6), torch.arange(60) % 3
        pairs = [(x[i : i + 15] + i, y[i : i + 15]) for i in range(0, 60, 15)]
        fed = ntkfl.data.from_clients(pairs, test=(x, y))
        model = ntkfl.models.mlp(6, 8, 3)
        method = NTKFL(kernel=kernel, row_clip=1.0, trim=0.3)  # rows are scaled, judged and left out on the way
        trained = ntkfl.train(model, fed, method, rounds=2, clients_per_round=4, seed=0, callbacks=[])
        return torch.cat([p.detach().flatten() for p in trained.model.parameters()])

    in_memory = run()
    made = []

    def in_files(rows: int) -> Stack:
        made.append(rows)
        return Stack(rows, store=tmp_path)

    monkeypatch.setattr("ntkfl.methods.robust_rows.Stack", in_files)
    out_of_core = run()
    assert made == [60, 60]
    # float32: two rounds of some hundred products, summed in another order
    assert (out_of_core - in_memory).norm() < 1e-3 * in_memory.norm()
