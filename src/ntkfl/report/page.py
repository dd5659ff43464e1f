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
from ntkfl.report import COLOURS
from ntkfl.report.runs import FoundRun, require
from ntkfl.report.view import view
from ntkfl.version import __version__

# In the order in which one uses another.
_SCRIPTS = ("elements.js", "numbers.js", "chart.js", "explore.js", "curves.js", "tables.js", "page.js")


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of the runs in `paths` to `out`."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"a report is written as .html, not {out.name}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.absolute().parent}")
    runs = [view(run, _address(run, out)) for run in require(paths)]
    try:
        write_atomically(out, render(title(paths), runs).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def render(title: str, runs: Sequence[dict[str, Any]], live: bool = False) -> str:
    """The page with these views of runs. Its policy names its own script and style only: it can load nothing else."""
    folder = resources("ntkfl.report") / "assets"
    style = (folder / "page.css").read_text()
    script = "\n".join((folder / name).read_text() for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data: 'self'; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    page = (folder / "page.html").read_text()
    document = {"title": title, "version": __version__, "colours": COLOURS, "live": live, "runs": runs}
    # "<" is the only character by which text could leave its element.
    data = json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {"policy": policy, "title": escape(title), "style": style, "script": script, "data": data}
    return re.sub(r"@(policy|title|style|script|data)@", lambda found: parts[found[1]], page)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def title(paths: Sequence[Path]) -> str:
    """The names of the folders, the first three of many."""
    names = [path.resolve().name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _address(run: FoundRun, out: Path) -> str:
    """The run's folder, relative to the page where it lies below the page's."""
    folder, base = run.folder.path.resolve(), out.resolve().parent
    return quote(folder.relative_to(base).as_posix()) if folder.is_relative_to(base) else folder.as_uri()
