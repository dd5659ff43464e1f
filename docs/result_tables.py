"""Tables and sentences of docs/results.md, each from the files that `ntkfl compare` and `reproduce` wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ntkfl_experiments.paper.curves import times_fewer

from ntkfl.progress import percent as in_percent

RESULTS = Path(__file__).parent.parent / "results"
Row = dict[str, Any]  # of a comparison's results.json


def table(headers: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *body]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)


def percent(part: float) -> str:
    return in_percent(part, 0)


def rows_of(name: str) -> dict[str, Row]:
    """A comparison's rows by label."""
    return {row["label"]: row for row in json.loads((RESULTS / name / "results.json").read_text())["rows"]}


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


def sent(row: Row, target: float) -> list[str]:
    """MiB up, down and their sum to the target; empty where a seed did not get there, or downlink was not recorded."""
    reached = next(r for r in row["reached"] if r["target"] == target)
    if None in reached["rounds"]:
        return ["", "", ""]
    up = statistics.mean(reached["uplink_mib"])
    if "downlink_mib" not in reached:
        return [f"{up:,.0f}", "", ""]
    down = statistics.mean(reached["downlink_mib"])
    return [f"{up:,.0f}", f"{down:,.0f}", f"{up + down:,.0f}"]


# Variants of lines that stay: `table.md` of the comparison has them.
MINOR = frozenset(
    {
        "NTK-FL from sums, plain labels",
        "NTK-FL, plain labels",
        "FedAvg, smoothed labels",
        "TCT, 5 rounds of FedAvg",
        "TCT, 20 rounds of FedAvg, 8000 features",
        "ridge, 500 Fourier features",
    }
)


def equal_terms(name: str, target: float = 0.85) -> str:
    """The methods of a comparison, without minor variants: rounds to the target of each round's own weights and of
    averaged ones, bytes and final accuracy of the latter. 'X, averaged' beside 'X' is the same method with settings
    chosen for averaged weights.
    """
    rows = rows_of(name)
    lines = []
    for label, row in rows.items():
        if label in MINOR or (label.endswith(", averaged") and label.removesuffix(", averaged") in rows):
            continue
        best = rows.get(f"{label}, averaged", row)
        own = next(r for r in row["reached_unaveraged"] if r["target"] == target)["rounds"]
        averaged = next(r for r in best["reached"] if r["target"] == target)["rounds"]
        shown = best if row["accuracy"] != row["last_accuracy"] or best is not row else None
        hits = [hit for hit in (averaged if shown else own) if hit is not None]
        order = (len(own) - len(hits), statistics.mean(hits) if hits else 0.0)
        up, _, both = sent(shown or row, target)
        cells = [label.removesuffix(", averaged"), rounds_text(own, row["length"])]
        cells += [rounds_text(averaged, best["length"]) if shown else "", up, both]
        end = statistics.mean(curve[-1] for curve in (shown or row)["accuracy"])
        lines.append((order, [*cells, unbroken(f"{100 * end:.1f} ({row['length']})")]))
    headers = ["method", f"rounds to {percent(target)}, own weights", "averaged", "MiB up", "up and down"]
    headers.append("% at the end (round)")
    return table(headers, [cells for _, cells in sorted(lines, key=lambda line: line[0])])


