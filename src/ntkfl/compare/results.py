"""What a comparison found: rows of a table, with mean and spread over seeds, and the files they are kept in."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ntkfl.atomic import write_atomically
from ntkfl.compare.captions import caption, options
from ntkfl.compare.search import Searches, in_words
from ntkfl.compare.spec import ALONE, Comparison
from ntkfl.compare.trials import Cell
from ntkfl.devices import processor_name
from ntkfl.progress import percent, plural
from ntkfl.version import __version__, commit

NOTHING_CHOSEN = "nothing chosen: every run of its search failed"
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t at 0.975 for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Reached:
    """Rounds and bytes to a target, one number per seed; None for a seed that did not get there."""

    target: float
    rounds: list[int | None]
    uplink_mib: list[float | None]
    downlink_mib: list[float | None]


@dataclass(frozen=True)
class Row:
    """One method: curves are one list per seed. Where its search chose nothing, `failed` says so."""

    label: str
    setting: dict[str, Any]
    seeds: list[int]
    length: int
    average: float | None  # as the runs resolved it; None where none has a second round for it to matter
    accuracy: list[list[float]]  # of the weights the run reports
    last_accuracy: list[list[float]]  # of each round's own weights, without averaging
    uplink_mib: list[list[float]]  # cumulative
    downlink_mib: list[list[float]]  # cumulative
    seconds: list[list[float]]  # cumulative
    reached: list[Reached]
    failed: list[str]
    devices: list[str]  # where the seconds were measured
    steps: list[list[float | None]]  # t that NTK-FL chose

    def lines(self) -> list[dict[str, Any]]:
        """A seed each, by what it ended with: for a data frame."""
        ends = ("accuracy", "uplink_mib", "downlink_mib", "seconds")
        return [
            {"method": self.label, "seed": seed, "rounds": len(self.accuracy[i])}
            | {name: next(reversed(getattr(self, name)[i]), None) for name in ends}
            | {f"rounds to {100 * reached.target:g}%": reached.rounds[i] for reached in self.reached}
            | {"failed": self.failed[i]}
            for i, seed in enumerate(self.seeds)
        ]

    def finished(self, curves: list[list[float]]) -> list[list[float]]:
        """Of these curves those of seeds whose run did not fail."""
        return [curve for curve, why in zip(curves, self.failed, strict=True) if not why]


def summarise(comparison: Comparison, label: str, setting: dict[str, Any], cells: Sequence[Sequence[Cell]]) -> Row:
    """A method's runs as a row: of each seed one run, or several whose curves are averaged, as of clients that each
    train alone, and send nothing. Where a seed has no run, the method's search chose nothing.
    """
    records = [[cell.rounds() for cell in group] for group in cells]

    def curves(name: str) -> list[list[float]]:
        """A number's mean over each seed's runs, round by round, as far as all of them came."""
        return [[statistics.fmean(r[name] for r in same) for same in zip(*runs)] for runs in records]  # noqa: B905

    def summed(name: str, weight: float = 1) -> list[list[float]]:
        """The same from the first round to each, that round included."""
        return [[*accumulate(weight * number for number in curve)] for curve in curves(name)]

    averaged = (cell.folder for group in cells for cell in group if len(cell.history()) > 1)
    mib = 0 if label == ALONE else 1 / 2**20
    accuracy, up, down = curves("test_accuracy"), summed("uplink_bytes", mib), summed("downlink_bytes", mib)
    return Row(
        label=label,
        setting=setting,
        seeds=list(comparison.seeds),
        length=next((cell.config.rounds for group in cells for cell in group), comparison.rounds),
        average=next((folder.config()["method"]["average"] for folder in averaged), None),
        accuracy=accuracy,
        last_accuracy=curves("last_accuracy"),
        uplink_mib=up,
        downlink_mib=down,
        seconds=summed("seconds"),
        reached=[_reached(target, accuracy, up, down) for target in comparison.targets],
        failed=[
            next((cell.failed for cell in group if cell.failed), "" if group else NOTHING_CHOSEN) for group in cells
        ],
        devices=sorted({record["device"] for runs in records for run in runs for record in run}),
        steps=[[record.get("steps") for run in runs[:1] for record in run] for runs in records],
    )


def _reached(target: float, curves: Sequence[Sequence[float]], *ways: Sequence[Sequence[float]]) -> Reached:
    """The first round at the target of each seed's curve, and the bytes sent until then."""
    rounds = [next((i for i, a in enumerate(curve, 1) if a >= target), None) for curve in curves]
    sent = ([None if r is None else one[r - 1] for r, one in zip(rounds, way, strict=True)] for way in ways)
    return Reached(target, rounds, *sent)


# -- The table as text -------------------------------------------------------------------------------------------------


