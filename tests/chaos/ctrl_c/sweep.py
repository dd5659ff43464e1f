"""Ctrl-C in every long verb, one after another, and a table of what was seen."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

from rich import box
from rich.console import Console
from rich.table import Table

from tests.chaos.ctrl_c.case import ORDINARY, Case, Found, attempts, short

from . import alone, together

VERBS: dict[str, Callable[[Path, ExitStack], Case]] = {
    "train": alone.train,
    "train, no --out": alone.train_kept_nowhere,
    "compare": alone.compare,
    "reproduce lemma3": alone.reproduce_pieces,
    "reproduce fig4c": alone.reproduce_runs,
    "audit": alone.audit,
    "bench": alone.bench,
    "data fetch": alone.fetch,
    "report": alone.report,
    "export": alone.export,
    "keys init": alone.keys_init,
    "watch": alone.watch,
    "serve key-server": together.key_server,
    "serve shuffler": together.shuffler,
    "serve shuffler, at work": together.shuffler_at_work,
    "aggregate": together.aggregate,
    "join": together.join,
    "flower simulate": together.flower_simulate,
    "flower server": together.flower_server,
    "flower client": together.flower_client,
    "flower run": together.flower_run,
    "flower bench": together.flower_bench,
}
HEADINGS = ("verb", "times", "median s", "largest s", "exit code", "one line", "goes on", "otherwise")


def sweep(times: int, seed: int, only: str = "") -> int:
    """Every verb, or those that begin with `only`; not 0 where something other than the time is not as promised."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading.endswith(" s") or heading == "times" else "left")
    failed, left_out, slow = False, dict[str, str](), list[str]()
    for verb, make in VERBS.items():
        if not verb.startswith(only):
            continue
        if why := lacking(verb):
            left_out[verb] = why
            print(f"{verb}: left out, {why}", flush=True)
            continue
        began = time.monotonic()
        found, ordinary = _one(verb, make, times, Random(f"{seed}/{verb}"))
        table.add_row(*found.cells(ordinary))
        failed |= bool(found.wrong)
        slow += [verb] if max(found.seconds, default=0) > 1 else []
        print(f"{verb}: {'; '.join(found.wrong) or 'as promised'} ({time.monotonic() - began:.0f} s)", flush=True)
    Console(width=150, highlight=False).print(table)
    print(f"ended within a second: all but {', '.join(slow) or 'none'}")
    for verb, why in left_out.items():
        print(f"{verb}: left out, {why}")
    return int(failed)


def lacking(verb: str) -> str:
    """Why a verb cannot be tried on this machine; nothing where it can."""
    extras = {"flower": "flwr", "serve": "uvicorn", "aggregate": "uvicorn", "join": "uvicorn", "keys": "cryptography"}
    needed = extras.get(verb.split()[0])
    if needed and importlib.util.find_spec(needed) is None:
        return f"{needed} is not installed"
    return alone.lacks_fashion_mnist() if verb == "reproduce fig4c" else ""


def _one(verb: str, make: Callable[[Path, ExitStack], Case], times: int, rng: Random) -> tuple[Found, bool]:
    # The stack ends first: then nobody is left who writes into the folder.
    with tempfile.TemporaryDirectory(prefix="ntkfl-ctrl-c-") as folder, ExitStack() as stack:
        try:
            case = make(Path(folder), stack)
        except AssertionError as error:  # somebody it needs did not start
            return Found(verb, wrong=[f"could not begin: {short(error)}"]), True
        return attempts(case, times, rng), case.line == ORDINARY