def findings(tally: Sequence[int], paper: Sequence[float]) -> str:
    """What the results come to. `tally` counts the paper's claims that hold, do not and cannot be judged; `paper` has
    the times fewer rounds that its own choices take, one per dataset.
    """
    main = rows_of("headline")
    shown = [main["NTK-FL from sums"], main["FedPM"], main["FedAdam"], rows_of("sums/main")["FedAvg, averaged"]]
    shown.append(main["ridge, 1500 Fourier features"])
    rounds = [f"{statistics.mean(first_hits(row['accuracy'], 0.85)):.1f}" for row in shown]  # type: ignore[type-var]
    mib = [sent(row, 0.85)[2] for row in shown]
    wide = sent(rows_of("rivals")["NTK-FL from sums, float32"], 0.85)[2]
    backbone = json.loads((RESULTS / "backbone" / "measured.json").read_text())
    heads = [backbone[f"K-FAC / one label per client / seed {seed}"]["accuracy"] for seed in (20, 21, 22)]
    once, thrice = (statistics.mean(head[i] for head in heads) for i in (0, 2))
    noisy = rows_of("private_sums/epsilon-1")["private sums"]
    kept = 100 * statistics.mean(curve[-1] for curve in noisy["accuracy"])
    attacks = json.loads((RESULTS / "paper" / "claims" / "result.json").read_text())["data"]["shuffled"]
    lines = [
        "**Few rounds.** On Fashion-MNIST with clients whose labels differ, NTK-FL from sums reaches 85 % in "
        f"{rounds[0]} rounds. The best rivals that train the same network without shared data take {rounds[1]} (FedPM) "
        f"and {rounds[2]} (FedAdam), FedAvg {rounds[3]}, all with searched settings; ridge on random features gets "
        f"there in {rounds[4]}, and ends at {_end('ridge, 1500 Fourier features, all clients')} % where sums end at "
        f"{_end('NTK-FL from sums')} ([headline](#headline)).",
        f"**Few bytes.** That is {mib[0]} MiB up and down together ({wide} with numbers of 32 bits, as the others "
        f"have), against {mib[1]}, {mib[2]}, {mib[3]} and {mib[4]} ([headline](#headline)).",
        "**One round with a pretrained network.** CIFAR-10 behind a frozen EfficientNet-Lite0, one label per client: "
        f"{once:.1f} % after one round, {thrice:.1f} after three ([backbones](methods.md#measured-with-a-backbone)).",
        f"**The paper.** Of {sum(tally)} claims {tally[0]} hold, {tally[1]} do not, {tally[2]} cannot be judged. With "
        f"the paper's own choices NTK-FL takes {min(paper):.1f} to {max(paper):.1f} times fewer rounds than FedAvg, "
        "where it says an order of magnitude ([claim by claim](paper.md#verdicts)).",
        "**Noise hides, sparsifying and shuffling do not.** Pictures are read off shuffled, sparse rows with an SSIM "
        f"of {attacks['ssim']:.2f}, where inputs are not projected ([audit](audit.md)). With differential privacy at "
        f"ε = {noisy['setting']['epsilon']:g} per record and all 300 clients in every round, {kept:.1f} % remain after "
        f"{noisy['length']} rounds ([privacy](privacy.md#what-it-costs)).",
    ]
    return "".join(f"{i}. {line}\n" for i, line in enumerate(lines, start=1))


def _end(label: str) -> str:
    """Accuracy at the end of a method's runs beside all rivals, in percent."""
    return f"{100 * statistics.mean(curve[-1] for curve in rows_of('rivals')[label]['accuracy']):.1f}"


# The setting in words, its file, whether averaged weights count, the target, the fast one's label and name, the slow
# ones' labels.
BEST = ("FedPM", "FedAdam", "FedAvg")
RATIOS = (
    ("Fashion-MNIST", "rivals", True, 0.85, "NTK-FL from sums", "from sums", BEST),
    ("Fashion-MNIST", "rivals", False, 0.85, "NTK-FL (paper)", "paper's", ("FedPM", "FedAvg")),
    ("CNN", "architectures/cnn", True, 0.84, "NTK-FL", "from rows", ("FedAvg, averaged",)),
    ("GRU", "architectures/gru", True, 0.90, "NTK-FL", "from rows", ("FedAvg, averaged",)),
)


def ratios() -> str:
    """How many times fewer rounds, first hit against first hit, seed by seed."""
    lines = []
    for setting, name, averaged, target, fast, called, slow in RATIOS:
        rows, curves = rows_of(name), "accuracy" if averaged else "last_accuracy"
        hits = first_hits(rows[fast][curves], target)
        for label in slow:
            others = first_hits(rows[label][curves], target)
            found = times_fewer(others, hits)
            said = "not in every seed"
            if found is not None:
                said = unbroken(f"**{found[0]:.1f}** ({found[1]:.1f} to {found[2]:.1f})")
            cells = [rounds_text(hits, rows[fast]["length"]), rounds_text(others, rows[label]["length"]), said]
            weights = "averaged" if averaged else "own weights"
            of = f"{setting}, {weights}, {percent(target)}"
            lines.append([of, called, label.removesuffix(", averaged"), *cells])
    return table(["setting", "NTK-FL", "against", "its rounds", "theirs", "times fewer (by seed)"], lines)