def columns(comparison: Comparison, rows: Sequence[Row]) -> dict[str, list[str]]:
    """The table: a cell for each row below each heading. The last round is always shown: by its number, or as `last`
    where runs differ in length.
    """
    lengths = {len(curve) for row in rows for curve in row.finished(row.accuracy) if curve} or {0}
    shown: dict[str, int | None] = {f"% r{r}": r for r in comparison.show_rounds if r <= max(lengths)}
    shown |= {f"% r{max(lengths)}": max(lengths)} if len(lengths) == 1 else {"% last": None}
    table = {"method": [row.label for row in rows]}
    for heading, round in shown.items():  # over the seeds that got so far
        at = slice(-1, None) if round is None else slice(round - 1, round)
        table[heading] = [spread([100 * a for curve in row.accuracy for a in curve[at]], 1) for row in rows]
    for i, target in enumerate(comparison.targets):
        table[f"rounds to {100 * target:g}%"] = [rounds_text(row, row.reached[i]) for row in rows]
        table[f"MiB up + down to {100 * target:g}%"] = [bytes_text(row.reached[i]) for row in rows]
    # The median: a worker's first round also pays for its start.
    rounds = [[[b - a for a, b in pairwise([0.0, *curve])] for curve in row.seconds if curve] for row in rows]
    table["s/round"] = [f"{statistics.mean(map(statistics.median, each)):.2f}" if each else "" for each in rounds]
    return table | {"setting": [setting(comparison, row) for row in rows]}


def spread(values: Sequence[float | None], digits: int = 0) -> str:
    """'24 ± 3' over seeds, '24' for one; seeds that did not arrive are counted in words."""
    there = [v for v in values if v is not None]
    if not there:
        return ""
    text = f"{statistics.mean(there):.{digits}f}"
    if len(there) > 1:
        text += f" ± {statistics.stdev(there):.{digits}f}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"


def rounds_text(row: Row, reached: Reached) -> str:
    """Rounds to a target. Where no seed's run was finished, none can be said not to get there."""
    nowhere = "failed" if all(row.failed) else f"not in {row.length}"
    return spread(reached.rounds, int(len(reached.rounds) > 1)) or nowhere


def bytes_text(reached: Reached) -> str:
    """MiB up and down to a target and their sum, means over the seeds that got there: '48 + 21 = 69'."""
    ways = [[v for v in way if v is not None] for way in (reached.uplink_mib, reached.downlink_mib)]
    if not all(ways):
        return ""
    means = [statistics.mean(way) for way in ways]
    digits = 0 if sum(means) >= 10 else 1 if sum(means) >= 1 else 3
    shown = [round(mean, digits) for mean in means]  # as shown, so that they add up
    return " + ".join(f"{mean:.{digits}f}" for mean in shown) + f" = {sum(shown):.{digits}f}"


def setting(comparison: Comparison, row: Row) -> str:
    """What a row has otherwise than the defaults and the other rows, and what was searched, in words."""
    if set(row.failed) == {NOTHING_CHOSEN}:
        return "nothing chosen"
    entry = next(entry for entry in comparison.entries if entry.label == row.label)
    chosen = {name: row.setting[name] for name in entry.grid}
    words = options(comparison.run(entry, comparison.seeds[0], chosen).model_dump(mode="json"))
    named = {word.split()[0] for word in words}
    words += [f"{name} {value:g}" for name, value in chosen.items() if name not in named]
    if entry.clients_per_round is not None and row.label != ALONE:
        words.append(f"{plural(entry.clients_per_round, 'client')} per round")
    if entry.model is not None:
        words.append(f"network {entry.model.name}")
    return ", ".join(words) or "defaults"


def notes(comparison: Comparison, rows: Sequence[Row], searches: Searches) -> list[str]:
    """What is said below the table, here and in the terminal: unequal averaging, paired differences, choices."""
    averages = {row.label: row.average for row in rows if row.average is not None}
    each = ", ".join(f"{average:g} for {label}" for label, average in averages.items())
    line = f"weights are averaged unequally, and curves differ by that, too: average is {each}"
    unequal = [line] if len(set(averages.values())) > 1 else []
    return [*unequal, *differences(rows), *search_lines(comparison, searches)]


