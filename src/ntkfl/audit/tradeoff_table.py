"""The table of accuracy against leakage: its columns, its verdicts, its picture and its files."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ntkfl.atomic import replacing, write_atomically
from ntkfl.audit.finding import Finding
from ntkfl.compare.spec import Comparison, Entry
from ntkfl.version import __version__

# Kinds of methods, by what clients send; all others send updates.
_FAMILIES = {"ntk-fl": "rows", "cp-ntk-fl": "rows", "sum-ntk-fl": "sums", "private-sums": "sums"}
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


def row_of(entry: Entry, seeds: Sequence[int], cells: Sequence[Mapping[str, Any]]) -> TradeoffRow:
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
