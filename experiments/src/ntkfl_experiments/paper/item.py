"""One figure, table or statement of the paper: how it is worked out, and what comes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from matplotlib.figure import Figure

from ntkfl.atomic import write_atomically
from ntkfl.compare.results import Row
from ntkfl.compare.run import Searches, carry_out
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell, Workers
from ntkfl.errors import NTKFLError

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")


class Show(Protocol):
    """Where progress is told: a terminal, a log, or nowhere."""

    def bar(self, what: str, total: int) -> Callable[[], None]:
        """Begin `total` pieces of work; call the result after each."""

    def runs(self, cells: Sequence[Cell]) -> None:
        """How far runs of a comparison are."""

    def line(self, text: str) -> None:
        """Something worth a line of its own."""


class Silent:
    """Progress nobody looks at."""

    def bar(self, what: str, total: int) -> Callable[[], None]:
        return lambda: None

    def runs(self, cells: Sequence[Cell]) -> None:
        pass

    def line(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Context:
    """How an item is to be worked out. `folder` keeps what is finished, so that nothing is computed twice."""

    scale: Scale
    folder: Path
    device: str | None = None
    workers: int = 1
    show: Show = field(default_factory=Silent)

    @property
    def quick(self) -> bool:
        return self.scale == "quick"

    def cells(
        self, what: str, keys: Sequence[Mapping[str, Any]], compute: Callable[[Mapping[str, Any]], Any]
    ) -> list[Any]:
        """compute(key) for each key, in order; answers (JSON values) of an earlier call are read, not computed.

        A key must hold everything its answer depends on: sizes, seeds, data.
        """
        done = self.show.bar(what, len(keys))
        found = []
        for key in keys:
            found.append(self._kept(what, key, compute))
            done()
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

    def pool(self) -> Workers:
        """Processes for runs of comparisons, shared by all comparisons of an item."""
        return Workers(self.workers, self.device)

    def compare(self, comparison: Comparison, pool: Workers) -> tuple[list[Row], Searches]:
        """A comparison's rows; its finished runs are kept under its name, for all items that use that name."""
        found = carry_out(comparison, self.folder.parent / comparison.name, pool, self.show.runs)
        if pool.broken:
            cell = pool.broken[0]
            raise NTKFLError(f"{cell.label}, seed {cell.config.seed}: {cell.error}")
        return found


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