def differences(rows: Sequence[Row]) -> list[str]:
    """Of each method its last accuracy less that of the file's first method, in points: the mean over the seeds that
    both finished, and its 95 % interval by Student's t. Seeds are pairs: both had the same clients and cohorts. Runs
    that stopped at a target all end there: nothing is said of them.
    """
    ends = [
        [
            curve[-1] if len(curve) == row.length and not why else None
            for curve, why in zip(row.accuracy, row.failed, strict=True)
        ]
        for row in rows
    ]
    lines = []
    for row, own in zip(rows[1:], ends[1:], strict=True):
        pairs = [100 * (a - b) for a, b in zip(own, ends[0], strict=True) if a is not None and b is not None]
        if len(pairs) < 2:
            continue
        mean, t = statistics.fmean(pairs), _T95[min(len(pairs), len(_T95)) - 2]
        half = t * statistics.stdev(pairs) / math.sqrt(len(pairs))
        interval = f"95 % t-interval {mean - half:+.1f} to {mean + half:+.1f}, {len(pairs)} seeds"
        lines.append(f"{row.label} − {rows[0].label}: {mean:+.1f} points of final accuracy ({interval})")
    return lines


def search_lines(comparison: Comparison, searches: Searches) -> list[str]:
    """A line for each method that was searched: the values tried, and the choice."""
    lines, clients = [], plural(comparison.search.hold_out or 0, "held-out client")
    for label, found in searches.items():
        tried = [f"{name} in {{{', '.join(f'{v:g}' for v in sorted(own))}}}" for name, own in found.entry.grid.items()]
        choice = "every run of it failed, so nothing was chosen" if found.nothing else f"chose {in_words(found.best)}"
        if found.at_edge:
            choice += f", at the edge of what was tried in {' and '.join(found.at_edge)}: a wider grid may have better"
        if tried:
            lines.append(f"{label}: searched {'; '.join(tried)} on {clients}; {choice}")
    return lines


def score_lines(searches: Searches) -> list[str]:
    """A line for each method that was searched: the held-out accuracy of every point of its grid, and its rounds."""
    lines = []
    for label, found in searches.items():
        points = [
            f"{in_words(point)}: {'failed' if score is None else percent(score)} ({plural(rounds, 'round')})"
            for point, (rounds, score) in found.scores.items()
        ]
        if points:
            lines.append(f"{label}, accuracy on held-out clients over the last third of rounds: {'; '.join(points)}")
    return lines


# -- Files -------------------------------------------------------------------------------------------------------------


def title(comparison: Comparison) -> str:
    """What all runs have in common, in a sentence."""
    seeds, several = ", ".join(map(str, comparison.seeds)), len(comparison.seeds) > 1
    words = f"{caption(comparison.common)}, seed{'s' * several} {seeds}"
    return words + (" (± is the sample standard deviation over them)" if several else "")


def markdown(comparison: Comparison, rows: Sequence[Row], searches: Searches) -> str:
    """table.md: what was compared, the table, paired differences, and how settings were searched."""
    table = columns(comparison, rows)
    cells = [table, ["---"] * len(table), *zip(*table.values(), strict=True)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    lines = [*notes(comparison, rows, searches), *score_lines(searches)]
    return f"{title(comparison)}.\n\n{text}" + "".join(f"\n- {line}" for line in lines) + "\n"


def latex(comparison: Comparison, rows: Sequence[Row]) -> str:
    """table.tex: the table without settings, for a paper that loads booktabs; what was compared is its caption."""
    table = columns(comparison, rows)
    del table["setting"]
    headings, *body = (" & ".join(map(_tex, cells)) + r" \\" for cells in (table, *zip(*table.values(), strict=True)))
    lines = "\n".join(body)
    return rf"""\begin{{table}}
\centering
\caption{{{_tex(title(comparison))}.}}
\label{{tab:{comparison.name}}}
\begin{{tabular}}{{l{"r" * (len(table) - 1)}}}
\toprule
{headings}
\midrule
{lines}
\bottomrule
\end{{tabular}}
\end{{table}}
"""


def _tex(text: str) -> str:
    """Text with the characters that LaTeX reads as commands written out."""
    words = {"\\": r"\textbackslash{}", "±": r"$\pm$", "α": r"$\alpha$", "~": r"\textasciitilde{}", "^": r"\^{}"}
    return "".join(words.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def write(folder: Path, comparison: Comparison, rows: Sequence[Row], searches: Searches, command: str) -> None:
    """results.json (everything), table.md (for people) and table.tex (for a paper)."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": comparison.name,
        "command": command,
        "ntkfl": __version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "comparison": comparison.model_dump(mode="json"),
        "searches": {label: found.dump() for label, found in searches.items()},
        "rows": [asdict(row) for row in rows],
    }
    if found := commit():
        document["commit"] = found
    # Five significant digits: enough for any figure, and a file small enough to keep.
    rounded = json.loads(json.dumps(document), parse_float=lambda number: float(f"{float(number):.5g}"))
    write_atomically(folder / "results.json", (json.dumps(rounded) + "\n").encode())
    write_atomically(folder / "table.md", markdown(comparison, rows, searches).encode())
    write_atomically(folder / "table.tex", latex(comparison, rows).encode())
