"""What a comparison found: rows of a table, with mean and spread over seeds, and the files they are kept in."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ntkfl.atomic import write_atomically
from ntkfl.compare.captions import caption, options
from ntkfl.compare.spec import ALONE, Comparison
from ntkfl.compare.trials import Cell
from ntkfl.progress import plural
from ntkfl.version import __version__

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
    accuracy: list[list[float]]  # of the weights the run reports
    last_accuracy: list[list[float]]  # of each round's own weights, without averaging
    uplink_mib: list[list[float]]  # cumulative
    downlink_mib: list[list[float]]  # cumulative
    seconds: list[list[float]]  # cumulative
    reached: list[Reached]
    reached_unaveraged: list[Reached]
    failed: list[str]
    devices: list[str]  # where the seconds were measured
    steps: list[list[float | None]]  # t that NTK-FL chose

    @property
    def unchosen(self) -> bool:
        """Whether its search chose nothing, so that nothing was run."""
        return set(self.failed) == {NOTHING_CHOSEN}

    def finished(self, curves: list[list[float]]) -> list[list[float]]:
        """Of these curves those of seeds whose run did not fail."""
        return [curve for curve, why in zip(curves, self.failed, strict=True) if not why]


def summarise(comparison: Comparison, label: str, setting: dict[str, Any], cells: Sequence[Sequence[Cell]]) -> Row:
    """A method's runs as a row: of each seed one run, or several whose curves are averaged, as of clients that each
    train alone, and send nothing. Where a seed has no run, the method's search chose nothing.
    """
    groups = [list(group) for group in cells]
    histories = [[cell.history() for cell in group] for group in groups]
    times = [
        [cell.folder.records("timings.jsonl")[: len(h)] for cell, h in zip(group, own, strict=True)]
        for group, own in zip(groups, histories, strict=True)
    ]

    def curves(name: str, source: Sequence[Sequence[Sequence[Mapping[str, Any]]]] = histories) -> list[list[float]]:
        """Means over each seed's runs, round by round."""
        return [[statistics.fmean(float(r[name]) for r in rounds) for rounds in zip(*own)] for own in source]  # noqa: B905

    reported, last, seconds = curves("test_accuracy"), curves("last_accuracy"), curves("seconds", times)
    weight = 0 if label == ALONE else 1 / 2**20
    up, down = (
        [list(accumulate(bytes_ * weight for bytes_ in sent)) for sent in curves(f"{way}_bytes")]
        for way in ("uplink", "downlink")
    )
    first = [own[0] if own else [] for own in histories]
    return Row(
        label,
        setting,
        list(comparison.seeds),
        next((cell.config.rounds for group in groups for cell in group), comparison.rounds),
        reported,
        last,
        up,
        down,
        [list(accumulate(each)) for each in seconds],
        [_reached(target, reported, up, down) for target in comparison.targets],
        [_reached(target, last, up, down) for target in comparison.targets],
        [next((cell.failed for cell in group if cell.failed), "" if group else NOTHING_CHOSEN) for group in groups],
        sorted({t["device"] for own in times for records in own for t in records}),
        [[r.get("steps") for r in records] for records in first],
    )


def _reached(target: float, curves: Sequence[Sequence[float]], *ways: Sequence[Sequence[float]]) -> Reached:
    """The first round at the target of each seed's curve, and the bytes sent until then."""
    firsts = [next((i for i, a in enumerate(curve) if a >= target), None) for curve in curves]
    sent = ([None if i is None else one[i] for i, one in zip(firsts, way, strict=True)] for way in ways)
    return Reached(target, [None if i is None else i + 1 for i in firsts], *sent)


def spread(values: Sequence[float | None], digits: int = 0) -> str:
    """'24 ± 3' over seeds, '24' for one; seeds that did not arrive are counted in words."""
    there = [v for v in values if v is not None]
    if not there:
        return ""
    text = f"{statistics.mean(there):.{digits}f}"
    if len(there) > 1:
        text += f" ± {statistics.stdev(there):.{digits}f}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"


def reached_text(reached: Reached, length: int, failed: bool = False) -> str:
    """Rounds to a target. `failed`: no seed's run was finished, so that none can be said not to get there."""
    digits = 1 if len(reached.rounds) > 1 else 0
    return spread(reached.rounds, digits) or ("failed" if failed else f"not in {length}")


def bytes_text(reached: Reached) -> str:
    """MiB up and down to a target and their sum, means over the seeds that got there: '48 + 21 = 69'."""
    ways = [[v for v in way if v is not None] for way in (reached.uplink_mib, reached.downlink_mib)]
    if not all(ways):
        return ""
    means = [statistics.mean(way) for way in ways]
    digits = 0 if sum(means) >= 10 else 1 if sum(means) >= 1 else 3
    shown = [round(mean, digits) for mean in means]  # as shown, so that they add up
    return " + ".join(f"{mean:.{digits}f}" for mean in shown) + f" = {sum(shown):.{digits}f}"


def accuracy_at(row: Row, round: int | None) -> str:
    """Accuracy at a round, or at each seed's last, over the seeds that got so far: '84.2 ± 0.3', in percent."""
    reached = [curve for curve in row.accuracy if curve and len(curve) >= (round or 1)]
    return spread([100 * curve[-1 if round is None else round - 1] for curve in reached], 1)


