"""`ntkfl data`: which datasets there are, getting them, and looking at how they are dealt to clients."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntkfl.cli.settings import assign
from ntkfl.cli.verbs import ClientColumn, LabelColumn, OfData, Set, SplitColumn, stoppable
from ntkfl.data.catalog import CATALOG, load, locate
from ntkfl.federation.config import RunConfig, load_data

data = typer.Typer(
    help="Datasets, and how they are dealt to clients.\n\nExample: ntkfl data show fashion-mnist --alpha 0.1",
    no_args_is_help=True,
    add_completion=False,
)
_LISTED = 10  # clients whose class counts `show` prints


@data.command("list")
def list_datasets() -> None:
    """Every dataset, whether it is on this machine, and where."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("dataset", "available"):
        table.add_column(column, no_wrap=True)
    for column in ("rows", "classes", "download"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for name, entry in CATALOG.items():
        size = sum(remote.bytes for remote in entry.downloads)
        if found := locate(name):
            available, way = "yes", str(found)
        elif size:
            available, way = "download", f"ntkfl data fetch {name}"
        else:
            available, way = "no", f"ntkfl data fetch {name} says how to make it"
        download = f"{size / 1e6:.1f} MB" if size else "-"
        table.add_row(name, available, entry.rows, str(entry.classes), download, way)
    _console().print(table)


@data.command("fetch")
def fetch_datasets(names: Annotated[list[str], typer.Argument(help="Datasets, see `ntkfl data list`.")]) -> None:
    """Download datasets into the cache, unless they are on this machine, and check them."""
    for name in names:
        locate(name)  # an unknown one is said before anything is downloaded
    with stoppable(lambda: f"stopped; what is here is kept, go on with: ntkfl data fetch {' '.join(names)}"):
        for name in names:
            dataset = load(name)
            rows = f"{len(dataset):,} training and {len(dataset.test_rows):,} test rows"
            typer.echo(f"{name}: {rows}, checked, {locate(name)}")


@data.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A dataset (`ntkfl data list`), FILE.csv, .parquet or .npz, a folder, or package.module:function."
        ),
    ],
    partition: Annotated[str | None, OfData(help="dirichlet, writer, iid, shards, or client (as a file says).")] = None,
    clients: Annotated[int | None, OfData(help="Clients in all (default 300).")] = None,
    alpha: Annotated[float | None, OfData(help="Dirichlet concentration, above 0 (default 0.1).")] = None,
    set_: Set = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
) -> None:
    """How a dataset is dealt to clients, as tables.

    Example: ntkfl data show visits.csv --label-column diagnosis --client-column hospital
    """
    given = {"dataset": name, "partition": partition, "clients": clients, "alpha": alpha, "label_column": label_column}
    given |= {"client_column": client_column, "split_column": split_column}
    data = {option: value for option, value in given.items() if value is not None}
    settings: dict[str, Any] = {"data": data, "method": {"name": "fedavg"}, "seed": seed}
    assign(settings, set_ or [])
    federated, console = load_data(RunConfig(**settings)), _console()
    counts = None if federated.classes is None else federated.counts()
    drawn = f" ({federated.description['test']})" if "test" in federated.description else ""
    lines = {
        "clients": f"{len(federated):,}",
        "samples in all": f"{sum(federated.sizes):,}",
        "samples per client": _spread(federated.sizes),
        "classes per client": "" if counts is None else _spread((counts > 0).sum(axis=1)),
        "test samples": f"{len(federated.test_rows):,}{drawn}",
    }
    width = max(map(len, lines))
    for what, number in lines.items():
        if number:
            console.print(f"[bold]{what:<{width}}[/bold]  {number}", highlight=False)
    if counts is None:
        return
    names = federated.client_names or [str(number) for number in range(len(counts))]
    classes = federated.class_names or [str(number) for number in range(counts.shape[1])]
    title = f"\nsamples of each class, first {min(_LISTED, len(counts))} clients"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column in ("client", *classes, "all"):
        table.add_column(Text(column), justify="right")  # as text: a file's names are no markup
    for client, row in zip(names, counts[:_LISTED], strict=False):
        table.add_row(Text(client), *(str(count) if count else "·" for count in row), str(row.sum()))
    console.print(table)


def _console() -> Console:
    """Standard output; wide where it is no terminal, so that a path in a pipe stays on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _spread(values: list[int] | NDArray[np.int64]) -> str:
    return f"min {np.min(values)}, median {np.median(values):g}, max {np.max(values)}"
