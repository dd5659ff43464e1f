"""A run as the page shows it: plain values, ready for JSON. Its files may be somebody else's, and say anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ntkfl.compare.captions import caption
from ntkfl.errors import RunFolderError
from ntkfl.federation.run_folder import Record
from ntkfl.report.runs import Condition, FoundRun, condition, history
from ntkfl.safe_parse import parse_json, read_unlinked

# What is drawn, one number a round. Those a method does not have are left out.
SERIES = (
    "test_accuracy", "last_accuracy", "validation_accuracy", "test_loss", "train_loss", "validation_loss", "steps",
    "uplink_bytes", "downlink_bytes", "kernel_products", "solver_error",
)  # fmt: skip
FILES = ("config.toml", "history.jsonl", "timings.jsonl", "model.safetensors")
# What rounds leave out, and clients that failed: the kind as the page says it, the record's field, what is counted.
REJECTED = (
    ("rejected", "rejected", "rows"),
    ("rows made up", "made_up_rows", "rows"),
    ("rows trimmed", "trimmed_rows", "rows"),
    ("rows scaled down", "clipped_rows", "rows"),
    ("clients scaled down", "clipped_clients", "clients"),
    ("clients with something rejected", "rejected_clients", "clients"),
    ("Byzantine clients", "byzantine", "clients"),
    ("clients that failed", "failed", "clients"),
    ("the solver's way out", "solver_fallback", "rounds"),
)
_REASONS, _LONGEST = 8, 120  # reasons of a kind that are shown, and their characters: a client may say anything


def view(run: FoundRun) -> dict[str, Any]:
    """The run's name, condition, settings and series. A broken file is said in the run's own line, and no other's."""
    config: dict[str, Any] = {}
    records: list[Record] = []
    timings: list[Record] = []
    try:
        config = run.folder.config() if run.folder.holds_run else {}
        records = history(run)
        timings = run.folder.records("timings.jsonl")[: len(records)]
        how = condition(run, config, records)
    except (RunFolderError, OSError, ValueError, TypeError, OverflowError) as error:
        how = Condition("failed", f"cannot be read: {error}")
    rejected, counted = rejections(records)
    return {
        "id": run.id,
        "name": run.name,
        "group": run.group,
        "seed": run.seed if run.seed is not None else _number(config.get("seed")),
        "condition": how.kind,
        "text": how.text,
        "caption": run.caption or caption(config),
        "length": run.rounds or _number(config.get("rounds")),
        "rounds": [r.get("round", i + 1) for i, r in enumerate(records)],
        "series": _series(records, SERIES) | _series(timings, ["seconds"]) | counted,
        "rejected": rejected,
        "uplink": _by_kind(records, "uplink"),
        "downlink": _by_kind(records, "downlink"),
        "device": ", ".join(sorted({str(t["device"]) for t in timings if "device" in t})),
        "privacy": _privacy(config, records),
        "settings": _settings(config),
    }


def rejections(records: Sequence[Record]) -> tuple[list[dict[str, Any]], dict[str, list[float | None]]]:
    """Lines of a table, and by each line's `series` its count of every round; both empty where nothing happened.

    A line has `kind`, `why`, what it counts (`of`), `total`, in how many `rounds`, and the `first`.
    """
    lines: list[dict[str, Any]] = []
    series: dict[str, list[float | None]] = {}
    for kind, field, unit in REJECTED:
        counts = [_counts(record.get(field)) for record in records]
        for why, _ in sum(counts, Counter[str]()).most_common(_REASONS):
            values, name = [count[why] for count in counts], f"rejected/{kind}/{why}"
            at = [i for i, value in enumerate(values) if value]
            line = {"series": name, "kind": kind, "why": why, "of": unit, "total": sum(values), "rounds": len(at)}
            lines.append(line | {"first": records[at[0]].get("round", at[0] + 1)})
            series[name] = list(values)
    return lines, series


