"""Accuracy against leakage: many configurations, each trained and attacked, in one table.

A cell is one configuration and seed: trained to the last round, some rounds on the way listened to, the last one
attacked. Cells are kept by content, so that an interrupted table goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ntkfl.atomic import replacing, write_atomically
from ntkfl.audit import labels, linkage, membership, projection, reconstruction, sums
from ntkfl.audit.capture import Capture, captures
from ntkfl.audit.finding import Finding
from ntkfl.compare.spec import Comparison, Entry
from ntkfl.data import Federated
from ntkfl.federation.build import build_method, load_data, spelled_out
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import Record
from ntkfl.methods.inspection import Participation
from ntkfl.privacy.accounting import Guarantee
from ntkfl.processes import Pool
from ntkfl.version import __version__

# Kinds of methods, by what clients send; all others send updates.
_FAMILIES = {"ntk-fl": "rows", "cp-ntk-fl": "rows", "sum-ntk-fl": "sums", "private-sums": "sums"}
LISTENED = 4  # rounds whose rows are kept for links across rounds
# Columns of the table, and the finding each shows: (part of its name, role, measure); the first that is there.
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "picture": (("analytic", "aggregator", "SSIM"), ("projection, no", "aggregator", "SSIM")),
    "picture, with a client": (("analytic", "aggregator+client", "SSIM"), ("analytic", "aggregator", "SSIM")),
    "label": (("labels of rows", "aggregator", "accuracy"),),
    "class mix": (("class mix", "aggregator", "overlap"), ("class counts by gradient", "aggregator", "overlap")),
    "rows linked": (("within a round", "aggregator", "accuracy"),),
    "sender": (("across rounds", "aggregator", "accuracy"),),
    "member, by loss": (
        ("membership by loss, the round", "aggregator", "advantage"),
        ("membership by loss, the round", "outsider", "advantage"),
    ),
    "member, by rows": (("looking rows up", "aggregator", "advantage"),),
    "member, by sums": (
        ("membership by input factor, sums", "aggregator", "advantage"),
        ("membership by gradient, sums", "aggregator", "advantage"),
    ),
    "member, by alignment": (("membership by alignment, sums", "aggregator", "advantage"),),
}


@dataclass(frozen=True)
class TradeoffRow:
    """One configuration over its seeds: [seed] of each number; a leak is (value, guess), or None where not attacked."""

    label: str
    method: dict[str, Any]
    seeds: tuple[int, ...]
    accuracy: tuple[float, ...]
    uplink_mib: tuple[float, ...]
    leaks: dict[str, tuple[tuple[float, float], ...]]
    epsilon: tuple[tuple[str, float], ...]  # whom it is against, and ε, at δ = 1e-5; of the first seed
    assumptions: tuple[str, ...]

    def finding(self, column: str) -> Finding | None:
        """A column as one finding over seeds."""
        pairs = self.leaks.get(column)
        if not pairs:
            return None
        values, guesses = zip(*pairs, strict=True)
        return Finding(column, "aggregator", column, "", tuple(values), statistics.fmean(guesses))


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
    rows = int(min(record.get("samples", 0) for record in history))
    cohort, rounds = config.clients_per_round, len(history)
    method = build_method(config.method)  # the capture's own is without masks
    return method.guarantees(Participation(capture.task.outputs, times, rows, cohort, clients, rounds, simulated=True))


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
    return [_row(entry, seeds, [found[entry.label, seed] for seed in seeds]) for entry in comparison.methods]


def _path(cache: Path, config: RunConfig) -> Path:
    """A cell's file, by all that determines it."""
    text = json.dumps(spelled_out(config), sort_keys=True)
    return cache / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _work(config: RunConfig, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    method = {k: v for k, v in config.method.items() if k in ("name", "shared_fraction")}
    data = _prepared(config.model_copy(update={"method": method}).model_dump_json())
    write_atomically(_path(cache, config), json.dumps(measure(config, data)).encode())


@lru_cache(maxsize=1)
def _prepared(config: str) -> Federated:
    """Equal data are prepared once by each worker; of a method's options only those are in it that change them."""
    return load_data(RunConfig.model_validate_json(config))


def verdict(row: TradeoffRow, rows: Sequence[TradeoffRow], column: str) -> str:
    """stopped, reduced or unchanged against the first row of the same kind of method; "" for that row itself."""
    family = [r for r in rows if _family(r) == _family(row)]
    mine, first = row.finding(column), family[0].finding(column)
    if mine is None or first is None or row is family[0]:
        return ""
    return mine.against(first).verdict or ""


def markdown(rows: Sequence[TradeoffRow]) -> str:
    """The table for people: means over seeds, each leak with its verdict."""
    header = ["configuration", "accuracy", "MiB up", "ε (simulated)", *COLUMNS]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        cells = [row.label, _percent(row.accuracy), f"{statistics.fmean(row.uplink_mib):.0f}", _epsilon(row)]
        for column in COLUMNS:
            found = row.finding(column)
            said = verdict(row, rows, column)
            spread = f" ± {found.spread:.2f}" if found is not None and len(found.values) > 1 else ""
            text = "" if found is None else f"{found.mean:.2f}{spread} (guess {found.guess:.2f})"
            cells.append(f"{text} {said}".strip() or "–")
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(folder: Path, comparison: Comparison, rows: Sequence[TradeoffRow], command: str) -> None:
    """results.json, table.md and tradeoff.png."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "command": command,
        "ntkfl": __version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "comparison": comparison.model_dump(mode="json"),
        "delta": 1e-5,
        "rows": [_plain(row, rows) for row in rows],
    }
    write_atomically(folder / "results.json", (json.dumps(document, indent=1) + "\n").encode())
    seeds = ", ".join(map(str, comparison.seeds))
    about = f"`{command}`; {comparison.data.dataset}, round {comparison.rounds}, seeds {seeds}; ± is over seeds; "
    about += "ε are of simulations, whose noise follows from a seed.\n\n"
    write_atomically(folder / "table.md", (about + markdown(rows)).encode())
    plot(rows, folder / "tradeoff.png", f"{comparison.data.dataset}, round {comparison.rounds}")


def plot(rows: Sequence[TradeoffRow], path: Path, title: str) -> None:
    """Accuracy against the four largest leaks, each as the part of the way from a guess to everything."""
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    for axis, column in zip(figure.subplots(2, 2).flat, _largest_leaks(rows), strict=False):
        for number, row in enumerate(rows, 1):
            found = row.finding(column)
            if found is None:
                continue
            colour = "#0072B2" if _family(row) == "rows" else "#D55E00"
            axis.scatter(found.success, statistics.fmean(row.accuracy), color=colour, s=28)
            axis.annotate(
                str(number), (found.success, statistics.fmean(row.accuracy)), (4, 4), textcoords="offset points"
            )
        axis.set(title=column, xlim=(-0.03, 1.05), xlabel="leak: 0 a guess, 1 everything", ylabel="test accuracy")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    key = "\n".join(f"{i}  {row.label}" for i, row in enumerate(rows, 1))
    figure.suptitle(title)
    figure.text(1.01, 0.5, key, va="center", fontsize=9)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=110, bbox_inches="tight")


def _largest_leaks(rows: Sequence[TradeoffRow], most: int = 4) -> list[str]:
    """The columns that succeed best somewhere, among those tried on the most configurations; in the table's order."""
    found = {column: [f.success for row in rows if (f := row.finding(column))] for column in COLUMNS}
    ranked = sorted((c for c in COLUMNS if found[c]), key=lambda c: (-len(found[c]), -max(found[c])))
    return [column for column in COLUMNS if column in ranked[:most]]


def _row(entry: Entry, seeds: Sequence[int], cells: Sequence[Mapping[str, Any]]) -> TradeoffRow:
    leaks = {}
    for column, wanted in COLUMNS.items():
        pairs = [_pick(cell["findings"], wanted) for cell in cells]
        if all(pair is not None for pair in pairs):
            leaks[column] = tuple(pair for pair in pairs if pair is not None)
    promised = cells[0]["guarantees"]
    return TradeoffRow(
        entry.label,
        entry.method,
        tuple(seeds),
        tuple(cell["accuracy"] for cell in cells),
        tuple(cell["uplink_mib"] for cell in cells),
        leaks,
        tuple((g["against"], g["epsilon"]) for g in promised),
        tuple(dict.fromkeys(text for g in promised for text in g["assumptions"])),
    )


def _pick(
    findings: Sequence[Mapping[str, Any]], wanted: tuple[tuple[str, str, str], ...]
) -> tuple[float, float] | None:
    """(value, guess) of the first finding that one of `wanted` describes; an advantage may need a client's help."""
    for name, role, measured in wanted:
        for f in findings:
            if name not in f["attack"] or f["role"] not in (role, f"{role}+client"):
                continue
            if f["role"] != role and measured != "advantage":
                continue
            if f["measure"].endswith(measured):
                return f["mean"], f["guess"]
            if f"{measured}, 0 pairs" in f["details"]:
                return f["details"][f"{measured}, 0 pairs"], f["details"][f"{measured} of a guess"]
    return None


def _family(row: TradeoffRow) -> str:
    return _FAMILIES.get(row.method["name"], "updates")


def _percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def _epsilon(row: TradeoffRow) -> str:
    """One round's, and the least over the run."""
    if not row.epsilon:
        return "none"
    unit = "client" if _family(row) == "updates" else "record"
    if "one round" not in row.epsilon[0][0]:
        return f"{row.epsilon[0][1]:.3g} per {unit} in all"
    one, *rest = (f"{e:.3g}" if math.isfinite(e) else "∞" for _, e in row.epsilon)
    least = min((e for _, e in row.epsilon[1:]), default=math.inf)
    return f"{one} per {unit} and round" + (f", {least:.3g} in all" if rest and math.isfinite(least) else "")


def _plain(row: TradeoffRow, rows: Sequence[TradeoffRow]) -> dict[str, Any]:
    verdicts = {column: verdict(row, rows, column) for column in COLUMNS if row.finding(column) is not None}
    return {**row.__dict__, "verdicts": {column: said for column, said in verdicts.items() if said}}
