"""`ntkfl audit`: attack what a configuration sends, and say what leaked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ntkfl.atomic import write_atomically
from ntkfl.cli.verbs import AllowCode, Json, stoppable
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.progress import ProgressBar

if TYPE_CHECKING:
    from torch import Tensor

    from ntkfl.audit.study import Study


def audit(
    run: Annotated[Path | None, typer.Argument(help="the folder of a finished run")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML of a planned run")] = None,
    private: Annotated[
        Path | None,
        typer.Option(help="a TOML of a private run: train it once with canaries, and show what ε they prove"),
    ] = None,
    canaries: Annotated[int, typer.Option(help="with --private: how many, each in or out by a coin", min=10)] = 200,
    round: Annotated[int, typer.Option(help="which round to attack", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="the folder for findings.json; RUN/audit: reports show it")] = None,
    seed: Annotated[int, typer.Option(help="of the attacks' own draws", min=0)] = 0,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Attack one round as it goes over the wire, in every role, and say what leaked.

    Example: ntkfl audit --config configs/cp.toml --out audit/cp
    """
    if sum(given is not None for given in (run, config, private)) != 1:
        raise ConfigError("give one of these: the folder of a run, --config or --private and a TOML of a planned one")
    source, broken = run or config or private, False
    with stoppable(lambda: "stopped; nothing was written"):
        if private is not None:
            from ntkfl.audit.canaries import audit_canaries

            proved = audit_canaries(RunConfig.read(private, allow_code=True), canaries, seed)
            name, found, broken = "canaries.json", proved.dump(), not proved.holds
        else:
            result = _attacked(run, config, round, seed, allow_code, as_json)
            name, found = "findings.json", result.dump()
    if as_json:
        typer.echo(json.dumps(found))
    elif private is not None:
        typer.echo(str(proved))
    else:
        _show(result, Console(highlight=False))
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(out / name, json.dumps({"source": str(source)} | found, indent=1).encode())
        except OSError as error:
            raise ConfigError(f"cannot write to {out}: {error.strerror}") from None
        if not as_json:
            typer.echo(f"written to {out / name}")
    if broken:
        raise typer.Exit(1)


def _attacked(run: Path | None, config: Path | None, round: int, seed: int, allow_code: bool, quiet: bool) -> Study:
    """Play planned settings to the round, and attack what clients send; of a finished run also its final model."""
    from ntkfl.audit.capture import capture
    from ntkfl.audit.membership import on_final_model
    from ntkfl.audit.study import ATTACKS, study

    final = None if run is None else _final_model(RunFolder(run))
    source = config if run is None else run / "config.toml"
    assert source is not None
    planned = RunConfig.read(source, allow_code=allow_code or run is None)  # a user's own file may name code
    if round > planned.rounds:
        raise ConfigError(f"the run is planned for {planned.rounds} rounds: there is no round {round}")
    if run is not None and not quiet:
        typer.echo(f"attacks round {round} of the settings in {source}, played anew, and the final model of {run}")
    with ProgressBar(round + len(ATTACKS), quiet=quiet) as bar:
        bar.begin(f"playing to round {round}")
        heard = capture(
            planned, round, on_round=lambda record, _: bar.end(f"round {record['round']} of {round} played")
        )
        more = [] if final is None else on_final_model(heard, *final, seed)
        return study(heard, seed=seed, say=bar.begin, more=more)


def _final_model(folder: RunFolder) -> tuple[Tensor, list[int]]:
    """The weights that a run ended with, statistics of batch normalisation behind them, and the clients in them."""
    folder.config()  # says so where there is no run
    done, checkpoint = folder.load_checkpoint()
    if not done:
        raise RunFolderError(f"{folder.path} has no finished round: there is no model to attack")
    taken, gone = (
        {i for record in folder.records() for i in record.get(name, ())} for name in ("clients", "forgotten")
    )
    return checkpoint["averaged"], sorted(taken - gone)


def _show(result: Study, console: Console) -> None:
    """A table of 80 columns and a line a role."""
    from ntkfl.audit.finding import ROLES
    from ntkfl.audit.study import verdicts

    table = Table("attack, by whom", "measure", box=None, padding=(0, 1), header_style="dim")
    table.width = min(console.width, 80)
    for name in ("value", "guess"):
        table.add_column(name, justify="right")
    for finding in result.findings:
        who, value = finding.role.replace("aggregator", "aggr."), f"{finding.mean:.2f}±{finding.spread:.2f}"
        table.add_row(f"{finding.attack}, {who}", finding.measure, value, f"{finding.guess:.2f}")
    console.print(table)
    console.print()
    for role, said in verdicts(result.capture, result.findings).items():
        console.print(f"[bold]{ROLES[role]}[/bold]: {said}", width=min(console.width, 80))
