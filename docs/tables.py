"""Tables of README.md and docs/, and the README's picture, made from the files in results/: `make tables` writes them,
a test finds stale tables.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from ntkfl_experiments.paper import ITEMS
from ntkfl_experiments.paper.item import Verdict

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
FILES = (
    "README.md", "docs/methods.md", "docs/results.md", "docs/audit.md", "docs/privacy.md", "docs/paper.md",
    "docs/tangent.md",
)  # fmt: skip
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]  # of a comparison's results.json


def table(headers: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *body]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)


def read(path: str) -> Any:
    """A file of results/."""
    return json.loads((RESULTS / path).read_text())


def rows_of(name: str) -> dict[str, Row]:
    """A comparison's rows by label."""
    return {row["label"]: row for row in read(f"{name}/results.json")["rows"]}


def first_hits(curves: Sequence[Sequence[float]], target: float) -> list[int | None]:
    return [next((i + 1 for i, a in enumerate(curve) if a >= target), None) for curve in curves]


def rounds_text(hits: Sequence[int | None], length: int) -> str:
    """'5.3 (5 to 6)', unbroken in a narrow column; how many seeds got there where not all did."""
    there = [hit for hit in hits if hit is not None]
    if not there:
        return f"not in {length}"
    if len(there) < len(hits):
        return f"{len(there)} of {len(hits)} seeds"
    return unbroken(f"{statistics.mean(there):.1f} ({min(there)} to {max(there)})")


def unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def reached(row: Row, target: float) -> Row:
    """Rounds and MiB to a target, one number per seed."""
    found: Row = next(r for r in row["reached"] if r["target"] == target)
    return found


def arrived(numbers: Iterable[float | None]) -> list[float]:
    """Those of seeds that reached their target."""
    return [number for number in numbers if number is not None]


def sent(row: Row, target: float) -> list[str]:
    """MiB up, down and their sum to the target, means over the seeds that got there."""
    there = reached(row, target)
    if not arrived(there["rounds"]):
        return ["", "", ""]
    up, down = (statistics.mean(arrived(there[way])) for way in ("uplink_mib", "downlink_mib"))
    return [f"{up:,.0f}", f"{down:,.0f}", f"{up + down:,.0f}"]


def accuracy(row: Row, *rounds: int) -> list[str]:
    """Percent at these rounds, the mean over seeds, where all runs went that far."""
    shortest = min(map(len, row["accuracy"]))
    return [
        f"{100 * statistics.mean(curve[r - 1] for curve in row['accuracy']):.1f}" if shortest >= r else ""
        for r in rounds
    ]


def end(row: Row) -> str:
    """Percent after the last round, the mean over seeds."""
    return f"{100 * statistics.mean(curve[-1] for curve in row['accuracy']):.1f}"


# The headline.

# Of the README's table and picture: the row's label, what it is called, its colour.
SHOWN = {
    "NTK-FL from sums": ("NTK-FL from sums (`sum-ntk-fl`)", "#0072b2"),
    "NTK-FL from rows": ("NTK-FL from rows (`ntk-fl`)", "#d55e00"),
    "ridge, 1500 Fourier features": ("ridge on 1,500 random features", "#009e73"),
    "FedPM": ("FedPM", "#cc79a7"),
    "FedAdam": ("FedAdam", "#e69f00"),
    "FedAvg": ("FedAvg", "#999999"),
}
OTHERS = {"CP-NTK-FL": "CP-NTK-FL (`cp-ntk-fl`)"}  # names of other rows


def headline() -> str:
    """Every method: rounds and bytes to 85 %, first hit, and accuracies."""
    body = []
    for label, row in rows_of("headline").items():
        name = SHOWN[label][0] if label in SHOWN else OTHERS.get(label, label)
        last = unbroken(f"{end(row)} ({max(map(len, row['accuracy']))})")
        body.append([name, _spread(row), *sent(row, 0.85), *accuracy(row, 5, 10, 20), last])
    return table(["method", "rounds to 85 %", "MiB up", "down", "sum", "% at round 5", "10", "20", "end (round)"], body)


def readme() -> str:
    """The same in short."""
    rows = rows_of("headline")
    body = [
        [name, _spread(rows[label], 0.8), _spread(rows[label]), sent(rows[label], 0.85)[2]]
        for label, (name, _) in SHOWN.items()
    ]
    return table(["method", "rounds to 80 %", "rounds to 85 %", "MiB up + down to 85 %"], body)


