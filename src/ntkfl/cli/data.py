"""`ntkfl data`: which datasets there are, getting them, and looking at how they are dealt to clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntkfl.cli.settings import assign
from ntkfl.cli.stopping import stoppable
from ntkfl.cli.verbs import ClientColumn, LabelColumn, SplitColumn
from ntkfl.data.catalog import CATALOG, NAMES, fetch, load, locate
from ntkfl.data.federated import Federated
from ntkfl.data.files import Columns
from ntkfl.data.npz import deal
from ntkfl.data.partitions import ByClient, Dirichlet
from ntkfl.data.scales import extreme_columns, shown
from ntkfl.data.sources import is_own, open_dataset
from ntkfl.errors import ConfigError, unknown
from ntkfl.federation.build import load_data
from ntkfl.federation.config import RunConfig
from ntkfl.progress import ProgressBar, plural

app = typer.Typer(
    help="Datasets, and how they are dealt to clients.\n\nExample: ntkfl data show fashion-mnist --alpha 0.1",
    no_args_is_help=True,
    add_completion=False,
)

DataName = Annotated[
    str,
    typer.Argument(
        help="A dataset (`ntkfl data list`), FILE.csv, .parquet or .npz, a folder, or package.module:function."
    ),
]
_LISTED = 10  # clients whose class counts `show` prints


@app.command("list")
def list_datasets() -> None:
    """Every dataset, whether it is on this machine, and where."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("dataset", "available"):
        table.add_column(column, no_wrap=True)
    for column in ("rows", "classes", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for name, entry in CATALOG.items():
        found = locate(name)
        if found:
            available, size, way = "yes", found.bytes, found.where
        elif entry.downloads:
            size = sum(remote.bytes for remote in entry.downloads)
            available, way = "download", f"ntkfl data fetch {name}"
        else:
            available, size, way = "no", 0, f"ntkfl data fetch {name} says how to make it"
        rows = " + ".join(f"{count:,}" for count in entry.rows) if entry.rows else "by sample"
        table.add_row(name, available, rows, str(entry.classes), f"{size / 1e6:.1f} MB" if size else "-", way)
    _console().print(table)


@app.command("fetch")
def fetch_datasets(names: Annotated[list[str], typer.Argument(help="Datasets, see `ntkfl data list`.")]) -> None:
    """Download datasets into the cache, unless they are on this machine, and check them."""
    for name in names:
        if name not in CATALOG:
            raise unknown("dataset", name, NAMES)
    with stoppable(lambda: f"stopped; what is here is kept, go on with: ntkfl data fetch {' '.join(names)}"):
        for name in names:
            if locate(name) is None:
                fetch(name)
            dataset = load(name)
            rows = f"{len(dataset):,} training and {len(dataset.test_rows):,} test rows"
            typer.echo(f"{name}: {rows}, checked, {dataset.source}")


@app.command("show")
def show(
    name: DataName,
    partition: Annotated[
        str | None, typer.Option(help="dirichlet, writer, iid, shards, or client (as a file says).")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients; 300 if not given.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet: how alike clients are; 0.1 if not given.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of data: overlap=true.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
) -> None:
    """How a dataset is dealt to clients, as tables.

    Example: ntkfl data show visits.csv --label-column diagnosis --client-column hospital
    """
    given = {"partition": partition, "clients": clients, "alpha": alpha}
    config = _config(name, given, Columns(label_column, client_column, split_column), seed, set_ or [])
    federated = load_data(config)
    console = _console()
    if federated.classes is None:
        console.print(_summary(federated, None))
        return
    counts = federated.counts()
    console.print(_summary(federated, counts))
    console.print()
    console.print(_first_clients(federated, counts))


@app.command("deal")
def deal_clients(
    name: DataName,
    out: Annotated[Path, typer.Option(help="Folder for client-0.npz … and test.npz.")],
    clients: Annotated[int | None, typer.Option(help="Clients; 4, or those that the data name, if not given.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet: how alike clients are; 0.1 if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
) -> None:
    """Write every client's data into a file of its own, to try out `ntkfl join` with.

    Rows of a file or folder that says whose they are go to those clients; all others are dealt by a Dirichlet draw.

    Example: ntkfl data deal digits --clients 4 --out demo-data
    """
    hint = f"stopped; what is in {out} is whole, and the same command writes all of it anew"
    with stoppable(lambda: hint), ProgressBar(1, "files") as bar:
        columns = Columns(label_column, client_column, split_column)
        federated = _as_named(name, columns, clients, alpha, seed)
        bar.plan(len(federated) + 1)
        deal(federated, out, on_file=bar.end)
    typer.echo(f"wrote {plural(len(federated), 'client')} and a test set to {out}")
    for number, client in enumerate(federated.client_names):
        typer.echo(f"client-{number}.npz: {client}")


def _as_named(name: str, columns: Columns, clients: int | None, alpha: float | None, seed: int) -> Federated:
    """The clients that the data name, where they do; else as many as asked for, by a Dirichlet draw."""
    config = _config(name, {}, columns, seed)
    if config.data.own:
        found, named = load_data(config), True
    else:
        dataset = open_dataset(name, columns)
        named = is_own(name) and dataset.writers is not None
        drawn = Dirichlet(4 if clients is None else clients, 0.1 if alpha is None else alpha)
        found = dataset.partition(ByClient() if named else drawn, seed=seed)
    if named and (clients, alpha) != (None, None):
        whose = f"{name} says whose its rows are ({plural(len(found), 'client')})"
        raise ConfigError(f"{whose}: leave --clients and --alpha out")
    return found


def _config(name: str, given: dict[str, Any], columns: Columns, seed: int, assigned: Sequence[str] = ()) -> RunConfig:
    """The settings of a run on these data."""
    given |= {"dataset": name} | {f"{kind}_column": own for kind, own in columns._asdict().items()}
    settings: dict[str, Any] = {
        "data": {option: value for option, value in given.items() if value is not None},
        "method": {"name": "fedavg"},
        "seed": seed,
    }
    assign(settings, assigned)
    return RunConfig(**settings)


def _console() -> Console:
    """Standard output; wide where it is no terminal, so that a path in a pipe stays on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _summary(federated: Federated, counts: NDArray[np.int64] | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("clients", f"{len(federated):,}")
    table.add_row("samples in all", f"{sum(federated.sizes):,}")
    table.add_row("distinct samples", f"{federated.distinct:,}")
    table.add_row("samples per client", _spread(federated.sizes))
    if counts is not None:
        table.add_row("classes per client", _spread((counts > 0).sum(axis=1)))
    if federated.feature_names:
        low, high = (float(value) for value in federated.rows.x.aminmax())
        columns = extreme_columns(federated)
        table.add_row("feature columns", f"{len(federated.feature_names):,}, from {low:,.6g} to {high:,.6g}")
        if columns:
            table.add_row("of extreme scale", Text(f"{shown(columns)}: train with --standardize, or leave them out"))
    drawn = f" ({federated.description['test']})" if "test" in federated.description else ""
    table.add_row("test samples", f"{len(federated.test_rows):,}{drawn}")
    return table


def _first_clients(federated: Federated, counts: NDArray[np.int64]) -> Table:
    clients = federated.client_names or [str(number) for number in range(len(counts))]
    classes = federated.class_names or [str(number) for number in range(counts.shape[1])]
    title = f"samples of each class, first {min(_LISTED, len(counts))} clients"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column in ("client", *classes, "all"):
        table.add_column(Text(column), justify="right")  # as text: a file's names are no markup
    for name, row in zip(clients, counts[:_LISTED], strict=False):
        table.add_row(Text(name), *(str(count) if count else "·" for count in row), str(row.sum()))
    return table


def _spread(values: list[int] | NDArray[np.int64]) -> str:
    return f"min {np.min(values)}, median {np.median(values):g}, max {np.max(values)}"
