"""All figures of the frozen head, from the features in one run: sums on `device`, everything else on many processes."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ntkfl_experiments.backbone import averaging, private, sums
from ntkfl_experiments.backbone.trials import CHOSEN_ON, CLIENTS, PARTITIONS, SEEDS, HeadTrial, Table

ONE_LABEL, SKEWED = "one label per client", "α = 0.1"
RIDGE = {"name": "sum-ridge"}
KFAC = {"name": "sum-ntk-fl", "largest": 2500}
_table: Table | None = None  # of a worker process


class Results:
    """The figures so far, on the disk after every one."""

    def __init__(self, out: Path) -> None:
        self.out, self.found = out, dict[str, Any]()
        self.began = time.perf_counter()

    def add(self, name: str, value: Any) -> Any:
        self.found[name] = value
        self.out.write_text(json.dumps(self.found, indent=None, ensure_ascii=False).replace("}, ", "},\n") + "\n")
        print(
            f"{time.perf_counter() - self.began:4.0f} s  {name}: {json.dumps(value, ensure_ascii=False)[:300]}",
            flush=True,
        )
        return value


def measure(source: Path, out: Path, device: str, jobs: int) -> None:
    results = Results(out)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _load, (source,)) as pool:
        searched = {
            (method, part): averaging.searches(method, part)
            for part in (ONE_LABEL, SKEWED)
            for method in averaging.GRIDS
        }
        gradients, curvature = private.gradient_searches(), kfac_searches()
        searching = _submit(pool, gradients + curvature + [trial for trials in searched.values() for trial in trials])

        table = Table(source)
        results.add("features", table.about)
        settings = results.add("held out / private-ridge", private.ridge_settings(table, device))
        later = _submit(pool, private.ridge_reports(settings))
        results.add("held out / rule for λ", sums.rule_for_penalty(table, device))
        later |= _submit(pool, ridge_reports(RIDGE))
        for inputs in ("last", "both"):
            for seed in SEEDS:
                results.add(f"fewer bits, {inputs} / seed {seed}", sums.quantised(table, seed, inputs, device))
        _collect(results, searching)

        reports = []
        for (method, part), trials in searched.items():
            own = averaging.best(trials, results.found)
            edge = averaging.at_the_edge(method, own.method)
            results.add(f"chosen / {method} / {part}", own.method | {"at_the_edge": edge})
            reports += averaging.reports(own)
        own = averaging.best(curvature, results.found, last=1)
        results.add("chosen / K-FAC", own.method)
        reports += kfac_reports(own.method)
        own = averaging.best(gradients, results.found, last=1)
        results.add("chosen / private-sums", own.method)
        _collect(results, later | _submit(pool, private.gradient_reports(own) + reports))
    results.add("unlearning", sums.unlearning(table, SEEDS[0]))
    print("\n".join(summarised(results.found)))


def ridge_reports(method: dict[str, Any]) -> list[HeadTrial]:
    trials = [HeadTrial("ridge", part, seed, method, 1, CLIENTS) for part in PARTITIONS for seed in SEEDS]
    trials += [HeadTrial("ridge with last-block inputs", ONE_LABEL, seed, method, 1, CLIENTS, "both") for seed in SEEDS]
    for part in (ONE_LABEL, SKEWED):
        trials += [HeadTrial("ridge, clients seen so far", part, seed, method, 10, 20) for seed in SEEDS]
    return trials


def kfac_searches() -> list[HeadTrial]:
    return [
        HeadTrial(f"K-FAC μ {mu}", SKEWED, seed, KFAC | {"mu": mu}, 3, CLIENTS, held=True)
        for mu in (1.5, 2.0, 2.5, 3.0)
        for seed in CHOSEN_ON
    ]


def kfac_reports(method: dict[str, Any]) -> list[HeadTrial]:
    trials = [HeadTrial("K-FAC", part, seed, method, 5, CLIENTS) for part in PARTITIONS for seed in SEEDS]
    both = [HeadTrial("K-FAC with last-block inputs", ONE_LABEL, seed, method, 5, CLIENTS, "both") for seed in SEEDS]
    return both + trials


def _load(source: Path) -> None:
    global _table
    torch.set_num_threads(1)
    _table = Table(source)


def _play(trial: HeadTrial) -> dict[str, Any]:
    assert _table is not None
    return _table.play(trial)


def _submit(pool: ProcessPoolExecutor, trials: list[HeadTrial]) -> dict[str, Future[dict[str, Any]]]:
    return {trial.key: pool.submit(_play, trial) for trial in trials}


def _collect(results: Results, waiting: dict[str, Future[dict[str, Any]]]) -> None:
    for key, future in waiting.items():
        results.add(key, future.result())


def summarised(found: dict[str, Any]) -> Iterator[str]:
    """Means over seeds, by what was measured."""
    groups: dict[str, list[list[float]]] = {}
    for name, value in found.items():
        if " / seed " in name and not name.startswith("held out") and "accuracy" in value:
            groups.setdefault(name.rsplit(" / ", 1)[0], []).append(value["accuracy"])
    for name, curves in groups.items():
        cells = []
        for r in (r for r in (1, 2, 3, 5, 10, 20, 50) if r <= len(curves[0])):
            values = [c[r - 1] for c in curves]
            cells.append(f"r{r} {statistics.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})")
        yield f"{name}: {', '.join(cells)}"