def _spread(row: Row, target: float = 0.85) -> str:
    hits = reached(row, target)["rounds"]
    there = arrived(hits)
    if not there:
        return f"not in {row['length']}"
    text = f"{statistics.mean(there):.1f} ± {statistics.stdev(there):.1f}"
    return text if len(there) == len(hits) else f"{text} ({len(there)} of {len(hits)} seeds)"


# Other comparisons.

# Clients' side of a round, and what it is called; the attacks are the labels' other half.
BYZANTINE = {
    "sum-ntk-fl": "`sum-ntk-fl`",
    "secure sums": "the same, secure sums",
    "ntk-fl, no bounds": "`ntk-fl`",
    "ntk-fl": "the same, bounded",
    "fedavg, no bounds": "`fedavg`",
    "fedavg": "the same, bounded",
}


def byzantine() -> str:
    """Accuracy at the end by method and attack."""
    rows = rows_of("byzantine")
    attacks = list(dict.fromkeys(label.partition(": ")[2] for label in rows))
    body = [[name, *(end(rows[f"{method}: {attack}"]) for attack in attacks)] for method, name in BYZANTINE.items()]
    return table(["method", *attacks], body)


def private() -> str:
    """What ε costs: accuracy at the end, with whitening and without."""
    rows, body = rows_of("private"), []
    settings = {
        "ε = 1": ("1", "300"),
        "ε = 3": ("3", "300"),
        "ε = 3, 20 clients, credit for sampling": ("3, credit for sampling", "20"),
        "ε = 3, 20 clients, no credit": ("3, no credit", "20"),
    }
    for label, (epsilon, clients) in settings.items():
        plain = rows.get(f"{label}, plain DP gradient sums")
        body.append([epsilon, clients, str(rows[label]["length"]), end(rows[label]), end(plain) if plain else ""])
    return table(["ε of a record", "clients per round", "rounds", "`private-sums`, %", "plain DP gradient sums"], body)


def hospitals() -> str:
    """Accuracy at the end of a consortium of five."""
    return table(["training", "%"], [[label, end(row)] for label, row in rows_of("hospitals").items()])


NETWORKS = (
    ("CNN, Fashion-MNIST", "silos/cnn", 0.84, ("sums", "K-FAC FedAvg")),
    ("residual, CIFAR-10", "sums/resnet", 0.40, ("sums", "FedAvg, averaged")),
    ("residual, CIFAR-10", "silos/resnet", 0.40, ("K-FAC FedAvg",)),
)


def networks() -> str:
    """Other architectures: rounds, accuracy at the end, and bytes of a round."""
    lines = []
    for network, name, target, labels in NETWORKS:
        for label in labels:
            row = rows_of(name)[label]
            hits = rounds_text(first_hits(row["accuracy"], target), row["length"])
            method = "NTK-FL from sums" if label == "sums" else label
            cells = [str(len(row["accuracy"])), f"{100 * target:.0f} %: {hits}", f"{end(row)} ({row['length']})"]
            lines.append([network, method, *cells, *_per_round(row)])
    headers = ["network", "method", "seeds", "rounds to", "% at the end (round)", "MiB up per round", "down"]
    return table(headers, lines)


def _per_round(row: Row) -> list[str]:
    """Mean MiB of a round, up and down; no downlink where it was not recorded."""
    up = [curve[-1] / len(curve) for curve in row["uplink_mib"]]
    down = [curve[-1] / len(curve) for curve in row.get("downlink_mib", ())]
    if not down:  # older files have it at the targets alone
        pairs = [p for r in row["reached"] for p in zip(r.get("downlink_mib", ()), r["rounds"], strict=False)]
        down = [mib / rounds for mib, rounds in pairs if mib is not None]
    means = [statistics.mean(mib) if mib else None for mib in (up, down)]
    return ["" if m is None else f"{m:,.0f}" if m >= 100 else f"{m:.3g}" for m in means]