def _counts(value: object) -> Counter[str]:
    """How often, by reason: a number or a list of clients has none, a text is one, of names each has its own."""
    if isinstance(value, Mapping):
        found: Counter[str] = Counter()
        for name, what in value.items():
            reason, often = (what, 1) if isinstance(what, str) else (str(name), _whole(what))
            found[reason[:_LONGEST]] += often
        return +found
    if isinstance(value, str):
        return +Counter({value[:_LONGEST]: bool(value)})
    return +Counter({"": len(value) if isinstance(value, list) else _whole(value)})


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def _series(records: Sequence[Record], names: Sequence[str]) -> dict[str, list[float | None]]:
    """One number per round for each name that any record has."""
    found = {name: [_number(r.get(name)) for r in records] for name in names}
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def _number(value: object) -> float | None:
    """Six digits are more than a screen shows."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _by_kind(records: Sequence[Record], direction: str) -> dict[str, int]:
    """Bytes of all rounds by kind of message."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get(direction) or {})
    return dict(total)


def _settings(config: Mapping[str, Any], at: str = "") -> dict[str, str]:
    """Every setting by its dotted name, as text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if not at and key in ("shape", "simulation", "promises", "names", "standardization", "constant"):
            continue
        if isinstance(value, Mapping):
            flat |= _settings(value, f"{at}{key}.")
        else:
            flat[f"{at}{key}"] = _text(value)
    return flat


def _privacy(config: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any] | None:
    """What the run's settings state of its privacy, and what its last record says is spent; None of an older run's."""
    said = config.get("promises")
    if not isinstance(said, Mapping):
        return None
    stated = said.get("guarantees")
    promised = [_promise(one) for one in stated if isinstance(one, Mapping)] if isinstance(stated, list) else []
    last = records[-1] if records else {}
    spent = {name: last.get(name) for name in ("epsilon", "delta", "unit")}
    sees = said.get("sees")
    return {
        "guarantees": promised,
        "uncovered": _text(said.get("uncovered", "")),
        "spent": _size(spent) + f" after round {last.get('round')}" if _number(spent["epsilon"]) is not None else "",
        "simulated": config.get("simulation") is True,
        "secure_sum": said.get("secure_sum") is True,
        "sums": _text(said["sums"]) if "sums" in said else "",
        "floor": _number(said.get("floor")),
        "sees": {str(role): _text(line) for role, line in sees.items()} if isinstance(sees, Mapping) else {},
    }


def _promise(stated: Mapping[str, Any]) -> dict[str, Any]:
    """One guarantee in words, and what it assumes."""
    assumed = stated.get("assumptions")
    lines = [_text(line) for line in assumed] if isinstance(assumed, list) else []
    return {"says": f"{_size(stated)}, against {_text(stated.get('against'))}", "assumptions": lines}


def _size(of: Mapping[str, Any]) -> str:
    """(ε, δ) and the unit, in words."""
    epsilon = _number(of.get("epsilon"))
    size = "no finite ε" if epsilon is None else f"ε = {epsilon:.3g}"
    delta = _text(of.get("delta")).replace("e-0", "e-")
    return f"{size} at δ = {delta} for a {_text(of.get('unit'))}"


def _text(value: object) -> str:
    """A value as a person reads it; of a long list its ends and its length."""
    if isinstance(value, list) and len(value) > 6:
        return f"{_text(value[0])}, {_text(value[1])} … {_text(value[-1])} ({len(value)})"
    if isinstance(value, list):
        return ", ".join(_text(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def files(run: FoundRun) -> dict[str, Path]:
    """What of a run's folder may be looked at, by name: never its checkpoint, never what lies elsewhere."""
    paths = {name: run.folder.path / name for name in FILES}
    return {name: path for name, path in paths.items() if path.is_file() and not path.is_symlink()}


def details(run: FoundRun) -> dict[str, Any]:
    """What the page shows of a run beside its series: an audit's findings, and what canaries proved of its ε."""
    proved = _audited(run, "canaries.json")
    shown = [_number(proved.get(name)) for name in ("promised", "shown")] if isinstance(proved, Mapping) else [None]
    line = "" if None in shown else f"promised {shown[0]:.1f}, an attacker showed {shown[1]:.1f}"
    return {"audit": _audited(run, "findings.json"), "canaries": line}


def _audited(run: FoundRun, name: str) -> Any:
    """A file of `ntkfl audit` in the run's folder; None if it is missing. No link is followed."""
    folder = run.folder.path / "audit"
    if folder.is_symlink():
        return {name: "cannot be read: its folder is a symbolic link, which is not followed"}
    try:
        return parse_json(read_unlinked(folder / name).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return {name: f"cannot be read: {error}"}
