"""Rows that several servers hold evolve as if one held them all: real processes, sums over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ntkfl
from ntkfl.tangent.shared import SharedJacobian

ROWS = (7, 1, 12)  # of three servers
STEPS = [10, 100, 1000]


def scene() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(sum(ROWS), 6, dtype=torch.float64), torch.randint(3, (sum(ROWS),))


def serve(folder: Path, rank: int) -> None:
    """One server: it has all rows here only to take its own."""
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=len(ROWS))
    model, x, y = scene()
    own_x, own_y = x.split(ROWS)[rank], y.split(ROWS)[rank]
    J = SharedJacobian(ntkfl.jacobian(model, own_x))
    found = {
        loss: ntkfl.evolve(J, model(own_x).detach(), targets, 0.05, STEPS, loss)
        for loss, targets in (("ce", own_y), ("mse", own_x[:, :3]))
    }
    values = {loss: (e.deltas(), e.residuals, e.outputs, e.statistics.evaluations) for loss, e in found.items()}
    torch.save(values, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_three_servers_end_where_one_does(tmp_path: Path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, timeout=120)
    assert done.returncode == 0
    model, x, y = scene()
    J = ntkfl.jacobian(model, x)
    apart = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(len(ROWS))]
    for loss, targets in (("ce", y), ("mse", x[:, :3])):
        whole = ntkfl.evolve(J, model(x).detach(), targets, 0.05, STEPS, loss)
        for changes, _, _, evaluations in (server[loss] for server in apart):
            assert (changes - whole.deltas()).norm() < 1e-10 * whole.deltas().norm()
            assert evaluations == whole.statistics.evaluations
        for i, expected in ((1, whole.residuals), (2, whole.outputs)):
            together = torch.cat([server[loss][i] for server in apart], dim=1)
            assert (together - expected).norm() < 1e-10 * expected.norm()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_would_need_rows_of_other_servers_is_refused() -> None:
    model, x, y = scene()
    J = SharedJacobian(ntkfl.jacobian(model, x))
    for options in ({"kernel": "trace"}, {"scheme": "descent"}, {"kernel": "trace", "loss": "mse", "scheme": "paper"}):
        with pytest.raises(ntkfl.NTKFLError, match="kernel 'full' and scheme 'flow'"):
            ntkfl.evolve(J, model(x).detach(), y, 0.05, STEPS, **options)  # type: ignore[arg-type]


def fork(folder: Path) -> None:
    """The servers, each a process, after one import."""
    children = []
    for rank in range(len(ROWS)):
        child = os.fork()
        if child == 0:
            serve(folder, rank)
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    fork(Path(sys.argv[1]))