# Sums in other settings: (what, its file, the row's label, the target)
STUDIES = (
    ("as above", "headline", "NTK-FL from sums", 0.85),
    ("α = 0.01", "sums/alpha", "sums", 0.85),
    ("one label per client", "sums/one-label", "sums", 0.85),
    ("100 clients per round", "sums/large-cohorts", "sums", 0.85),
    ("a CNN", "silos/cnn", "sums", 0.85),
    ("μ = 4", "sums/ablations", "μ = 4", 0.85),
    ("μ = 32", "sums/ablations", "μ = 32", 0.85),
    ("weights not averaged", "sums/ablations", "no average", 0.85),
    ("MNIST", "sums/mnist", "sums", 0.95),
    ("MNIST, rows", "sums/mnist", "rows (NTK-FL)", 0.95),
    ("MNIST, FedAdam", "sums/mnist", "FedAdam, averaged", 0.95),
    ("MNIST, FedAvg", "sums/mnist", "FedAvg, averaged", 0.95),
    ("FEMNIST by writer", "sums/femnist", "sums", 0.95),
    ("FEMNIST, rows", "sums/femnist", "rows (NTK-FL)", 0.95),
    ("FEMNIST, FedAdam", "sums/femnist", "FedAdam, averaged", 0.95),
    ("FEMNIST, FedAvg", "sums/femnist", "FedAvg, averaged", 0.95),
)


def studies() -> str:
    """Rounds and bytes to a target of NTK-FL from sums, one thing changed at a time; of rivals on other data."""
    lines = []
    for what, name, label, target in STUDIES:
        row = rows_of(name)[label]
        hits = rounds_text(first_hits(row["accuracy"], target), row["length"])
        lines.append([what, f"{100 * target:.0f} %", hits, *accuracy(row, 5, 10, 20)])
    runs = read("sums/ntk-dfl.json")
    hits = rounds_text([run["rounds to 85%"] for run in runs], 12)
    fifth = statistics.mean(run["accuracy"][4] for run in runs)
    lines.insert(3, ["partitions of NTK-DFL", "85 %", hits, f"{100 * fifth:.1f}", "", ""])
    return table(["changed", "target", "rounds", "% at round 5", "10", "20"], lines)


# The paper.

DATASETS = {"fig4a": "FEMNIST", "fig4b": "MNIST", "fig4c": "Fashion-MNIST", "fig7": "CIFAR-10"}
VERDICTS = {True: "holds", False: "**fails**", None: "open"}


def table1() -> str:
    """The paper's Table 1 beside ours, bytes in both directions."""
    body = []
    for label, row in read("paper/table1/result.json")["data"]["table"].items():
        rounds, mb = row["paper"] or ("", None)
        hits, bytes_ = row["rounds"], ["", "", ""]
        here = f"{sum(r is not None for r in hits)} of {len(hits)} seeds"
        if None not in hits:
            up, down = (statistics.mean(row[way]) for way in ("uplink_mib", "downlink_mib"))
            here = f"{statistics.mean(hits):.1f} ({min(hits)} to {max(hits)})"
            bytes_ = [f"{up:,.0f}", f"{down:,.0f}", f"{up + down:,.0f}"]
        body.append([label, str(rounds), here, f"{mb:.0f}" if mb else "", *bytes_])
    headers = ["to 85 %", "rounds, the paper", "rounds, here", "MB up, the paper", "MiB up, here", "down", "sum"]
    return table(headers, body)


@cache
def claims() -> dict[str, list[tuple[str, Verdict]]]:
    """Claim by claim, (item, finding) of every item that measures it."""
    found: dict[str, list[tuple[str, Verdict]]] = {}
    for name, item in ITEMS.items():
        for verdict in item.judge(read(f"paper/{name}/result.json")["data"])[0]:
            found.setdefault(verdict.claim, []).append((name, verdict))
    return found


def verdict_of(found: Sequence[tuple[str, Verdict]]) -> bool | None:
    """A claim of several settings fails where one fails, and holds where all do."""
    each = [verdict.holds for _, verdict in found]
    return False if False in each else (None if None in each else True)


def paper() -> str:
    """Every claim of the paper once, what each item that measures it found in a few words, and the verdict. The
    paper's own words are on the items' pages.
    """
    lines = []
    for claim, found in claims().items():
        items = ", ".join(f"[{name}](../results/paper/{name}/findings.md)" for name, _ in found)
        here = "; ".join(f"{DATASETS[name]} {f.short}" if len(found) > 1 else f.short for name, f in found)
        lines.append([claim, here, VERDICTS[verdict_of(found)], items])
    return table(["claim", "here", "verdict", "details"], lines)


