"""Time and peak memory of a server update, in a process of its own so that nothing else is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from ntkfl.errors import ConfigError
from ntkfl_experiments.bench.timing import BenchRow, Setting, fashion, synthetic

_STATUS = Path("/proc/self/status")
_SIZES, _QUICK = (1_000, 4_000, 16_000, 64_000, 100_000), (60, 240)
_REAL = 60_000  # images of Fashion-MNIST


def memory(setting: Setting) -> list[BenchRow]:
    """A server update against the samples of a round: full kernel, matrix-free; each size in a process of its own."""
    side, hidden = (14, 16) if setting.quick else (28, 100)
    rows = []
    for N in _QUICK if setting.quick else _SIZES:
        one = update_peak(N, side, hidden, setting.device)
        note = f"{one['products']:.0f} products; {one['added'] / 1e9:.2f} GB beside the data"
        rows.append(BenchRow(f"N = {N:,}", one["seconds"], note=note, details=one))
    return rows


def update_peak(samples: int, side: int, hidden: int, device: torch.device) -> dict[str, float]:
    """Bytes at the peak and those the work added; its seconds and kernel products.

    The work: Jacobian factors of clients of 200 samples each, streamed into one; the flow to the paper's steps; all
    candidate weights.
    """
    if os.name != "posix":
        raise ConfigError("this system does not say what memory a process took")
    arguments = [str(samples), str(side), str(hidden), str(device)]
    # Not -m: the package imports this module, which would then be there twice.
    code = "from ntkfl_experiments.bench.memory import _main; _main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _main() -> None:
    from ntkfl.methods import NTKFL
    from ntkfl.models import mlp
    from ntkfl.tangent import PAPER_STEPS, concatenate, evolve, jacobian, plan_jacobian

    samples, side, hidden = (int(a) for a in sys.argv[1:4])
    device = torch.device(sys.argv[4])
    x, y = fashion(min(samples, _REAL))[:2] if side == 28 else synthetic(samples, side)
    again = torch.arange(samples) % len(x)  # images again and again, with fresh noise of a tenth
    torch.manual_seed(0)
    x, y = x[again].to(device), y[again].to(device)
    x[_REAL:] += 0.1 * torch.randn_like(x[_REAL:])
    model = mlp(side * side, hidden, 10).to(device)
    with torch.no_grad():
        f0 = model(x)
        evolve(jacobian(model, x[:50]), f0[:50], y[:50], 0.01, PAPER_STEPS)  # libraries warm up
    before, began = reset_peak(device), time.perf_counter()
    plan = plan_jacobian(model, x)
    J = concatenate([jacobian(model, client, plan=plan) for client in torch.split(x, 200)])
    evolution = evolve(J, f0, y, 0.01, PAPER_STEPS, rtol=NTKFL().tolerance)
    evolution.deltas()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, peak = time.perf_counter() - began, peak_bytes(device)
    products = evolution.statistics.evaluations
    print(json.dumps({"peak": peak, "added": peak - before, "seconds": seconds, "products": products}))


def reset_peak(device: torch.device) -> float:
    """Forget the peak so far; bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # Linux alone knows how, and may forbid it
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") if _STATUS.exists() else peak_bytes(device)


def peak_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():  # `ru_maxrss` would count the parent process as it was when it started this one
        return _status("VmHWM")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _status(key: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return 1024 * float(line.split()[1])