def columns(comparison: Comparison, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The table as text: headers, and a list of cells per method. The last round is always shown: by its number, or as
    `last` where runs differ in length.
    """
    lengths = {len(curve) for row in rows for curve in row.finished(row.accuracy) if curve} or {0}
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
            cells += [reached_text(reached, row.length, all(row.failed)), bytes_text(reached)]
        # The median: a worker's first round also pays for its start.
        each = [statistics.median(b - a for a, b in pairwise([0.0, *s])) for s in row.seconds if s]
        body.append([*cells, f"{statistics.mean(each):.2f}" if each else ""])
    return headers, body


def row_settings(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """What each row has otherwise than the defaults and the other rows, and what was searched, in words."""
    entries = {entry.label: entry for entry in comparison.entries}
    texts = []
    for row in rows:
        entry, seed = entries[row.label], comparison.seeds[0]
        run = comparison.run(entry, seed, {}, method=row.setting or entry.method).model_dump(mode="json")
        words = options(run)
        shown = {word.split()[0] for word in words}
        words += [f"{name} {row.setting[name]:g}" for name in entry.grid if name in row.setting and name not in shown]
        if entry.clients_per_round is not None and row.label != ALONE:
            words.append(f"{plural(entry.clients_per_round, 'client')} per round")
        if entry.model is not None:
            words.append(f"network {entry.model.name}")
        texts.append("nothing chosen" if row.unchosen else ", ".join(words) or "defaults")
    return texts


def differences(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Of each method its last accuracy less that of the file's first method, in points: the mean over the seeds that
    both finished, and its 95 % interval by Student's t. Seeds are pairs: both had the same clients and cohorts.
    """
    if len(comparison.seeds) < 2 or len(rows) < 2:
        return []
    ends = [
        {s: c[-1] for s, c, why in zip(row.seeds, row.accuracy, row.failed, strict=True) if c and not why}
        for row in rows
    ]
    lines = []
    for row, own in zip(rows[1:], ends[1:], strict=True):
        pairs = [100 * (own[seed] - ends[0][seed]) for seed in own if seed in ends[0]]
        if len(pairs) < 2:
            continue
        t = _T95[min(len(pairs), len(_T95)) - 2]
        half = t * statistics.stdev(pairs) / math.sqrt(len(pairs))
        mean = statistics.fmean(pairs)
        lines.append(
            f"{row.label} less {rows[0].label}: {mean:+.1f} points (95 % t-interval {mean - half:+.1f} to "
            f"{mean + half:+.1f}, {len(pairs)} seeds)"
        )
    return lines


def search_lines(comparison: Comparison, searches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each method that was searched: the values tried, and the choice."""
    lines = []
    for label, found in searches.items():
        if not found["searched"]:
            continue
        tried = "; ".join(
            f"{name} in {{{', '.join(f'{v:g}' for v in values)}}}" for name, values in found["searched"].items()
        )
        choice = "chose " + ", ".join(f"{name} {value:g}" for name, value in found["chosen"].items())
        if found["still_at_edge"]:
            names = " and ".join(found["still_at_edge"])
            choice += f", at the edge of what was tried in {names}: a wider grid may have better"
        if not found["chosen"]:
            choice = "every run of it failed, so nothing was chosen"
        lines.append(
            f"{label}: searched {tried} on {plural(comparison.search.hold_out or 0, 'held-out client')}; {choice}"
        )
    return lines


def title(comparison: Comparison) -> str:
    """What all runs have in common, in a sentence."""
    seeds = ", ".join(map(str, comparison.seeds))
    words = [caption(comparison.common), f"seed{'s' * (len(comparison.seeds) > 1)} {seeds}"]
    return ", ".join(words) + (" (± is the sample standard deviation over them)" if len(comparison.seeds) > 1 else "")


def markdown(comparison: Comparison, rows: Sequence[Row], searches: Mapping[str, Mapping[str, Any]]) -> str:
    """table.md: what was compared, the table, paired differences, and how settings were searched."""
    headers, body = columns(comparison, rows)
    for text, cells in zip(row_settings(comparison, rows), body, strict=True):
        cells.append(text)
    lines = [[*headers, "setting"], ["---"] * (len(headers) + 1), *body]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    notes = [*differences(comparison, rows), *search_lines(comparison, searches)]
    return f"{title(comparison)}.\n\n{table}" + "".join(f"\n- {line}" for line in notes) + "\n"


def latex(comparison: Comparison, rows: Sequence[Row]) -> str:
    """table.tex: the table without settings, for a paper that loads booktabs; what was compared is its caption."""
    headers, body = columns(comparison, rows)
    lines = [" & ".join(map(_tex, cells)) + r" \\" for cells in (headers, *body)]
    rows_ = "\n".join(lines[1:])
    return rf"""\begin{{table}}
\caption{{{_tex(title(comparison))}.}}
\begin{{tabular}}{{l{"r" * (len(headers) - 1)}}}
\toprule
{lines[0]}
\midrule
{rows_}
\bottomrule
\end{{tabular}}
\end{{table}}
"""


def _tex(text: str) -> str:
    """Text with the characters that LaTeX reads as commands written out."""
    words = {"\\": r"\textbackslash{}", "±": r"$\pm$", "α": r"$\alpha$", "~": r"\textasciitilde{}", "^": r"\^{}"}
    return "".join(words.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def write(
    folder: Path, comparison: Comparison, rows: Sequence[Row], searches: Mapping[str, Mapping[str, Any]], command: str
) -> None:
    """results.json (everything), table.md (for people) and table.tex (for a paper)."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": comparison.name,
        "command": command,
        "ntkfl": __version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "comparison": comparison.model_dump(mode="json"),
        "searches": dict(searches),
        "rows": [asdict(row) for row in rows],
    }
    # Five significant digits: enough for any figure, and a file small enough to keep.
    rounded = json.loads(json.dumps(document), parse_float=lambda number: float(f"{float(number):.5g}"))
    write_atomically(folder / "results.json", (json.dumps(rounded) + "\n").encode())
    write_atomically(folder / "table.md", markdown(comparison, rows, searches).encode())
    write_atomically(folder / "table.tex", latex(comparison, rows).encode())
