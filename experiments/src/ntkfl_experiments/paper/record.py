"""What an item leaves behind: result.json with everything, figure.png, and findings.md for people."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ntkfl.atomic import write_atomically
from ntkfl.errors import ConfigError
from ntkfl.version import __version__
from ntkfl_experiments.paper.item import Findings, Item, ItemResult, Scale, Verdict

VERDICTS = {True: "holds", False: "does not hold", None: "cannot be judged"}


def folder_of(root: Path, name: str, scale: Scale) -> Path:
    """The paper's setting in NAME/, a quick look in NAME/quick/: a look never replaces a result."""
    return root / name if scale == "full" else root / name / "quick"


def write(folder: Path, item: Item, outcome: ItemResult, scale: Scale, command: str, seconds: float) -> Findings:
    """Everything into `folder`; returns what it says. `seconds` are of this call: kept runs say their own."""
    document: dict[str, Any] = {
        "name": item.name,
        "title": item.title,
        "scale": scale,
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "devices_of_runs": devices(outcome.data),
        "versions": {"ntkfl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "seeds": outcome.seeds,
        "settings": outcome.settings,
        "choices": outcome.choices,
        "data": json.loads(json.dumps(outcome.data)),  # judged as it will be read
    }
    found = judged(item, document)
    picture = io.BytesIO()
    outcome.figure.savefig(picture, format="png", dpi=120)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "result.json", (json.dumps(document, ensure_ascii=False) + "\n").encode())
        write_atomically(folder / "findings.md", markdown(item, document, found).encode())
        write_atomically(folder / "figure.png", picture.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; finished runs are kept") from None
    return found


def judged(item: Item, document: dict[str, Any]) -> Findings:
    """What the data of a result say, put into the result as well."""
    found = item.judge(document["data"])
    document["findings"], document["beside"] = stored(found)
    return found


def stored(found: Findings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Findings as result.json has them."""
    claims, beside = ([asdict(one) for one in part] for part in found)
    for claim in claims:
        del claim["short"]
    return claims, beside


def judge_again(folder: Path, item: Item) -> Findings:
    """A stored result judged by the code as it is now; its data, figure and origin stay."""
    path = folder / "result.json"
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no result of {item.name} in {folder}: run it first, without --judge") from None
    found = judged(item, document)
    write_atomically(path, (json.dumps(document, ensure_ascii=False) + "\n").encode())
    write_atomically(folder / "findings.md", markdown(item, document, found).encode())
    return found


def markdown(item: Item, document: dict[str, Any], found: Findings) -> str:
    claims, beside = found
    choices = "".join(f"- {choice}\n" for choice in document["choices"])
    measured = "".join(f"- {one.what}: {one.found}\n" for one in beside)
    return (
        f"# {item.name}: {item.title}\n\n`{document['command']}`\n\n![figure](figure.png)\n\n"
        + finding_table(claims)
        + (f"\nMeasured beside it, and not claimed by the paper:\n{measured}" if measured else "")
        + (f"\nWhat the paper leaves open, and we chose:\n{choices}" if choices else "")
    )


def finding_table(findings: Sequence[Verdict]) -> str:
    lines = ["| claim | the paper | here | |", "| --- | --- | --- | --- |"]
    for f in findings:
        note = f"; {f.note}" if f.note else ""
        lines.append(f"| {f.claim} | {f.paper} | {f.ours}{note} | {VERDICTS[f.holds]} |")
    return "\n".join(lines) + "\n"


def commit() -> str | None:
    """The commit of the source this runs from, with '+' where it was changed since; None outside a checkout."""
    here = Path(__file__).parent
    try:
        asked = {"cwd": here, "capture_output": True, "text": True, "timeout": 10}
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **asked)  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "--", str(here.parent)], **asked)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return None if found.returncode else found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def devices(data: Any) -> list[str]:
    """Where the runs in these data were made, as they noted it: kept runs may come from another machine."""
    if isinstance(data, dict):
        own = data.get("devices")
        if isinstance(own, list):
            return sorted(set(own))
        return sorted({name for value in data.values() for name in devices(value)})
    if isinstance(data, list):
        return sorted({name for value in data for name in devices(value)})
    return []
