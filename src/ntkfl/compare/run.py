"""A comparison carried out: settings searched on held-out clients, then every run, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ntkfl.atomic import write_atomically
from ntkfl.compare.captions import caption
from ntkfl.compare.results import Row, summarise, write
from ntkfl.compare.search import Chosen, Searches, search
from ntkfl.compare.spec import ALONE, Comparison
from ntkfl.compare.trials import Cell, Workers
from ntkfl.data.dataset import generator
from ntkfl.errors import ConfigError, NTKFLError, RunFolderError
from ntkfl.federation.config import load_data
from ntkfl.federation.run_folder import RunFolder
from ntkfl.options import Options
from ntkfl.safe_parse import parse_json, read_unlinked

PLAN = "plan.json"
_ALONE = 10  # clients of a seed that train alone


class Planned(Options):
    """One cell: its curve's label, its folder, and the length it is cut at."""

    label: str
    seed: int
    folder: str = Field(max_length=200)  # relative to the comparison's
    rounds: int = Field(gt=0)
    stop_at: float | None = None


class Plan(Options):
    """What a comparison set out to run: whoever looks meanwhile knows each cell's name."""

    name: str
    caption: str = ""
    targets: tuple[float, ...]
    cells: tuple[Planned, ...]


def compare(
    config: Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    *,
    workers: int = 0,
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Run a comparison and return its table, as a list of dictionaries. For a data frame:

        frame = pandas.DataFrame(ntkfl.compare("comparison.toml"))

    There is one row per method and seed: `method`, `seed`, `rounds` done, the last test `accuracy`, `uplink_mib` and
    `downlink_mib` in all, `seconds`, for each target `rounds to 85%` (None if it was not reached), and `failed`.

    `config` is a TOML file, or what such a file says. Runs and results are kept in `out` (runs/NAME by default), and
    what is finished is not computed again. Runs take place one after another in this process, or `workers` at a time in
    processes of their own; then the calling script needs `if __name__ == "__main__":`.
    """
    if isinstance(config, Path | str):
        comparison = Comparison.read(Path(config))
    else:
        comparison = Comparison(**{"name": "comparison"} | dict(config))
    comparison = comparison.prepared()[0]
    folder = Path(out or Path("runs") / comparison.name)
    with Workers(workers, device) as pool:
        rows, searches = carry_out(comparison, folder, pool)
    if pool.broken:
        raise NTKFLError(f"{pool.broken[0].label}, seed {pool.broken[0].config.seed}: {pool.broken[0].error}")
    write(folder, comparison, rows, searches, "ntkfl.compare(…)")
    return [line for row in rows for line in row.lines()]


def carry_out(
    comparison: Comparison, folder: Path, pool: Workers, planned: Callable[[int], None] = lambda _: None
) -> tuple[list[Row], Searches]:
    """The rows of a prepared comparison in the entries' order, and what each search found. Finished runs under `folder`
    are taken as they are. An entry whose search chose nothing is not run. `planned` is told how many runs are left once
    settings are chosen.
    """
    with RunFolder(folder).locked():  # another comparison here would meet this one's runs half done
        chosen = search(comparison, folder / "search", pool.run)
        cells = {
            label: [
                [] if found.nothing else _cells(comparison, found, seed, folder / "cells") for seed in comparison.seeds
            ]
            for label, found in chosen.items()
        }
        every = [cell for groups in cells.values() for group in groups for cell in group]
        write_plan(folder, comparison, every)
        planned(len({cell.key for cell in every if not cell.finished}))
        pool.run(every)
    rows = [
        summarise(comparison, label, found.entry.method | dict(found.best), cells[label])
        for label, found in chosen.items()
    ]
    return rows, chosen


def _cells(comparison: Comparison, found: Chosen, seed: int, root: Path) -> list[Cell]:
    """An entry's runs of one seed with the options its search chose: one, or one for each client that trains alone."""
    entry, config = found.entry, comparison.run(found.entry, seed, dict(found.best))
    if entry.label != ALONE:
        return [Cell(entry.label, config, root)]
    clients = len(load_data(config))
    drawn = generator(seed, "alone").permutation(clients)[:_ALONE]
    return [Cell(f"client {client} alone", config, root, int(client)) for client in sorted(drawn)]


def write_plan(folder: Path, comparison: Comparison, cells: Sequence[Cell]) -> None:
    """plan.json; clients that train alone are no curves of the report and not in it."""
    planned = [
        Planned(label=c.label, seed=c.config.seed, folder=path, rounds=c.config.rounds, stop_at=c.config.stop_at)
        for c in cells
        for path in [str(c.folder.path.relative_to(folder))]
        if c.client is None
    ]
    folder.mkdir(parents=True, exist_ok=True)
    head = caption(comparison.common)
    plan = Plan(name=comparison.name, caption=head, targets=comparison.targets, cells=tuple(planned))
    write_atomically(folder / PLAN, plan.model_dump_json(indent=1).encode())


def read_plan(folder: Path) -> Plan:
    """The plan in `folder`. A folder's name in it never leads outside."""
    path = folder / PLAN
    try:
        plan = Plan(**parse_json(read_unlinked(path).decode()))
        inside = all((folder / cell.folder).resolve().is_relative_to(folder.resolve()) for cell in plan.cells)
    except (OSError, ValueError, TypeError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise RunFolderError(f"{path} is broken ({reason}): run the comparison again, it writes it anew") from None
    if not inside:
        raise RunFolderError(
            f"{path} names folders outside {folder}: it was not written by a comparison in that folder"
        )
    return plan
