"""`ntkfl flower`: clients on other machines."""

from __future__ import annotations

import ipaddress
import json
import threading
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkfl.cli.stopping import ended_by_signals, stoppable, until_interrupted
from ntkfl.cli.verbs import AllowCode, ClientColumn, LabelColumn, LogFormat, LogLevel, SplitColumn
from ntkfl.errors import ConfigError
from ntkfl.progress import ProgressBar, RoundTable

if TYPE_CHECKING:
    from ntkfl.flower.runtime import SuperLink

app = typer.Typer(
    help="Clients on other machines, with Flower.\n\nExample: ntkfl flower init fl --clients 4",
    no_args_is_help=True,
    add_completion=False,
)

ServerFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The server's folder, see `ntkfl flower init`.")]
_SUPERLINK_S = 0.7  # to end: it waits for connections that others keep open, and all it keeps is in memory or whole
Print = Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")]


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    config: Annotated[
        Path | None, typer.Option(help="The run: inputs, outputs, a model, …; if not given, a demo on digits.")
    ] = None,
    clients: Annotated[int, typer.Option(min=2, help="Clients to make a folder and a key for.")] = 4,
    host: Annotated[str, typer.Option(help="Name or address under which the server is reached.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 8000,
) -> None:
    """Make the folders of a deployment: the server's and each client's, with keys and certificates."""
    from ntkfl.flower import folders

    with (
        stoppable(lambda: f"stopped; begin anew: rm -r {folder}"),
        ProgressBar(clients, "folders of clients") as bar,
    ):
        run = folders.init(folder, config, clients, host, port, on_client=bar.end)
    typer.echo(f"{run.method['name']} with {clients} clients, SuperLink at {host}:{port}")
    typer.echo(f"  {folder / 'server'}     stays here: ntkfl flower server {folder / 'server'}")
    typer.echo(f"  {folder / 'clients'}    one folder a client: hand it over, delete it here")
    typer.echo(f"  {folder / 'authority'}  renews the server's certificate (ntkfl keys renew): keep it apart")


@app.command("server")
def server(
    folder: ServerFolder,
    host: Annotated[str | None, typer.Option(help="Where to listen; this machine alone if not given.")] = None,
    database: Annotated[Path | None, typer.Option(help="Keep Flower's state in this file, not in memory.")] = None,
    print_only: Print = False,
) -> None:
    """Start the SuperLink, which clients connect to, and admit the keys in DIR/clients.

    TLS and node authentication are on, telemetry and installation at run time off; it listens on this machine alone
    unless told otherwise.
    """
    from ntkfl.flower import commands

    command = commands.superlink(folder, host, database)
    if print_only:
        typer.echo(str(command))
        typer.echo(f"ntkfl flower register {folder}")
        return
    if not _is_loopback(host or commands.LOOPBACK):
        typer.echo(f"listens on {host}: other machines can connect; docs/flower.md says what they can ask")
    log = folder / "superlink.log"
    before = commands.size(log)
    with until_interrupted(), commands.running(command, log, _SUPERLINK_S) as process:
        if _superlink(folder).wait(60, lambda: process.poll() is None):
            typer.echo(f"SuperLink is up, {len(_admit(folder))} keys are known; its log is {log}")
            process.wait()
        raise ConfigError(f"the SuperLink ended: {commands.what_failed(log, before)}; its log is {log}")


@app.command("register")
def register(folder: ServerFolder) -> None:
    """Admit the keys in DIR/clients at the SuperLink that runs; those it knows stay."""
    typer.echo(f"known: {', '.join(_admit(folder))}")


@app.command("run")
def run(
    folder: ServerFolder,
    out: Annotated[Path, typer.Option(help="The run's folder; a run that was stopped goes on from it.")],
    test: Annotated[str | None, typer.Option(help="Measure on these data; if not given, clients count.")] = None,
    federation: Annotated[
        Path | None, typer.Option(help="An aggregator's folder of `ntkfl keys init`: shuffled methods.")
    ] = None,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a round on stdout, nothing else.")] = False,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """Train with the clients that are connected to the SuperLink.

    Where the file of --test says which of its rows are for testing, these alone count.

    Example: ntkfl flower run fl/server --out runs/a
    """
    from ntkfl.data.client import read_own
    from ntkfl.data.files import Columns
    from ntkfl.federation.run_folder import Record, RunFolder
    from ntkfl.federation.server import remarks
    from ntkfl.flower.apps import server_app
    from ntkfl.flower.quiet import quiet
    from ntkfl.flower.server import FlowerRun
    from ntkfl.services.log import configure_logging, log
    from ntkfl.user_code import find_factory

    configure_logging("server", form=log_format, level=log_level)
    settings = FlowerRun.read(folder / "run.toml")
    settings.check_code(allow_code)  # before anybody is asked
    columns = Columns(label_column, client_column, split_column)
    if test is None and columns.flags():
        raise ConfigError(f"{columns.flags().strip()}: of which file? --test gives one")
    batch = None if test is None else read_own(test, settings.images, find_factory, columns, test=True)
    display = RoundTable(str(settings.method["name"]), settings.rounds, remarks, quiet=as_json)
    show = (lambda record, timing: typer.echo(json.dumps(record))) if as_json else display.show
    history: list[Record] = []
    program = server_app(
        _admit(folder),
        settings,
        out,
        test=batch,
        federation=federation,
        on_round=show,
        say=log,
        history=history,
        allow_code=allow_code,
    )
    hint = f"stopped; the same command goes on after the last whole round in {out}"
    with stoppable(lambda: hint), display, quiet():
        _superlink(folder).run(program, folder / f"run-{sha256(str(out.absolute()).encode()).hexdigest()[:16]}")
    if not as_json:
        display.summary(history, RunFolder(out).records("timings.jsonl"), out)


@app.command("client")
def client(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The client's folder, see `ntkfl flower init`.")],
    data: Annotated[
        str,
        typer.Option(help="FILE.npz, .csv or .parquet, a folder of pictures, or package.module:function."),
    ],
    federation: Annotated[
        Path | None, typer.Option(help="A client's folder of `ntkfl keys init`: shuffled methods.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw as a simulation with this seed does: repeats, and hides nothing.")
    ] = None,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    attach: Annotated[str | None, typer.Option(help="Answer for the SuperNode at this address; start none.")] = None,
    allow_code: AllowCode = False,
    print_only: Print = False,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """Take part with your own data: start a SuperNode, and answer what it brings.

    Example: ntkfl flower client fl/clients/client-0 --data mine.npz
    """
    from ntkfl.data.files import Columns
    from ntkfl.flower import commands
    from ntkfl.flower.apps import join
    from ntkfl.flower.folders import ClientFile, read_secret
    from ntkfl.flower.quiet import quiet
    from ntkfl.flower.runtime import serve_node
    from ntkfl.services.log import configure_logging
    from ntkfl.services.log import log as say

    about, secret = ClientFile.read(folder), read_secret(folder)
    columns = Columns(label_column, client_column, split_column)
    if attach and not _is_loopback(attach.rpartition(":")[0]):
        raise ConfigError(f"{attach} is not on this machine: what a SuperNode brings crosses no network unsealed")
    if print_only:
        port = commands.free_port()
        typer.echo(str(commands.supernode(folder, port)))
        allowed = columns.flags() + (" --allow-code" if allow_code else "")
        address = attach or f"{commands.LOOPBACK}:{port}"
        typer.echo(f"ntkfl flower client {folder} --data {data} --attach {address}{allowed}")
        return

    configure_logging(about.name, form=log_format, level=log_level)
    how = {"federation": federation, "seed": seed, "say": say, "allow_code": allow_code, "columns": columns}
    answering = join(about, folder, data, **how)  # type: ignore[arg-type]
    log = folder / "supernode.log"
    with ended_by_signals(lambda: None if attach else say("signs off; Ctrl-C once more does not")) as ended, quiet():
        say(f"takes part at {about.superlink}" + ("" if attach else f"; the SuperNode's log is {log}"))

        def attend(port: int, alive: Callable[[], bool]) -> None:
            serve_node(f"{commands.LOOPBACK}:{port}", secret, answering, alive, say)

        if attach:
            serve_node(attach, secret, answering, lambda: not ended.is_set(), say)
        else:
            watch = (about.superlink, ended, say)
            threading.Thread(target=commands.watch_superlink, args=watch, daemon=True).start()
            commands.keep_supernode(partial(commands.supernode, folder), log, attend, ended, say)


def _superlink(folder: Path) -> SuperLink:
    from ntkfl.flower.folders import CA, ServerFile, read_secret
    from ntkfl.flower.runtime import SuperLink

    return SuperLink(ServerFile.read(folder).superlink, folder / CA, read_secret(folder))


def _admit(folder: Path) -> dict[str, int]:
    """Node ids of the clients whose keys are in the folder, by name."""
    from ntkfl.flower.folders import known_keys

    return _superlink(folder).admit(known_keys(folder))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
