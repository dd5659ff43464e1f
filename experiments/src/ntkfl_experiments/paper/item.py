"""One figure, table or statement of the paper: how it is worked out, what comes of it, and the files it leaves.

Finished work is kept: an answer (`Context.cells`) or a run of a comparison is never worked out twice. A result is
`result.json` with everything, `figure.png`, and `findings.md` for people.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.console import Console

from ntkfl.atomic import write_atomically
from ntkfl.cli.compare import Watcher
from ntkfl.compare.results import Row
from ntkfl.compare.run import carry_out
from ntkfl.compare.search import Searches
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Workers
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.progress import ProgressBar
from ntkfl.version import __version__, commit

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
VERDICTS = {True: "holds", False: "does not hold", None: "cannot be judged"}
Key = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """How an item is to be worked out. `folder` keeps what is finished, so that nothing is computed twice."""

    scale: Scale
    folder: Path
    device: str | None = None
    workers: int = 1
    quiet: bool = True

    @property
    def quick(self) -> bool:
        return self.scale == "quick"

    @property
    def console(self) -> Console:
        return Console(highlight=False, quiet=self.quiet)

    def cells(
        self, what: str, keys: Sequence[Mapping[str, Any]], compute: Callable[[Mapping[str, Any]], Any]
    ) -> list[Any]:
        """compute(key) for each key, in order; answers (JSON values) of an earlier call are read, not computed.

        A key must hold everything its answer depends on: sizes, seeds, data.
        """
        found = []
        with ProgressBar(len(keys), quiet=self.quiet) as bar:
            bar.begin(what)
            for key in keys:
                found.append(self._kept(what, key, compute))
                bar.end()
        return found

    def _kept(self, what: str, key: Mapping[str, Any], compute: Callable[[Mapping[str, Any]], Any]) -> Any:
        name = hashlib.sha256(json.dumps([what, key], sort_keys=True).encode()).hexdigest()[:16]
        path = self.folder / "answers" / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())["answer"]
        answer = json.loads(json.dumps(compute(key)))  # what is read later is what is used now
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"what": what, "key": key, "answer": answer}).encode())
        return answer

    def compare(self, comparison: Comparison) -> tuple[list[Row], Searches]:
        """A comparison's rows; its finished runs are kept under its name, for all items that use that name."""
        watcher = Watcher(self.console)
        with Workers(self.workers, self.device, watcher.watch) as pool, watcher.status:
            found = carry_out(comparison.prepared()[0], self.folder.parent / comparison.name, pool)
        if pool.broken:
            cell = pool.broken[0]
            raise NTKFLError(f"{cell.label}, seed {cell.config.seed}: {cell.error}")
        return found


def crossed(axes: Mapping[str, Iterable[Any]], **same: Any) -> list[Key]:
    """Every combination of the axes' values, the last axis fastest, each with what is the same in all."""
    return [{**same, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]


@dataclass(frozen=True)
class Verdict:
    """One claim of the paper beside what was measured; `holds` is None where it cannot be judged, and `note` says why.

    Items that measure the same claim in several settings give it the same words: it is counted once. `short` is `ours`
    in a few words, for a table of all claims; it is made anew from the data and not stored.
    """

    claim: str
    paper: str
    ours: str
    holds: bool | None
    note: str = ""
    short: str = ""


@dataclass(frozen=True)
class Beside:
    """Something measured on the way that the paper does not claim."""

    what: str
    found: str


Findings = tuple[list[Verdict], list[Beside]]


@dataclass(frozen=True)
class ItemResult:
    """What an item's work gave. `choices` lists what the paper leaves open and we chose."""

    settings: dict[str, Any]
    seeds: list[int]
    data: dict[str, Any]
    figure: Figure
    choices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Item:
    """A name people type, what it is in the paper, the work, and what its data say.

    `judge` reads the data as they are kept, so that a stored result can be judged again without its work.
    """

    name: str
    title: str
    run: Callable[[Context], ItemResult]
    judge: Callable[[Mapping[str, Any]], Findings]


def folder_of(root: Path, name: str, scale: Scale) -> Path:
    """The paper's setting in NAME/, a quick look in NAME/quick/: a look never replaces a result."""
    return root / name if scale == "full" else root / name / "quick"


def write(folder: Path, item: Item, outcome: ItemResult, scale: Scale, seconds: float) -> Findings:
    """Everything into `folder`; returns what it says. `seconds` are of this call: kept runs say their own."""
    document: dict[str, Any] = {
        "name": item.name,
        "title": item.title,
        "scale": scale,
        "command": f"ntkfl reproduce {item.name} --scale {scale}",
        "commit": commit(),
        "devices_of_runs": devices(outcome.data),
        "versions": {"ntkfl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "seeds": outcome.seeds,
        "settings": outcome.settings,
        "choices": outcome.choices,
        "data": json.loads(json.dumps(outcome.data)),  # judged as it will be read
    }
    picture = io.BytesIO()
    outcome.figure.savefig(picture, format="png", dpi=120)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "figure.png", picture.getvalue())
        return _judged(folder, item, document)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; finished runs are kept") from None


def judge_again(folder: Path, item: Item) -> Findings:
    """A stored result judged by the code as it is now; its data, figure and origin stay."""
    try:
        document = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"no result of {item.name} in {folder}: run it first, without --judge") from None
    return _judged(folder, item, document)


def _judged(folder: Path, item: Item, document: dict[str, Any]) -> Findings:
    """Writes what the data of a result say into the result, and beside it for people."""
    found = item.judge(document["data"])
    document["findings"], document["beside"] = stored(found)
    write_atomically(folder / "result.json", (json.dumps(document, ensure_ascii=False) + "\n").encode())
    write_atomically(folder / "findings.md", markdown(item, document, found).encode())
    return found


def stored(found: Findings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Findings as result.json has them."""
    claims, beside = ([asdict(one) for one in part] for part in found)
    for claim in claims:
        del claim["short"]
    return claims, beside


def markdown(item: Item, document: dict[str, Any], found: Findings) -> str:
    claims, beside = found
    lines = ["| claim | the paper | here | |", "| --- | --- | --- | --- |"]
    for f in claims:
        note = f"; {f.note}" if f.note else ""
        lines.append(f"| {f.claim} | {f.paper} | {f.ours}{note} | {VERDICTS[f.holds]} |")
    if beside:
        lines += ["", "Measured beside it, and not claimed by the paper:"]
        lines += [f"- {one.what}: {one.found}" for one in beside]
    if document["choices"]:
        lines += ["", "What the paper leaves open, and we chose:", *(f"- {choice}" for choice in document["choices"])]
    head = f"# {item.name}: {item.title}\n\n`{document['command']}`\n\n![figure](figure.png)\n\n"
    return head + "\n".join(lines) + "\n"


def devices(data: Any) -> list[str]:
    """Where the runs in these data were made, as they noted it: kept runs may come from another machine."""
    if isinstance(data, dict) and isinstance(data.get("devices"), list):
        return sorted(set(data["devices"]))
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return sorted({name for value in inner for name in devices(value)})