CP = {
    "CP-NTK-FL": "`cp-ntk-fl`",
    "CP-NTK-FL, factored (as sending z)": "the same, factored and not sparse: as sending projected inputs",
    "NTK-FL with the paper's stages": "`ntk-fl` with the paper's stages",
    "the same, paper's kernel": "the same, the paper's kernel, not averaged",
}


def private() -> str:
    """CP-NTK-FL and its variants, beside the paper's line."""
    rows, lines = rows_of("private"), [["the paper", "26", "386", "", "", "", ""]]
    for label, called in CP.items():
        row = rows[label]
        reached = next(r for r in row["reached"] if r["target"] == 0.85)["rounds"]
        at = [f"{100 * _at(row, r):.1f}" if row["length"] >= r else "" for r in (10, 26)]
        lines.append([called, rounds_text(reached, row["length"]), *sent(row, 0.85), *at])
    return table(["variant", "rounds to 85 %", "MiB up", "down", "sum", "% at round 10", "26"], lines)


def _at(row: Row, round: int) -> float:
    return statistics.mean(curve[round - 1] for curve in row["accuracy"])


NETWORKS = (
    ("CNN, Fashion-MNIST", "architectures/cnn", 0.84, ("NTK-FL", "FedAvg, averaged")),
    ("GRU, digits", "architectures/gru", 0.90, ("NTK-FL", "FedAvg, averaged")),
    ("residual, CIFAR-10", "architectures/resnet", 0.30, ("NTK-FL", "FedAvg, averaged")),
    ("CNN, from sums", "sums/cnn", 0.84, ("sums", "FedAvg, averaged")),
    ("residual, from sums", "sums/resnet", 0.40, ("sums", "FedAvg, averaged")),
)


def networks() -> str:
    """Other architectures: rounds, accuracy at the end, and bytes of a round."""
    lines = []
    for network, name, target, labels in NETWORKS:
        for label in labels:
            row = rows_of(name)[label]
            hits = first_hits(row["accuracy"], target)
            ends = statistics.mean(curve[-1] for curve in row["accuracy"])
            method = "NTK-FL from sums" if label == "sums" else label
            end = f"{100 * ends:.1f} ({row['length']})"
            reached = f"{percent(target)}: {rounds_text(hits, row['length'])}"
            lines.append([network, method, str(len(row["accuracy"])), reached, end, *_per_round(row)])
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


# (name, its file, what Flower's baseline `niid_bench` publishes after 50 rounds)
ONE_LABEL = (
    ("Fashion-MNIST", "niid-bench", {"FedAvg": 10.0, "SCAFFOLD": 10.0, "FedProx": 38.0, "FedNova": 11.1}),
    ("CIFAR-10", "niid-bench-cifar10", {"FedAvg": 10.0, "SCAFFOLD": 10.0, "FedProx": 11.6, "FedNova": 10.0}),
)


def one_label() -> str:
    """Ten clients of one label each: accuracy by round, bytes of a round, and what Flower publishes at round 50."""
    lines = []
    for data, name, published in ONE_LABEL:
        if not (RESULTS / name).exists():
            continue
        for label, row in rows_of(name).items():
            if label == "FedNova":  # FedAvg, where clients take equally many steps
                continue
            at = [f"{100 * _at(row, r):.1f}" if row["length"] >= r else "" for r in (1, 5, 10, 20, 50)]
            flower = f"{published[label]:.1f}" if label in published else ""
            called = {"sums": "NTK-FL from sums", "rows (NTK-FL)": "NTK-FL from rows"}.get(label, label)
            lines.append([data, called, *at, flower, *_per_round(row)])
    rounds = ["% at round 1", "5", "10", "20", "50"]
    return table(["data", "method", *rounds, "Flower's at 50", "MiB up per round", "down"], lines)
