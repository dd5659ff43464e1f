"""Tables of README.md and docs/, made from the files in results/: `make tables` writes them, a test
finds them stale.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # the other programs of docs/, which belong to no package
from audit_tables import leaks
from bench_tables import bench, jacobians, scaling, tree
from ntkfl_experiments.paper import ITEMS
from ntkfl_experiments.paper.item import Verdict
from result_tables import (
    equal_terms,
    findings,
    networks,
    one_label,
    private,
    ratios,
    table,
)

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "results" / "paper"
ORDER = (
    "fig3", "fig4a", "fig4b", "fig4c", "fig5", "fig6", "table1", "fig7", "fig8", "fig9", "theorem1", "theorem2",
    "lemma1", "lemma2", "lemma3", "lemma4", "claims",
)  # fmt: skip
FILES = ("README.md", "docs/results.md", "docs/audit.md", "docs/paper.md", "docs/tangent.md")
DATASETS = {"fig4a": "FEMNIST", "fig4b": "MNIST", "fig4c": "Fashion-MNIST", "fig7": "CIFAR-10"}
VERDICTS = {True: "holds", False: "**fails**", None: "open"}
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _headline() -> list[tuple[str, dict[str, Any]]]:
    """Sums, rows and the best rivals: what each is called, and its row of a comparison."""
    shown = (  # where, which row there, and what it is called
        ("headline", "NTK-FL from sums", "NTK-FL from sums (`sum-ntk-fl`)"),
        ("headline", "NTK-FL from rows", "NTK-FL from rows (`ntk-fl`)"),
        ("headline", "ridge, 1500 Fourier features", "ridge on 1,500 random features"),
        ("headline", "FedPM", "FedPM, as searched"),
        ("headline", "FedAdam", "FedAdam, as searched"),
        ("sums/main", "FedAvg, averaged", "FedAvg, plain mean, 300 local steps"),
    )
    found = []
    for file, label, name in shown:
        rows = json.loads((ROOT / "results" / file / "results.json").read_text())["rows"]
        found.append((name, next(row for row in rows if row["label"] == label)))
    return found


def headline() -> str:
    """Rounds and bytes to 85 %, first hit, and accuracies."""
    body = [[name, _rounds(row), *_mib(row), _seconds(row), *_accuracies(row)] for name, row in _headline()]
    return table(["method", "rounds to 85 %", "MiB up", "down", "sum", "seconds", "% at round 5", "10", "20"], body)


def readme() -> str:
    """The same in short."""
    body = [[name, _rounds(row), _mib(row)[2]] for name, row in _headline()]
    return table(["method", "rounds to 85 %", "MiB up + down"], body)


def _mib(row: dict[str, Any]) -> list[str]:
    reached = next(r for r in row["reached"] if r["target"] == 0.85)
    means = [statistics.mean(reached[way]) for way in ("uplink_mib", "downlink_mib")]
    return [f"{mib:.0f}" for mib in (*means, sum(means))]


def _rounds(row: dict[str, Any]) -> str:
    reached = next(r for r in row["reached"] if r["target"] == 0.85)["rounds"]
    return f"{statistics.mean(reached):.1f} ± {statistics.stdev(reached):.1f}"


def _seconds(row: dict[str, Any]) -> str:
    """To the first round at 85 %, with evaluation, where runs were made on a CPU: the mean over seeds."""
    if row["devices"] != ["cpu"]:
        return ""
    hits = next(r for r in row["reached"] if r["target"] == 0.85)["rounds"]
    found = statistics.mean(seconds[hit - 1] for seconds, hit in zip(row["seconds"], hits, strict=True))
    return f"{found:.2g}" if found < 10 else f"{found:.0f}"


def _accuracies(row: dict[str, Any]) -> list[str]:
    """At rounds 5, 10 and 20, where all runs went that far."""
    shortest = min(map(len, row["accuracy"]))
    return [
        f"{100 * statistics.mean(curve[r - 1] for curve in row['accuracy']):.1f}" if shortest >= r else ""
        for r in (5, 10, 20)
    ]


def table1() -> str:
    """The paper's Table 1 beside ours, bytes in both directions."""
    body = []
    for label, row in _result("table1")["data"]["table"].items():
        paper = row["paper"] or ["", ""]
        met = [r for r in row["rounds"] if r is not None]
        said = [
            label,
            str(paper[0]),
            f"{len(met)} of {len(row['rounds'])} seeds",
            f"{paper[1]:.0f}" if paper[1] else "",
            "",
            "",
            "",
        ]
        if len(met) == len(row["rounds"]):
            up = statistics.mean(row["uplink_mib"])
            down = statistics.mean(row["downlink_mib"])
            rounds = f"{statistics.mean(met):.1f} ({min(met)} to {max(met)})"
            said[2:] = [rounds, said[3], f"{up:.0f}", f"{down:,.0f}", f"{up + down:,.0f}"]
        body.append(said)
    headers = ["to 85 %", "rounds, the paper", "rounds, here", "MB up, the paper", "MiB up, here", "down", "sum"]
    return table(headers, body)


