"""Tables of how fast it is, in docs/results.md and tangent.md, from the files that `ntkfl bench` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from result_tables import RESULTS, Row, table, unbroken

# (suite, its row, what is said, whether its ratio counts instead of its seconds)
BENCH = (
    ("round", "a whole round of 20 clients", "a round, full kernel, messages in bytes", False),
    ("round", "all dense, full kernel, explicit steps", "the dense path against it", True),
    ("round", "a whole round, the paper's trace kernel", "a round, the paper's trace kernel", False),
    ("round", "all dense, trace kernel, explicit steps", "the dense path against it", True),
    ("round", "2,000 explicit steps, full kernel", "2,000 explicit steps against the flow", True),
    ("kernel", "kernel alone, from the dense Jacobian", "trace kernel of 1,000 samples: dense against factors", True),
    ("networks", "CNN: the same, dense", "Jacobian and kernel of a CNN: dense against ours", True),
    ("clients", "Jacobian factors of a client", "a client's Jacobian factors, 200 samples", False),
    ("clients", "a local epoch of it, one batch of all", "its local epoch, one batch", False),
    ("clients", "a local epoch in batches of 20", "its local epoch, batches of 20", False),
    ("accuracy", "NTK-FL, defaults", "to 85 %, seed 0: NTK-FL", False),
    ("accuracy", "FedAvg", "to 85 %, seed 0: FedAvg, the fastest of eight settings", False),
)  # fmt: skip


def bench() -> str:
    rows = _read("cpu")["rows"]
    return table(["what", "2 cores"], [[said, _timed(rows, suite, what, ratio)] for suite, what, said, ratio in BENCH])


def scaling() -> str:
    """A server's update by the samples of a round: seconds, and memory beside the data."""
    lines = []
    for row in _rows("scaling"):
        if "out of core" in row["what"]:  # of code that is gone
            continue
        memory = re.search(r"([\d.]+ GB) ", row["note"])
        lines.append([row["what"].removeprefix("N = "), seconds_text(row["seconds"]), memory[1] if memory else ""])
    return table(["samples of a round", "2 cores, time", "2 cores, memory"], lines)


def tree() -> str:
    """Many clients: an aggregation tree, and one process that holds all replies."""
    rows = {r["what"]: r["details"] for r in _read("tree")["rows"]}
    counts = sorted({d["clients"] for d in rows.values()})
    lines = []
    for way in dict.fromkeys(what.partition(", ")[2] for what in rows):
        own = [rows.get(f"{count:,} clients, {way}") for count in counts]
        lines.append([f"{way}: processor time per client", *(f"{1e3 * d['cpu']:.1f} ms" if d else "" for d in own)])
        lines.append([f"{way}: peak memory", *(f"{d['peak'] / 1e6:,.0f} MB" if d else "" for d in own)])
    return table(["clients in the round", *(f"{count:,}" for count in counts)], lines)


def jacobians() -> str:
    """Kernels and products of each network: ours, and the library that is fastest of the others."""
    ways: dict[str, dict[str, Row]] = {}
    for row in _read("jacobians")["rows"]:
        network, _, library = row["what"].partition(": ")
        ways.setdefault(network, {})[library] = row
    lines = []
    for network, of in ways.items():
        name, _, task = network.partition(", ")
        ours = of.pop("ntkfl")
        best = min(of, key=lambda library: of[library]["seconds"])
        memory = of[best]["details"]["memory_ratio"]
        ratios = [f"{of[best]['ratio']:.2g}", f"{memory:.2g}"]
        lines.append([task or "kernel", name, seconds_text(ours["seconds"]), best, *ratios])
    return table(["task", "network", "ours", "fastest other", "its time to ours", "its peak to ours"], lines)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "bench" / f"{name}.json").read_text())
    return found


def _rows(suite: str) -> list[Row]:
    return [row for row in _read("cpu")["rows"] if row["suite"] == suite]


def _timed(rows: Sequence[Row], suite: str, what: str, by_ratio: bool) -> str:
    row = next((r for r in rows if r["suite"] == suite and r["what"].startswith(what)), None)
    if row is None:
        return ""
    ratio = row["ratio"]
    return (f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×") if by_ratio else seconds_text(row["seconds"])


def seconds_text(seconds: float) -> str:
    return unbroken(f"{seconds:.3g} s" if seconds >= 0.2 else f"{1e3 * seconds:.3g} ms")
