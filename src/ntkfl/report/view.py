"""A run as the page shows it: plain values, ready for JSON. Its files may be somebody else's, and say anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ntkfl.compare.captions import caption, options
from ntkfl.errors import RunFolderError
from ntkfl.federation.config import NOTED
from ntkfl.federation.run_folder import Record
from ntkfl.report.runs import FoundRun, condition
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


def view(run: FoundRun, address: str = "") -> dict[str, Any]:
    """The run's name, condition, settings and series, and its files, which are found below `address`. A broken file is
    said in the run's own line, and no other's.
    """
    config: dict[str, Any] = {}
    records: list[Record] = []
    timings: list[Record] = []
    try:
        config = run.folder.config() if run.folder.holds_run else {}
        records = run.folder.history(run.rounds, run.stop_at)
        timings = run.folder.records("timings.jsonl")[: len(records)]
        kind, text = condition(run, config, records)
    except (RunFolderError, OSError, ValueError, TypeError, OverflowError) as error:
        kind, text = "failed", f"cannot be read: {error}"
    method = config.get("method")
    return {
        "id": run.id,
        "name": run.name,
        "group": run.group,
        "seed": run.seed if run.seed is not None else _number(config.get("seed")),
        "address": address,
        "files": list(files(run)),
        "targets": run.targets,
        "condition": kind,
        "text": text,
        "caption": run.caption or caption({name: table for name, table in config.items() if name != "method"}),
        "method": _text(method.get("name", "")) if isinstance(method, Mapping) else "",
        "changed": options(config),  # from the defaults, which are those of the method's paper
        "version": _text(config.get("ntkfl", "")),
        "rounds": [r.get("round", i + 1) for i, r in enumerate(records)],
        "series": _series(records, SERIES) | _series(timings, ["seconds"]),
        "rejected": rejections(records),
        "uplink": _by_kind(records, "uplink"),
        "downlink": _by_kind(records, "downlink"),
        "device": ", ".join(sorted({str(t["device"]) for t in timings if "device" in t})),
        "privacy": _privacy(config, records),
        "audit": {name: _audited(run, f"{name}.json") for name in ("findings", "canaries")},
        "settings": _settings({name: value for name, value in config.items() if name not in (*NOTED, "simulation")}),
    }


def rejections(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each kind and reason what it counts (`of`) and its count in every round; empty where nothing happened."""
    lines: list[dict[str, Any]] = []
    for kind, field, unit in REJECTED:
        rounds = [_counts(record.get(field)) for record in records]
        for why, _ in sum(rounds, Counter[str]()).most_common(_REASONS):
            lines.append({"kind": kind, "why": why, "of": unit, "counts": [counts[why] for counts in rounds]})
    return lines


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
        flat |= _settings(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": _text(value)}
    return flat


def _privacy(config: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any] | None:
    """A row of the table: what the run's settings state, and what its last record says is spent; None of an older
    run's, which states nothing.
    """
    stated = config.get("promises")
    if not isinstance(stated, Mapping):
        return None
    guarantees, sees = stated.get("guarantees"), stated.get("sees")
    listed = guarantees if isinstance(guarantees, list) else []
    return {
        "sees": {str(role): _text(line) for role, line in sees.items()} if isinstance(sees, Mapping) else {},
        "masks": _text(stated.get("sums", "on")) if stated.get("secure_sum") is True else "",
        "floor": _number(stated.get("floor")),
        "guarantees": [_guarantee(one) for one in listed if isinstance(one, Mapping)],
        "spent": _number(records[-1].get("epsilon")) if records else None,
        "uncovered": _text(stated.get("uncovered", "")),
        "simulated": config.get("simulation") is True,
    }


def _guarantee(stated: Mapping[str, Any]) -> dict[str, Any]:
    """One (ε, δ), for whom and against whom, and what it assumes."""
    assumed = stated.get("assumptions")
    words = {name: _text(stated.get(name, "")) for name in ("delta", "unit", "against")}
    lines = [_text(line) for line in assumed] if isinstance(assumed, list) else []
    return {"epsilon": _number(stated.get("epsilon")), **words, "assumptions": lines}


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


def _audited(run: FoundRun, name: str) -> Any:
    """What `ntkfl audit` left in the run's folder: its attacks' findings, or what canaries showed of ε; None if it is
    missing. No link is followed.
    """
    folder = run.folder.path / "audit"
    if folder.is_symlink():
        return {name: "cannot be read: its folder is a symbolic link, which is not followed"}
    try:
        return parse_json(read_unlinked(folder / name).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return {name: f"cannot be read: {error}"}
