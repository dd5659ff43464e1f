"""What a run will need at its peak, before it begins: better one line now than a killed process in round one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.methods import NTKFL, Method, Task
from ntkfl.privacy.sparsify import kept
from ntkfl.tangent import jacobian_numbers, working_numbers
from ntkfl.tangent.build import FORMS
from ntkfl.tangent.evolution import KERNEL_BYTES

_BASE = 300 << 20  # the interpreter, torch, and a few weights


def predicted_bytes(task: Task, method: Method, sizes: Sequence[int], clients_per_round: int, probe: Tensor) -> int:
    """An estimate of a round's peak: the largest clients there are, all drawn at once.

    NTK-FL holds the round's Jacobian and a few copies of one client's part on its way, the working memory of that
    client's differentiation, and a few arrays [S, N, d2] and [S, d]; the trace kernel twice its [N, N]. Averaging
    holds several vectors [d] a client, and what its samples need on the way through the network.
    """
    item, d, d2 = task.like.element_size(), task.like.numel(), task.outputs
    counts = [max(1, round(method.subsample_rate * n)) for n in sorted(sizes)[-clients_per_round:]]
    rows = sum(counts)
    if not isinstance(method, NTKFL):
        return _BASE + item * (8 * clients_per_round * d + 3 * rows * _activations(task, probe))
    form = method.codec if method.codec in FORMS else "auto"
    numbers = d2 * d if form == "dense" else jacobian_numbers(task.model, probe, form)
    stored = item * numbers
    if method.sparsity:  # values and positions, and both in the order of rows and of columns
        stored = 2 * (item + 4) * kept(method.sparsity, d2 * d)
    steps = len(method.steps or ())
    total = (rows + 4 * max(counts)) * stored + item * (
        working_numbers(task.model, probe, form) + max(counts) * numbers
    )
    total += 8 * rows * d2 * (2 * steps + 16) + 3 * item * steps * d
    if method.kernel == "trace":
        total += 2 * min(item * rows * rows, KERNEL_BYTES)
    return _BASE + total


def _activations(task: Task, probe: Tensor) -> int:
    """Numbers a sample leaves behind in the network's modules, as a backward pass needs them."""
    met = [probe[:1].numel()]

    def count(_: nn.Module, __: object, out: object) -> None:
        met.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))

    leaves = [module for module in task.model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(count) for module in leaves]
    try:
        task.predict(task.like, probe[:1])
    finally:
        for handle in handles:
            handle.remove()
    return sum(met)


def available_bytes(device: torch.device) -> int | None:
    """What is free on the device; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_memory(needed: int, available: int | None, method: Method, clients_per_round: int) -> str:
    """A line that says what is needed; `ConfigError` where that is more than there is, with settings that would fit."""
    if available is None:
        return f"expects to need about {_giga(needed)}"
    if needed <= available:
        return f"expects to need about {_giga(needed)} of {_giga(available)}"
    share = max(0.0, 0.9 * (available - _BASE) / (needed - _BASE))
    rate, clients = share * method.subsample_rate, int(share * clients_per_round)
    ways = [f"subsample_rate {rate:.2g}"] if rate > 0 else []
    ways += [f"{clients} clients a round"] if clients else []
    ways += ["a sparsity of 0.97"] if isinstance(method, NTKFL) and not method.sparsity and not clients else []
    fit = f": {' or '.join(ways)} would fit" if ways else ""
    raise ConfigError(f"a round needs about {_giga(needed)}, and {_giga(available)} are free{fit}")


def _giga(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"
