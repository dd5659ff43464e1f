"""What a run will need at its peak, before it begins: better one line now than a killed process in round one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods import Method, Task

BASE_BYTES = 300 << 20  # the interpreter, torch, and a few weights


def predicted_bytes(task: Task, method: Method, sizes: Sequence[int], clients_per_round: int, probe: Tensor) -> int:
    """An estimate of a round's peak: the largest clients there are, all drawn at once."""
    counts = [max(1, round(method.subsample_rate * n)) for n in sorted(sizes)[-clients_per_round:]]
    return BASE_BYTES + method.round_bytes(task, counts, probe)


def available_bytes(device: torch.device) -> int | None:
    """What is free on the device; None where that cannot be told."""
    if device.type == "cuda":
        # What this process freed, torch keeps for it: taken on the device, and yet free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def available_for(method: Method, device: torch.device) -> int | None:
    """What is free for a round: rows that an accelerator has no room for stay in host memory (`tangent.Stack`)."""
    here = available_bytes(device)
    if here is None or device.type == "cpu" or method.shows != "rows":
        return here
    return here + (available_bytes(torch.device("cpu")) or 0)


def check_memory(needed: int, available: int | None, method: Method, clients_per_round: int) -> str:
    """A line that says what is needed; `ConfigError` where that is more than there is, with settings that would fit."""
    if available is None:
        return f"expects to need about {_giga(needed)}"
    if needed <= available:
        return f"expects to need about {_giga(needed)} of {_giga(available)}"
    share = max(0.0, 0.9 * (available - BASE_BYTES) / (needed - BASE_BYTES))
    rate, clients = share * method.subsample_rate, int(share * clients_per_round)
    ways = [f"subsample_rate {rate:.2g}"] if rate > 0 else []
    ways += [f"{clients} clients a round"] if clients else []
    ways += (
        ["a sparsity of 0.97"] if method.shows == "rows" and not getattr(method, "sparsity", 0) and not clients else []
    )
    fit = f": {' or '.join(ways)} would fit" if ways else ""
    raise ConfigError(f"a round needs about {_giga(needed)}, and {_giga(available)} are free{fit}")


def _giga(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"
