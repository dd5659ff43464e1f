"""Accuracy against leakage: many configurations, each trained and attacked, in one table.

A cell is one configuration and seed: trained to the last round, some rounds on the way listened to, the last one
attacked. Cells are kept by content, so that an interrupted table goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ntkfl.atomic import write_atomically
from ntkfl.audit import labels, linkage, membership, projection, reconstruction, sums
from ntkfl.audit.capture import Capture, captures
from ntkfl.audit.finding import Finding
from ntkfl.audit.tradeoff_table import TradeoffRow, row_of
from ntkfl.compare.spec import Comparison
from ntkfl.data import Federated
from ntkfl.federation.build import build_method, load_data, spelled_out
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import Record
from ntkfl.methods.inspection import Participation
from ntkfl.privacy.accounting import Guarantee
from ntkfl.processes import Pool

LISTENED = 4  # rounds whose rows are kept for links across rounds


def measure(config: RunConfig, data: Federated) -> dict[str, Any]:
    """Train, listen, attack: a cell's numbers, all plain."""
    history: list[Record] = []
    every = max(1, config.rounds // (LISTENED - 1))
    rounds = sorted({max(1, config.rounds - i * every) for i in range(LISTENED)})
    heard = captures(config, rounds, data=data, on_round=lambda record, _: history.append(record))
    last, earlier = heard[rounds[-1]], [heard[n] for n in rounds[:-1]]
    found = attacks(last, earlier, config.seed)
    guarantees = guarantees_of(last, history, config, len(data))
    return {
        "accuracy": history[-1]["test_accuracy"],
        "uplink_mib": sum(r["uplink_bytes"] for r in history) / 2**20,
        "findings": [f.dump() for f in found],
        "guarantees": [{"epsilon": g.epsilon, "against": g.against, "assumptions": g.assumptions} for g in guarantees],
    }


def attacks(last: Capture, earlier: Sequence[Capture], seed: int) -> list[Finding]:
    """The attacks of the table. Deep leakage is left out: where the analytic attack applies it is the stronger. Of a
    secure sum the aggregator is who sees totals alone, and its client a minority of them.
    """
    of_sums = sums.attack(last, seed, quick=True, sizes={}) if last.method.shows == "sums" or last.masked else []
    if last.masked:
        held = {"secure-sum": "aggregator", "secure-sum+clients": "aggregator+client"}
        return [replace(found, role=held.get(found.role, found.role)) for found in of_sums]
    return [
        *of_sums,
        *reconstruction.analytic(last, seed, count=20),
        *projection.attack(last, seed, pairs=(0,)),
        *labels.attack(last, seed),
        *linkage.attack(last, seed, earlier=earlier),
        *membership.attack(last, seed),
    ]


def guarantees_of(capture: Capture, history: Sequence[Record], config: RunConfig, clients: int) -> list[Guarantee]:
    """What noise is worth in this run: `times` counts the client that took part most often."""
    times = max(Counter(i for record in history for i in record["clients"]).values())
    cohort, rounds = config.clients_per_round, len(history)
    method = build_method(config.method)  # the capture's own is without masks
    return method.guarantees(Participation(times, cohort, clients, rounds, simulated=True))


def run(
    comparison: Comparison,
    cache: Path,
    say: Callable[[str], None] = print,
    workers: int = 1,
    planned: Callable[[int], None] = lambda _: None,
) -> list[TradeoffRow]:
    """Every cell of the table, kept in `cache` as it is finished; rows in the order of the file. With `workers`, so
    many cells at a time, each in a process of its own. `planned` hears how many there are to do, `say` of each.
    """
    cells = [
        (entry, seed, comparison.run(entry, seed, {})) for seed in comparison.seeds for entry in comparison.methods
    ]
    missing = [
        (f"{entry.label}, seed {seed}", config) for entry, seed, config in cells if not _path(cache, config).exists()
    ]
    planned(len(missing))
    if workers == 1:
        for label, config in missing:
            _work(config, cache)
            say(label)
    elif missing:
        pool = Pool(workers)
        try:
            waiting = {pool.submit(_work, config, cache): label for label, config in missing}
            for done in as_completed(waiting):
                done.result()
                say(waiting[done])
        except BaseException:  # a cell is written whole or not at all
            pool.close(at_once=True)
            raise
        pool.close()
    found = {(entry.label, seed): json.loads(_path(cache, config).read_text()) for entry, seed, config in cells}
    seeds = comparison.seeds
    return [row_of(entry, seeds, [found[entry.label, seed] for seed in seeds]) for entry in comparison.methods]


def _path(cache: Path, config: RunConfig) -> Path:
    """A cell's file, by all that determines it."""
    text = json.dumps(spelled_out(config), sort_keys=True)
    return cache / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _work(config: RunConfig, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    method = {"name": config.method["name"]}
    data = _prepared(config.model_copy(update={"method": method}).model_dump_json())
    write_atomically(_path(cache, config), json.dumps(measure(config, data)).encode())


@lru_cache(maxsize=1)
def _prepared(config: str) -> Federated:
    """Equal data are prepared once by each worker; of a method's options only those are in it that change them."""
    return load_data(RunConfig.model_validate_json(config))
