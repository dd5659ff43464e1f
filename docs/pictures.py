"""The README's picture, drawn from the files in results/: `make tables` writes them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
SHOWN = {
    "NTK-FL from sums": ("NTK-FL from sums", "#0072b2"),
    "ridge, 1500 Fourier features": ("ridge on 1,500 random features", "#009e73"),
    "FedPM": ("FedPM as searched", "#cc79a7"),
    "FedAdam": ("FedAdam as searched", "#e69f00"),
    "FedAvg, averaged": ("FedAvg, plain mean", "#999999"),
}
TARGET, ROUNDS = 0.85, 60


def headline() -> Figure:
    """Accuracy against rounds, and the bytes in both directions to 85 %: means and spread of the five seeds."""
    files = ("sums/main", "rivals")  # FedAvg with a plain mean is in the first, all others in the second
    found = [json.loads((ROOT / "results" / name / "results.json").read_text())["rows"] for name in files]
    rows = {row["label"]: row for part in found for row in part}
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for place, (label, (name, color)) in enumerate(SHOWN.items()):
        seeds = [[100 * a for a in curve[:ROUNDS]] for curve in rows[label]["accuracy"]]
        length = min(map(len, seeds))
        rounds = range(1, length + 1)
        columns = [[curve[r - 1] for curve in seeds] for r in rounds]
        curves.plot(rounds, [statistics.mean(c) for c in columns], color=color, label=name, linewidth=2)
        curves.fill_between(
            rounds, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.2, linewidth=0
        )
        reached = next(r for r in rows[label]["reached"] if r["target"] == TARGET)
        up, down = (statistics.mean(reached[way]) for way in ("uplink_mib", "downlink_mib"))
        bars.barh(place, up, color=color)
        bars.barh(place, down, left=up, color=color, alpha=0.45)
        hit = statistics.mean(reached["rounds"])
        bars.text(up + down + 15, place, f"{up + down:.0f} MiB\n{hit:.0f} rounds", va="center", fontsize=9)
    curves.axhline(100 * TARGET, color="black", linewidth=0.8, linestyle=":")
    curves.set(xlabel="communication rounds", ylabel="test accuracy, %", ylim=(60, 90), xlim=(1, ROUNDS))
    curves.legend(frameon=False, loc="lower right")
    bars.set(xlabel="MiB up (dark) and down (light) to 85 %", xlim=(0, 1250), yticks=[])
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    headline().savefig(ROOT / "docs" / "headline.png", dpi=130)
