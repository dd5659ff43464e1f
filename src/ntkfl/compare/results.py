"""What a comparison found: rows of a table, with mean and spread over seeds, and the files they are kept in."""

from __future__ import annotations

import csv
import io
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ntkfl.atomic import write_atomically
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.version import __version__


@dataclass(frozen=True)
class Reached:
    """Rounds and bytes to a target, one number per seed; None for a seed that did not get there."""

    target: float
    rounds: list[int | None]
    uplink_mib: list[float | None]
    downlink_mib: list[float | None]


@dataclass(frozen=True)
class Row:
    """One method: curves are one list a seed."""

    label: str
    setting: dict[str, Any]
    seeds: list[int]
    length: int
    accuracy: list[list[float]]  # of the weights the run reports
    last_accuracy: list[list[float]]  # of each round's own weights, without averaging
    uplink_mib: list[list[float]]  # cumulative
    seconds: list[list[float]]  # cumulative
    reached: list[Reached]
    reached_unaveraged: list[Reached]
    failed: list[str]
    devices: list[str]  # where the seconds were measured
    steps: list[list[float | None]]  # t that NTK-FL chose


def summarise(comparison: Comparison, label: str, setting: dict[str, Any], cells: Sequence[Cell]) -> Row:
    """A method's cells, one a seed, as a row."""
    histories = [cell.history() for cell in cells]
    reported = [[float(r["test_accuracy"]) for r in h] for h in histories]
    last = [[float(r["last_accuracy"]) for r in h] for h in histories]
    uplink, downlink = (
        [_cumulative([r[f"{way}_bytes"] / 2**20 for r in h]) for h in histories] for way in ("uplink", "downlink")
    )
    times = [c.folder.records("timings.jsonl")[: len(h)] for c, h in zip(cells, histories, strict=True)]
    return Row(
        label,
        setting,
        [cell.config.seed for cell in cells],
        cells[0].config.rounds,
        reported,
        last,
        uplink,
        [_cumulative([t["seconds"] for t in seconds]) for seconds in times],
        [_reached(t, reported, uplink, downlink) for t in comparison.targets],
        [_reached(t, last, uplink, downlink) for t in comparison.targets],
        [cell.failed for cell in cells],
        sorted({t["device"] for seconds in times for t in seconds}),
        [[r.get("steps") for r in h] for h in histories],
    )


def _reached(target: float, curves: Sequence[Sequence[float]], *ways: Sequence[Sequence[float]]) -> Reached:
    firsts = [next((i for i, a in enumerate(curve) if a >= target), None) for curve in curves]
    sent = ([None if i is None else one[i] for i, one in zip(firsts, way, strict=True)] for way in ways)
    return Reached(target, [None if i is None else i + 1 for i in firsts], *sent)


def _cumulative(values: Sequence[float]) -> list[float]:
    total, out = 0.0, []
    for value in values:
        total += value
        out.append(total)
    return out


def spread(values: Sequence[float | None], digits: int = 0) -> str:
    """'24 ± 3' over seeds, '24' for one; seeds that did not arrive are counted in words."""
    there = [v for v in values if v is not None]
    if not there:
        return ""
    text = f"{statistics.mean(there):.{digits}f}"
    if len(there) > 1:
        text += f" ± {statistics.stdev(there):.{digits}f}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"


def reached_text(reached: Reached, length: int) -> str:
    return spread(reached.rounds) or f"not in {length}"


def bytes_text(reached: Reached) -> str:
    """MiB up and down to a target and their sum, means over the seeds that got there: '48 + 21 = 69'."""
    ways = [[v for v in way if v is not None] for way in (reached.uplink_mib, reached.downlink_mib)]
    if not all(ways):
        return ""
    means = [statistics.mean(way) for way in ways]
    digits = 0 if sum(means) >= 10 else 1 if sum(means) >= 1 else 2
    return " + ".join(f"{mean:.{digits}f}" for mean in means) + f" = {sum(means):.{digits}f}"