def tally() -> str:
    """How many claims have which verdict."""
    cells = [str(sum(counts())), *map(str, counts())]
    return table(["claims of the paper", "hold", "do not hold", "cannot be judged"], [cells])


def counts() -> list[int]:
    verdicts = [verdict_of(found) for found in claims().values()]
    return [verdicts.count(kind) for kind in VERDICTS]


def findings() -> str:
    """What the results come to."""
    shorts = [f.short for _, f in claims()["NTK-FL reaches FedAvg's accuracy in an order of magnitude fewer rounds"]]
    fewer = [float(short.removesuffix("×")) for short in shorts if short.endswith("×")]
    main = rows_of("headline")
    shown = [
        main[label] for label in ("NTK-FL from sums", "FedPM", "FedAdam", "FedAvg", "ridge, 1500 Fourier features")
    ]
    rounds = [f"{statistics.mean(arrived(first_hits(row['accuracy'], 0.85))):.1f}" for row in shown]
    mib = [sent(row, 0.85)[2] for row in shown]
    wide = sent(main["NTK-FL from sums, float32"], 0.85)[2]
    backbone = read("backbone/measured.json")
    heads = [backbone[f"K-FAC / one label per client / seed {seed}"]["accuracy"] for seed in (20, 21, 22)]
    once, thrice = (statistics.mean(head[i] for head in heads) for i in (0, 2))
    noisy = rows_of("private")["ε = 1"]
    ssim = read("paper/claims/result.json")["data"]["shuffled"]["ssim"]
    held, failed, left_open = counts()
    lines = [
        "**Few rounds.** On Fashion-MNIST with clients whose labels differ, NTK-FL from sums reaches 85 % in "
        f"{rounds[0]} rounds. The best rivals that train the same network without shared data take {rounds[1]} (FedPM) "
        f"and {rounds[2]} (FedAdam), FedAvg {rounds[3]}, all with searched settings; ridge on random features gets "
        f"there in {rounds[4]}, and has {end(shown[4])} % after 20 rounds where sums have {end(shown[0])} "
        "([headline](#headline)).",
        f"**Few bytes.** That is {mib[0]} MiB up and down together ({wide} with numbers of 32 bits, as the others "
        f"have), against {mib[1]}, {mib[2]}, {mib[3]} and {mib[4]} ([headline](#headline)).",
        "**One round with a pretrained network.** CIFAR-10 behind a frozen EfficientNet-Lite0, one label per client: "
        f"{once:.1f} % after one round, {thrice:.1f} after three ([backbones](methods.md#measured-with-a-backbone)).",
        f"**The paper.** Of {held + failed + left_open} claims {held} hold, {failed} do not, {left_open} cannot be "
        f"judged. With the paper's own choices NTK-FL takes {min(fewer):.1f} to {max(fewer):.1f} times fewer rounds "
        "than FedAvg, where it says an order of magnitude ([claim by claim](paper.md#verdicts)).",
        "**Noise hides, sparsifying and shuffling do not.** Pictures are read off shuffled, sparse rows with an SSIM "
        f"of {ssim:.2f}, where inputs are not projected ([audit](audit.md)). With differential privacy at "
        f"ε = 1 per record and all 300 clients in every round, {end(noisy)} % remain "
        f"after {noisy['length']} rounds ([privacy](privacy.md#what-it-costs)).",
    ]
    return "".join(f"{i}. {line}\n" for i, line in enumerate(lines, start=1))


# What is read off what clients send.

# What is sent, and the file of its findings, which `make leaks` wrote.
SENT = {
    "rows (ntk-fl)": "rows",
    "rows, projected, sparse, shuffled (cp-ntk-fl)": "cp",
    "sums": "sums",
    "sums of 20 clients, masked (--secure-sum)": "secure-sums",
    "masked and noisy, ε = 3 (--private)": "private-sums",
}
# Columns: what a finding recovers.
KINDS = {
    "pictures (SSIM)": "inputs",
    "labels": "labels",
    "who took part": "who was trained on",
    "rows of one client": "who sent a row",
}


def leaks() -> str:
    lines = [[what, *(_strongest(name, kind) for kind in KINDS.values())] for what, name in SENT.items()]
    return table(["what is sent", *KINDS], lines)


