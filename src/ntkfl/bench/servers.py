"""An update whose rows several servers hold: each a process with its own rows, and sums between them over loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ntkfl.bench.race import relative
from ntkfl.bench.rows import Row, Setting
from ntkfl.errors import ConfigError

_CODE = "from ntkfl.bench.servers import _main; _main()"


def servers(setting: Setting) -> list[Row]:
    """A server update whose rows several servers hold, beside one that holds all; a thread each."""
    samples, side, hidden = (240, 14, 16) if setting.quick else (4_000, 28, 100)
    alone, changes = _update(1, samples, side, hidden)
    rows = [Row(f"N = {samples:,} at one server", alone["seconds"], 1.0, note=f"{alone['products']:.0f} products")]
    for count in (2,) if setting.quick else (2, 4):
        one, found = _update(count, samples, side, hidden)
        # In every product each server puts in its Jᵀr, [d], and is given the sum.
        details = one | {"summed_bytes": one["products"] * changes.shape[1] * changes.element_size()}
        rows.append(
            Row(
                f"the same at {count} servers",
                one["seconds"],
                one["seconds"] / alone["seconds"],
                difference=relative(found, changes),
                note=f"{one['products']:.0f} products; {details['summed_bytes'] / 1e6:,.3g} MB in from each, and back",
                details=details,
                ours=True,
            )
        )
    return rows


def _update(count: int, samples: int, side: int, hidden: int) -> tuple[dict[str, float], Tensor]:
    """Seconds and products of an update at `count` servers, and its candidates' weight changes [S, d]."""
    alike = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        numbers = [str(n) for n in (count, samples, side, hidden)]
        processes = [
            subprocess.Popen([sys.executable, "-c", _CODE, folder, str(rank), *numbers], env=os.environ | alike)
            for rank in range(count)
        ]
        try:
            if any(process.wait() for process in processes):
                raise ConfigError("a server of the benchmark ended with an error, see above")
        finally:
            for process in processes:
                process.kill()
        return json.loads(Path(folder, "figures").read_text()), load_file(Path(folder, "changes"))["changes"]


def _main() -> None:
    import torch.distributed as dist

    from ntkfl.bench.inputs import synthetic
    from ntkfl.models import mlp
    from ntkfl.tangent import PAPER_STEPS, evolve, jacobian
    from ntkfl.tangent.shared import SharedJacobian

    folder = Path(sys.argv[1])
    rank, count, samples, side, hidden = (int(a) for a in sys.argv[2:])
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, timedelta(minutes=5), rank=rank, world_size=count)
    x, y = (part.tensor_split(count)[rank] for part in synthetic(samples, side))
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10)
    with torch.no_grad():
        f0 = model(x)
    dist.barrier()
    began = time.perf_counter()
    own = jacobian(model, x)
    evolution = evolve(own if count == 1 else SharedJacobian(own), f0, y, 0.01, PAPER_STEPS)
    changes = evolution.deltas()
    seconds = time.perf_counter() - began
    if rank == 0:
        save_file({"changes": changes}, folder / "changes")
        figures = {"seconds": seconds, "products": evolution.statistics.evaluations}
        (folder / "figures").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
