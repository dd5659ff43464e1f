"""Peak memory and time of a server update, taken in a process of its own so that nothing else is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def update_peak(samples: int, side: int, hidden: int, device: torch.device) -> dict[str, float]:
    """Bytes at the peak and those the work added; its seconds, kernel products, and seconds a product.

    The work: Jacobian factors of clients of 200 samples each, streamed into one; the flow to the paper's steps; all
    candidate weights. Empty where the system does not say what memory it took.
    """
    if os.name != "posix":
        return {}
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
    from ntkfl_experiments.bench.inputs import many, synthetic

    samples, side, hidden = (int(a) for a in sys.argv[1:4])
    device = torch.device(sys.argv[4])
    x, y = many(samples, device) if side == 28 else synthetic(samples, side)
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(device)
    x, y = x.to(device), y.to(device)
    with torch.no_grad():
        f0 = model(x)
        evolve(jacobian(model, x[:50]), f0[:50], y[:50], 0.01, PAPER_STEPS)  # libraries warm up
    before, began = reset_peak(device), time.perf_counter()
    plan = plan_jacobian(model, x)
    J = concatenate([jacobian(model, client, plan=plan) for client in torch.split(x, 200)])
    built = time.perf_counter() - began
    evolution = evolve(J, f0, y, 0.01, PAPER_STEPS, rtol=NTKFL().tolerance)
    evolution.deltas()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, products = time.perf_counter() - began, evolution.statistics.evaluations
    peak = peak_bytes(device)
    figures = {"seconds": seconds, "jacobians": built, "products": products, "per_product": seconds / products}
    print(json.dumps({"peak": peak, "added": peak - before} | figures))


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