def accuracy_at(row: Row, round: int | None) -> str:
    """Accuracy at a round, or at each seed's last, over the seeds that got so far: '84.2 ± 0.3', in percent."""
    reached = [curve for curve in row.accuracy if curve and len(curve) >= (round or 1)]
    return spread([100 * curve[-1 if round is None else round - 1] for curve in reached], 1)


def columns(comparison: Comparison, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The table as text: headers, and a list of cells a method. The last round is always shown: by its number, or as
    `last` where runs differ in length.
    """
    lengths = {len(curve) for row in rows for curve in row.accuracy if curve} or {0}
    shown: dict[str, int | None] = {f"% r{r}": r for r in comparison.show_rounds if r <= max(lengths)}
    shown |= {f"% r{max(lengths)}": max(lengths)} if len(lengths) == 1 else {"% last": None}
    headers = ["method", *shown]
    for target in comparison.targets:
        headers += [f"rounds to {target:.0%}", f"MiB up + down to {target:.0%}"]
    headers.append("s/round")
    body = []
    for row in rows:
        cells = [row.label, *(accuracy_at(row, r) for r in shown.values())]
        for reached in row.reached:
            cells += [reached_text(reached, row.length), bytes_text(reached)]
        # The median: a worker's first round also pays for its start.
        each = [statistics.median(b - a for a, b in pairwise([0.0, *s])) for s in row.seconds if s]
        body.append([*cells, f"{statistics.mean(each):.2f}" if each else ""])
    return headers, body


def setting_text(row: Row) -> str:
    """The options a row's runs had, in words."""
    options = ", ".join(f"{name} {_short(value)}" for name, value in row.setting.items() if name != "name")
    return options or "defaults"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"{value[0]:g} … {value[-1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def search_lines(comparison: Comparison, searches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each method that was searched: the values tried, and the choice."""
    lines = []
    for label, found in searches.items():
        if not found["searched"]:
            continue
        tried = "; ".join(
            f"{name} in {{{', '.join(f'{v:g}' for v in values)}}}" for name, values in found["searched"].items()
        )
        choice = ", ".join(f"{name} {value:g}" for name, value in found["chosen"].items())
        edge = f", still at the edge in {', '.join(found['still_at_edge'])}" if found["still_at_edge"] else ""
        lines.append(
            f"{label}: searched {tried} on {comparison.search.hold_out} held-out clients; chose {choice}{edge}"
        )
    return lines


def markdown(comparison: Comparison, rows: Sequence[Row], searches: Mapping[str, Mapping[str, Any]]) -> str:
    headers, body = columns(comparison, rows)
    for row, cells in zip(rows, body, strict=True):
        cells.append(setting_text(row))
    lines = [[*headers, "setting"], ["---"] * (len(headers) + 1), *body]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return table + "".join(f"\n- {line}" for line in search_lines(comparison, searches)) + "\n"


def write(
    folder: Path, comparison: Comparison, rows: Sequence[Row], searches: Mapping[str, Mapping[str, Any]], command: str
) -> None:
    """results.json (everything), results.csv (one line per method, seed and round) and table.md (for people)."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": comparison.name,
        "command": command,
        "ntkfl": __version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "comparison": comparison.model_dump(mode="json"),
        "searches": dict(searches),
        "rows": [_rounded(asdict(row)) for row in rows],
    }
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(["method", "seed", "round", "accuracy", "accuracy_unaveraged", "uplink_mib", "seconds"])
    for row in rows:
        curves = zip(row.seeds, row.accuracy, row.last_accuracy, row.uplink_mib, row.seconds, strict=True)
        for seed, *series in curves:
            for i, values in enumerate(zip(*series, strict=True)):
                writer.writerow([row.label, seed, i + 1, *(f"{v:.5g}" for v in values)])
    write_atomically(folder / "results.json", (json.dumps(document) + "\n").encode())
    write_atomically(folder / "table.md", markdown(comparison, rows, searches).encode())
    write_atomically(folder / "results.csv", lines.getvalue().encode())


def _rounded(value: Any) -> Any:
    """Five significant digits: enough for any figure, and a file small enough to keep."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return value
