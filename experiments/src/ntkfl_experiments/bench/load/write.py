"""A load's figures for people and for programs: lines, a picture, JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ntkfl.errors import ConfigError
from ntkfl_experiments.bench.machine import look, versions
from ntkfl_experiments.bench.rows import Setting
from ntkfl_experiments.bench.table import write_json

_COLOURS = {"shuffler": "#1b6ca8", "key-server": "#c8553d"}
_LOAD, _PRESSURE = "#1b6ca8", "#E69F00"


def figures(document: dict[str, Any]) -> dict[str, str]:
    """What was measured, in words, and the figures."""
    totals, enrolled, pressure = document["totals"], document["enrolment"]["key_server"], document["pressure"]
    again, little = totals["key_server"], pressure["memory"]
    found = {
        "key server, enrolments and seeds": f"{enrolled['per_second']:,.0f} requests a second, "
        f"p50 {enrolled['p50_ms']:,.0f} ms, p99 {enrolled['p99_ms']:,.0f} ms",
        "key server, ρ asked for again by all who upload": f"{again['requests']:,} requests, "
        f"{again['per_second']:,.0f} a second over the whole time, p50 {again['p50_ms']:,.0f} ms, "
        f"p99 {again['p99_ms']:,.0f} ms",
        "shuffler, uploads": f"{totals['rows_per_second']:,.0f} rows a second ({totals['mib_per_second']:.1f} MiB), "
        f"an upload p50 {totals['p50_ms'] / 1e3:.2f} s, p99 {totals['p99_ms'] / 1e3:.2f} s",
        "rows at the aggregator's end": f"{totals['rows']:,} in {totals['rounds']} rounds, {totals['seconds']:.0f} s: "
        f"{totals['lost']} lost, {totals['duplicated']} duplicated, every byte compared",
        "uploads sent twice": f"{totals['sent_twice_and_refused']} refused",
        f"with room for {pressure['held_mib']} MiB of uploads": f"told {pressure['turned_away']} times to come back; "
        f"{sum(r['lost'] for r in document['rounds'] if r['phase'] == 'pressure')} rows lost; with "
        f"{pressure['sent_at_once_mib']:.0f} MiB sent at once, the shuffler's memory went from "
        f"{little['idle_mib']:.0f} to {little['peak_mib']:.0f} MiB at most",
    }
    for service, m in totals["memory"].items():
        found[f"memory of the {service}"] = (
            f"{m['second_quarter_mib']:.0f} MiB in the second quarter of the time, {m['last_quarter_mib']:.0f} in the "
            f"last, {m['peak_mib']:.0f} at most"
        )
    met = ", ".join(f"{what} ({count})" for what, count in document["hostile"].items())
    return found | {"hostile connections": met or "none"}


def write(document: dict[str, Any], folder: Path, command: Sequence[str]) -> list[Path]:
    """load.json, table.md and load.png."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    machine = look(Setting(quick=True))
    about: dict[str, Any] = {"command": shlex.join(command), "processor": machine.processor, "cores": machine.cores}
    about["load_average_after"] = machine.load
    whole: dict[str, Any] = about | {"versions": versions()} | document
    write_json(folder / "load.json", whole)
    where = f"{whole['processor']}, {whole['cores']} cores, load average {whole['load_average_after']:.1f} at the end"
    lines = [
        f"`{whole['command']}`, {where}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {what} | {found} |" for what, found in figures(document).items()),
    ]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    draw(document, folder / "load.png")
    return [folder / name for name in ("load.json", "table.md", "load.png")]


def draw(document: dict[str, Any], path: Path) -> None:
    rounds, memory, settings = document["rounds"], document["memory"], document["settings"]
    figure = Figure(figsize=(9, 8.2), layout="constrained")
    speed, delay, resident = figure.subplots(3, 1, sharex=True)
    for phase, colour, label in (
        ("load", _LOAD, "under load"),
        ("pressure", _PRESSURE, f"with memory for {document['pressure']['held_mib']} MiB of uploads"),
    ):
        chosen = [r for r in rounds if r["phase"] == phase]
        at = [r["at"] for r in chosen]
        half = "half of 100" if phase == "load" else None
        speed.plot(at, [r["rows_per_second"] for r in chosen], "o", color=colour, label=label, markersize=5)
        delay.plot(
            at,
            [r["upload"]["p99_ms"] / 1e3 for r in chosen],
            "o",
            color=colour,
            markersize=5,
            label=half and "99 of 100",
        )
        delay.plot(
            at, [r["upload"]["p50_ms"] / 1e3 for r in chosen], "o", color=colour, markersize=5, mfc="none", label=half
        )
    for service, values in memory["resident_mib"].items():
        padded = [0.0] * (len(memory["seconds"]) - len(values)) + values
        resident.plot(memory["seconds"], [v or float("nan") for v in padded], color=_COLOURS[service], label=service)
    first, last = memory["load_from_to"]
    for panel in (speed, delay, resident):
        panel.axvspan(first, last, color="#eef2f5", zorder=0)
        panel.set_ylim(bottom=0)
        panel.margins(y=0.15)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, loc="best", ncols=2)
    size = settings["rows"] * settings["row_bytes"] / 1e6
    speed.set_title(
        f"{settings['clients']:,} clients enrolled, {settings['at_once']} uploading {settings['rows']} rows "
        f"({size:.2f} MB) each at once, {settings['hostile']} hostile connections",
        loc="left",
        fontsize=10,
    )
    speed.set_ylabel("rows a second")
    delay.set_ylabel("an upload takes,\nwaiting included, s")
    resident.set_ylabel("resident memory, MiB")
    resident.set_xlabel("seconds")
    figure.savefig(path, dpi=130)
