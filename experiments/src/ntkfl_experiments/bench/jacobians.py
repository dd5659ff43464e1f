"""Kernels of several networks, and products with them, by this package and by other libraries: time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ntkfl_experiments.bench.contenders import NETWORKS, PRODUCTS, TASKS
from ntkfl_experiments.bench.rows import BenchRow, Setting

_SAMPLES = {"MLP": 200, "CNN": 100, "ResNet": 16, "wide ResNet": 8, "transformer": 50, "wide transformer": 20}
_ROUNDS = 4
_LIMITS = {
    "kernel": {
        "torch.func": "stores every derivative",
        "BackPACK": "chains of layers that it knows",
        "curvlinops": "no sample-wise rows: a product over the batch per output and sample",
        "neural-tangents": "networks in JAX",
    },
    "products": {
        "torch.func": "two passes over the network per product",
        "curvlinops": "two passes over the network per product",
        "JAX": "networks in JAX",
    },
}


def jacobians(setting: Setting) -> list[BenchRow]:
    """Trace kernel, and products with the full kernel, beside torch.func, BackPACK, curvlinops, neural-tangents.

    Processor time, the Jacobian included. Each in a process of its own, with as many threads as PyTorch takes; a
    library that is not installed has no row, and the note of ours names it.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            for network in NETWORKS:
                samples = 4 if setting.quick else _SAMPLES[network]
                found = _rounds(task, network, samples, setting.quick, Path(folder))
                refusals = [f"{way} cannot: {answer['cannot']}" for way, answer in found.items() if "cannot" in answer]
                missing = ", ".join(way for way, answer in found.items() if "missing" in answer)
                about = "; ".join([f"N={samples:,}", *refusals, *([f"not installed: {missing}"] if missing else [])])
                rows += [
                    _row(task, network, way, answer, found["ntkfl"], about)
                    for way, answer in found.items()
                    if "seconds" in answer
                ]
    return rows


def _rounds(task: str, network: str, samples: int, quick: bool, folder: Path) -> dict[str, dict[str, Any]]:
    """The best of several rounds, each library in turn, so that other work on the machine hits all of them alike."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(1 if quick else _ROUNDS):
        for way in TASKS[task]:
            # One that is far behind would take most of the time, and no round brings it back.
            if number and ("seconds" not in found[way] or found[way]["seconds"] > 20 * found["ntkfl"]["seconds"]):
                continue
            answer = in_a_process(task, way, network, samples, quick, folder / way)
            if number:
                answer |= {name: min(answer[name], found[way][name]) for name in ("seconds", "added")}
            found[way] = answer
    return found


def in_a_process(task: str, way: str, network: str, samples: int, quick: bool, target: Path) -> dict[str, Any]:
    # Not -m: the package imports the module, which would then be there twice.
    code = "from ntkfl_experiments.bench.contenders import main; main()"
    target = target.with_suffix(".npy")
    command = [sys.executable, "-c", code, task, way, network, str(samples), str(quick), str(target)]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | ({"result": np.load(target).astype(np.float64)} if "seconds" in answer else {})


def _row(task: str, network: str, way: str, found: dict[str, Any], mine: dict[str, Any], about: str) -> BenchRow:
    what = f"{network}: {way}" if task == "kernel" else f"{network}, {PRODUCTS} products: {way}"
    megabytes = found["added"] / 1e6
    details = {"peak_megabytes": megabytes}
    if found is mine:
        return BenchRow(what, found["seconds"], 1.0, note=f"peak {megabytes:,.0f} MB; {about}", details=details)
    details["memory_ratio"] = found["added"] / max(mine["added"], 1.0)
    return BenchRow(
        what,
        found["seconds"],
        found["seconds"] / mine["seconds"],
        difference=float(np.linalg.norm(found["result"] - mine["result"]) / np.linalg.norm(mine["result"])),
        note=f"peak {megabytes:,.0f} MB, {details['memory_ratio']:,.3g} times ours; {_LIMITS[task][way]}",
        details=details,
    )