def _strongest(name: str, recovers: str) -> str:
    """The finding that recovers this best, and what a guess would."""
    findings = read(f"audit/{name}.json")["findings"]
    found = [f for f in findings if f["recovers"] == recovers and f["measure"] != "relative error"]
    best = max(found, key=lambda f: float(f["success"]), default=None)
    if best is None:
        return "–"
    guess = f" ({best['guess']:.2f})" if round(best["guess"], 2) else ""
    return f"{best['mean']:.2f}{guess}".replace("-", "−")


# Speed.

# (suite, its row, what is said, whether its ratio counts instead of its seconds)
BENCH = (
    ("kernel", "kernel alone, from the dense Jacobian", "trace kernel of 1,000 samples: dense against factors", True),
    ("kernel", "CNN: the same, dense", "Jacobian and kernel of a CNN: dense against ours", True),
    ("methods", "sum-ntk-fl", "a round of 20 clients, sum-ntk-fl", False),
    ("methods", "ntk-fl", "the same, ntk-fl", False),
    ("methods", "fedavg", "the same, fedavg, 20 steps with all samples", False),
    ("start", "ntkfl --help", "ntkfl --help", False),
)


def seconds() -> str:
    """Seconds, and rounds, until the headline's target."""
    body = []
    for label, row in rows_of("seconds").items():
        (rounds,) = reached(row, 0.85)["rounds"]
        body.append([label, str(rounds), seconds_text(row["seconds"][0][rounds - 1])])
    return table(["method", "rounds to 85 %", "on two cores"], body)


def bench() -> str:
    rows = {(row["suite"], row["what"]): row for row in read("bench/cpu.json")["rows"]}
    lines = []
    for suite, what, said, by_ratio in BENCH:
        seconds, ratio = (rows[suite, what][key] for key in ("seconds", "ratio"))
        times = f"{ratio or 0:,.0f}×" if (ratio or 0) >= 100 else f"{ratio or 0:.3g}×"
        lines.append([said, times if by_ratio else seconds_text(seconds)])
    return table(["what", "2 cores"], lines)


def costs() -> str:
    """What a client's sums cost, in gradient passes."""
    found: dict[str, list[str]] = {}
    for row in read("bench/cpu.json")["rows"]:
        if row["suite"] == "clients":
            found.setdefault(row["what"].rpartition(", ")[0], []).append(f"{row['details']['passes']:.1f}")
    return table(["network", "10 classes", "100", "1,000"], [[name, *passes] for name, passes in found.items()])


def memory() -> str:
    """A server's update by the samples of a round: seconds, and memory beside the data."""
    shown = ("N = 1,000", "N = 4,000", "N = 100,000")
    rows = [row for row in read("bench/cpu.json")["rows"] if row["what"] in shown]
    lines = [[r["what"].removeprefix("N = "), seconds_text(r["seconds"]), _gigabytes(r["note"])] for r in rows]
    return table(["samples of a round", "2 cores, time", "2 cores, memory"], lines)


def _gigabytes(note: str) -> str:
    found = re.search(r"([\d.]+ GB) ", note)
    return found[1] if found else ""


SILOS = {"ten": "10 clients of 5,000, all in each round", "hundred": "100 clients of 500, 20 in each round"}


def silo_rows(file: str) -> dict[str, Row]:
    """By label: K-FAC FedAvg as it is by default, and the methods that ran before it, on the same clients and seeds."""
    return {row["label"]: row for name in (f"kfac-{file}", file) for row in read(f"silos/{name}.json")["rows"]}


def silos() -> str:
    """LeNet on CIFAR-10: accuracies, rounds to the mean accuracy that FedAvg ends with, and bytes of a round."""
    body = []
    for file, clients in SILOS.items():
        rows = silo_rows(file)
        target = float(end(rows["FedAvg"])) / 100
        for label, row in rows.items():
            rounds = row["length"]
            traffic = [
                f"{statistics.mean(curve[-1] for curve in row[way]) / rounds:.1f}"
                for way in ("uplink_mib", "downlink_mib")
            ]
            hits = rounds_text(first_hits(row["accuracy"], target), rounds)
            body.append(
                [clients.partition(", ")[0], label, *accuracy(row, 1, 5, 10, 20, 40), hits, " + ".join(traffic)]
            )
    headers = ["clients", "method", "% at round 1", "5", "10", "20", "40", "rounds to FedAvg's end", "MiB per round"]
    return table(headers, body)


