"""The page: one file that works offline, with everything it needs inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files as resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ntkfl.atomic import write_atomically
from ntkfl.errors import ConfigError
from ntkfl.report.runs import FoundRun, require
from ntkfl.report.view import details, files, view
from ntkfl.version import __version__

_SCRIPTS = (
    "format.js", "chart.js", "pictures.js", "run_table.js", "tables.js", "rejected.js", "privacy.js", "page.js",
)  # fmt: skip


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of the runs in `paths` to `out`."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"a report is written as .html, not {out.name}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.absolute().parent}")
    runs, targets = require(paths)
    first = {run.group: run.id for run in reversed(runs)}  # one seed of each curve stands for the others
    document = {
        "title": title(paths),
        "version": __version__,
        "live": False,
        "targets": targets,
        "runs": [view(run) | {"links": _links(run, out)} for run in runs],
        "details": {run.id: details(run) for run in runs if first[run.group] == run.id},
    }
    try:
        write_atomically(out, render(document).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def render(document: dict[str, Any]) -> str:
    """The page around a document. Its policy names its own script and style and nothing else: it can load nothing."""
    folder = resources("ntkfl.report") / "assets"
    style = (folder / "page.css").read_text()
    script = "\n".join((folder / name).read_text() for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data: 'self'; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    page = (folder / "page.html").read_text()
    # "<" is the only character by which text could leave its element.
    data = json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {"policy": policy, "title": escape(str(document["title"])), "style": style, "script": script, "data": data}
    return re.sub(r"@(policy|title|style|script|data)@", lambda found: parts[found[1]], page)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def title(paths: Sequence[Path]) -> str:
    """The names of the folders, the first three of many."""
    names = [path.resolve().name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _links(run: FoundRun, out: Path) -> dict[str, str]:
    """The run's folder and files, relative to the page where both are on one disk side by side."""
    folder = run.folder.path.resolve()
    base = out.resolve().parent
    at = quote(folder.relative_to(base).as_posix()) if folder.is_relative_to(base) else folder.as_uri()
    return {"folder": f"{at}/", **{name: f"{at}/{name}" for name in files(run)}}