def paper() -> str:
    """Every claim of the paper once, what each item that measures it found in a few words, and the verdict. The
    paper's own words are on the items' pages.
    """
    lines = []
    for claim, found in claims().items():
        items = ", ".join(f"[{name}](../results/paper/{name}/findings.md)" for name, _ in found)
        here = "; ".join(f"{DATASETS[name]} {f.short}" if len(found) > 1 else f.short for name, f in found)
        verdict = VERDICTS[verdict_of([f.holds for _, f in found])]
        lines.append([claim, here, verdict, items])
    return table(["claim", "here", "verdict", "details"], lines)


def tally() -> str:
    """How many claims have which verdict."""
    counts = _counts()
    return table(
        ["claims of the paper", "hold", "do not hold", "cannot be judged"], [[str(sum(counts)), *map(str, counts)]]
    )


def _counts() -> list[int]:
    verdicts = [verdict_of([f.holds for _, f in found]) for found in claims().values()]
    return [verdicts.count(kind) for kind in VERDICTS]


@cache
def claims() -> dict[str, list[tuple[str, Verdict]]]:
    """Claim by claim, (item, finding) of every item that measures it."""
    found: dict[str, list[tuple[str, Verdict]]] = {}
    for name in ORDER:
        if (PAPER / name / "result.json").exists():
            for verdict in ITEMS[name].judge(_result(name)["data"])[0]:
                found.setdefault(verdict.claim, []).append((name, verdict))
    return found


def verdict_of(each: list[bool | None]) -> bool | None:
    """A claim of several settings fails where one fails, and holds where all do."""
    return False if False in each else (None if None in each else True)


def _findings() -> str:
    shorts = [f.short for _, f in claims()["NTK-FL reaches FedAvg's accuracy in an order of magnitude fewer rounds"]]
    return findings(_counts(), [float(short.removesuffix("×")) for short in shorts if short.endswith("×")])


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PAPER / name / "result.json").read_text())
    return found


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "headline": headline,
    "table1": table1,
    "paper": paper,
    "tally": tally,
    "findings": _findings,
    "ratios": ratios,
    "rivals": lambda: equal_terms("rivals"),
    "private": private,
    "networks": networks,
    "one-label": one_label,
    "audit": leaks,
    "bench": bench,
    "scaling": scaling,
    "jacobians": jacobians,
    "tree": tree,
}


def filled(text: str) -> str:
    """`text` with every table made anew."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> None:
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        if (new := filled(text)) != text:
            stale.append(name)
            path.write_text(new)
    sys.stdout.write(f"rewrote {', '.join(stale)}\n" if stale else "every table is as its results say\n")


if __name__ == "__main__":
    main()