def silos_picture() -> Figure:
    """Accuracy against rounds of both studies: means and spread of three seeds."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    colors = ("#0072b2", "#56b4e9", "#999999", "#009e73", "#e69f00", "#cc79a7")
    for axes, (file, clients) in zip(figure.subplots(1, 2, sharey=True), SILOS.items(), strict=True):
        for row, color in zip(silo_rows(file).values(), colors, strict=True):
            columns = [[100 * a for a in column] for column in zip(*row["accuracy"], strict=True)]
            x, style = range(1, len(columns) + 1), "--" if "plain" in row["label"] else "-"
            axes.plot(x, [statistics.mean(c) for c in columns], style, color=color, label=row["label"], linewidth=2)
            axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.2, linewidth=0)
        axes.set(title=clients, xlabel="communication rounds", xlim=(1, 40), ylim=(8, 58))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("test accuracy, %" if file == "ten" else "")
    figure.axes[0].legend(frameon=False, loc="lower right")
    return figure


def jacobians() -> str:
    """Kernels and products of each network: ours, and the library that is fastest of the others."""
    ways: dict[str, dict[str, Row]] = {}
    for row in read("bench/jacobians.json")["rows"]:
        network, _, library = row["what"].partition(": ")
        ways.setdefault(network, {})[library] = row
    lines = []
    for network, of in ways.items():
        name, _, task = network.partition(", ")
        ours = of.pop("ntkfl")
        best = min(of, key=lambda library: of[library]["seconds"])
        times = of[best]["ratio"]
        apart = [f"{times:.0f}" if times >= 100 else f"{times:.2g}", f"{of[best]['details']['memory_ratio']:.2g}"]
        lines.append([task or "kernel", name, seconds_text(ours["seconds"]), best, *apart])
    return table(["task", "network", "ours", "fastest other", "its time to ours", "its peak to ours"], lines)


def seconds_text(seconds: float) -> str:
    return unbroken(f"{seconds:.3g} s" if seconds >= 0.2 else f"{1e3 * seconds:.3g} ms")


TABLES: dict[str, Callable[[], str]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        readme, headline, table1, paper, tally, findings, byzantine, private, hospitals, networks, studies, leaks,
        seconds, bench, costs, memory, jacobians, silos,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """`text` with every table made anew."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


# The README's picture.


def picture(rounds: int = 80) -> Figure:
    """Accuracy against rounds, and the bytes in both directions to 85 %: means and spread of the five seeds. A run that
    ended with 85 % stays there, as long as another seed's goes on.
    """
    rows = rows_of("headline")
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for place, (label, (name, color)) in enumerate(SHOWN.items()):
        percents = [[100 * a for a in curve[:rounds]] for curve in rows[label]["accuracy"]]
        longest = max(map(len, percents))
        columns = list(zip(*(own + own[-1:] * (longest - len(own)) for own in percents), strict=True))
        x = range(1, len(columns) + 1)
        curves.plot(x, [statistics.mean(c) for c in columns], color=color, label=name.partition(" (")[0], linewidth=2)
        curves.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.2, linewidth=0)
        there = reached(rows[label], 0.85)
        up, down, hit = (statistics.mean(arrived(there[what])) for what in ("uplink_mib", "downlink_mib", "rounds"))
        bars.barh(place, up, color=color)
        bars.barh(place, down, left=up, color=color, alpha=0.45)
        bars.text(up + down + 15, place, f"{up + down:.0f} MiB\n{hit:.0f} rounds", va="center", fontsize=9)
    curves.axhline(85, color="black", linewidth=0.8, linestyle=":")
    curves.set(xlabel="communication rounds", ylabel="test accuracy, %", ylim=(60, 90), xlim=(1, rounds))
    curves.legend(frameon=False, loc="lower right")
    bars.set(xlabel="MiB up (dark) and down (light) to 85 %", xlim=(0, 1250), yticks=[])
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        if (new := filled(text)) != text:
            stale.append(name)
            path.write_text(new)
    picture().savefig(ROOT / "docs" / "headline.png", dpi=130)
    silos_picture().savefig(ROOT / "docs" / "silos.png", dpi=130)
    sys.stdout.write(f"rewrote {', '.join(stale)}\n" if stale else "every table is as its results say\n")


if __name__ == "__main__":
    main()
