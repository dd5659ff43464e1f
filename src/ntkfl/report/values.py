"""What each client was worth, as `ntkfl value` wrote it into the run's folder."""

from __future__ import annotations

from typing import Any

from ntkfl.report.runs import FoundRun
from ntkfl.safe_parse import parse_json

FILE = "values.json"
_HUGE = 1e15  # no count or value of clients is as large; NaN is not below it either
_LONGEST = 60  # characters of a client's name
_MOST = 100  # clients that are drawn: those of largest value, and the smallest


def client_values(run: FoundRun) -> dict[str, Any] | None:
    """Under `clients` each client's `client`, `name`, `samples`, `value` and standard `error`, the largest value first,
    and `left_out`, how many of the middle are not shown. None where the folder has none that can be read.
    """
    path = run.folder.path / FILE
    if not path.is_file() or path.is_symlink():
        return None
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError):
        return None
    rows = [_row(entry) for entry in found] if isinstance(found, list) else []
    known = sorted((row for row in rows if row is not None), key=lambda row: -row["value"])
    if not known:
        return None
    left_out = max(0, len(known) - _MOST)
    half = _MOST // 2
    return {"clients": known if not left_out else known[:half] + known[-half:], "left_out": left_out}


def _row(entry: object) -> dict[str, Any] | None:
    if not isinstance(entry, dict):
        return None
    numbers = [entry.get(name) for name in ("client", "samples", "value", "error")]
    if any(isinstance(n, bool) or not isinstance(n, int | float) or not -_HUGE < n < _HUGE for n in numbers):
        return None
    client, samples, value, error = numbers
    name = entry.get("name")
    return {
        "client": client,
        "name": name[:_LONGEST] if isinstance(name, str) else "",
        "samples": samples,
        "value": value,
        "error": abs(error),  # type: ignore[arg-type]
    }
