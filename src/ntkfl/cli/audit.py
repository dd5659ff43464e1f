"""`ntkfl audit`: attack what a configuration sends, and say what leaked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ntkfl.cli.stopping import stoppable
from ntkfl.cli.verbs import AllowCode
from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.build import build_method, load_data
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import Record, RunFolder, write_atomically
from ntkfl.federation.transcript import recorded_rounds
from ntkfl.progress import ProgressBar
from ntkfl.safe_parse import read_toml

if TYPE_CHECKING:
    from ntkfl.audit.capture import Capture
    from ntkfl.audit.finding import Finding

_ROUND = 4  # the part of the time that a round takes, in the measure of `STAGES`
_QUICK_CLIENTS = 5  # of a cohort whose rows are not mixed: attacks are on each by itself


def audit(
    run: Annotated[
        Path | None, typer.Argument(help="the folder of a finished run, of a deployment's, or of its aggregator")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML of a planned run, or a deployment's run.toml")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="of a deployment: a folder of `ntkfl data deal`, or a dataset as ntkfl train takes"),
    ] = None,
    round: Annotated[
        int | None, typer.Option(help="which round to attack (default: 1; of a run, the last recorded)", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="where findings.json, grid.png and index.html go")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer images and steps, under two minutes")] = False,
    seed: Annotated[int, typer.Option(help="of the attacks' own draws", min=0)] = 0,
    earlier: Annotated[int, typer.Option(help="rounds before it whose rows are compared with it", min=0)] = 2,
    reference: Annotated[bool, typer.Option(help="attack the undefended configuration too")] = True,
    tradeoff: Annotated[
        Path | None, typer.Option(help="a TOML of configurations: accuracy against leakage of each, and nothing else")
    ] = None,
    workers: Annotated[int, typer.Option(help="with --tradeoff: cells at a time, a process each", min=1)] = 1,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="the findings as JSON on stdout, nothing else")] = False,
) -> None:
    """Attack one round as it goes over the wire, in every role, and say what leaked.

    Example: ntkfl audit --config configs/cp.toml --quick --out audit/cp
    """
    console = Console(quiet=as_json, highlight=False)
    kept = "finished cells are kept, the same command goes on" if tradeoff is not None else "nothing was written"
    with stoppable(lambda: f"stopped; {kept}"):
        if tradeoff is not None:
            _tradeoff(tradeoff, out or Path("runs/audit"), workers, console)
            return
        if (run is None) == (config is None):
            raise ConfigError("give either the folder of a run, or --config and a TOML of a planned one")
        _audit(run, config, data, round, out, quick, seed, earlier, reference, allow_code, as_json, console)


def _audit(
    run: Path | None, file: Path | None, given: str | None, round: int | None, out: Path | None, quick: bool, seed: int,
    earlier: int, reference: bool, allow_code: bool, as_json: bool, console: Console,
) -> None:  # fmt: skip
    from ntkfl.audit import deployed
    from ntkfl.audit.capture import captures, captures_of_run
    from ntkfl.audit.study import STAGES, study, undefended

    source = run if run is not None else file
    assert source is not None
    settings_file = deployed.settings_file(source)
    if run is not None and settings_file.name == "config.toml":
        RunFolder(run).config()  # says so where there is no run
    own, data = run is None, None  # a user's own file, written for this
    if deployed.is_deployment(read_toml(settings_file)):
        planned, data = deployed.plan(settings_file, given, allow_code=allow_code or own)
        run = None
        console.print("a deployment keeps no messages: its terms are played on the data given", style="dim")
    elif given is not None:
        raise ConfigError(f"--data is for a deployment's settings: {settings_file} says itself which data it has")
    else:
        planned = RunConfig.read(settings_file, allow_code=allow_code or own)
        if planned.precision != "float32":  # attacks are made for it, and the last digits change nothing
            if run is not None:
                raise ConfigError(f"{run} is in {planned.precision}; audit its settings: --config {settings_file}")
            planned = planned.model_copy(update={"precision": "float32"})
            console.print("audited in float32, in which the attacks are made", style="dim")
    recorded = recorded_rounds(run) if run is not None else []
    number = round if round is not None else (recorded[-1] if recorded else 1)
    if run is None and number > planned.rounds:
        raise ConfigError(f"the run is planned for {planned.rounds} rounds: there is no round {number}")
    method = build_method(planned.method)
    if quick and run is None and not (method.shuffle or method.secure_sum):
        planned = planned.model_copy(update={"clients_per_round": min(_QUICK_CLIENTS, planned.clients_per_round)})
    before = [n for n in range(max(1, number - earlier), number) if method.shuffle and not quick]
    if run is not None and number in recorded:  # what is recorded needs no replay
        before = [n for n in before if n in recorded]
    stages = {name: weights[1 if quick else 2] for name, weights in STAGES.items()}
    stages |= {f"undefended: {name}": weights[0] for name, weights in STAGES.items() if reference}
    with ProgressBar(1 + _ROUND * number + sum(stages.values()), quiet=as_json) as bar:

        def say(line: str) -> None:
            bar.begin(line, stages.get(line, 0))

        def on_round(record: Record, timing: Record) -> None:
            bar.end(f"round {record['round']} of {number} played", _ROUND)

        bar.begin("loading the data")
        data = data or load_data(planned)
        bar.begin(f"round {number}: listening", _ROUND)
        rounds = [*before, number]
        caught: dict[int, Capture]
        if run is not None:
            caught = captures_of_run(run, rounds, data=data, on_round=on_round, allow_code=allow_code)
        else:
            caught = captures(planned, rounds, data=data, on_round=on_round)
        bare = captures(undefended(planned), [1], data=data)[1] if reference else None
        final = _on_final_model(run, planned, caught[number], data, seed) if run is not None else []
        dataset = given or planned.data.dataset
        settings = {"method": method.name, "dataset": dataset, "seed": planned.seed, "quick": quick}
        result = study(
            caught[number],
            bare,
            earlier=[caught[n] for n in before],
            quick=quick,
            seed=seed,
            say=say,
            settings=settings,
            more=final,
        )
    title = f"Audit of {source}"
    if as_json:
        typer.echo(json.dumps(result.dump()))
    else:
        _show(result, console)
    if out is not None:
        from ntkfl.audit.grid import draw_grid
        from ntkfl.audit.page import write_page

        _make(out)
        findings = json.dumps({"source": str(source)} | result.dump(), indent=1)
        write_atomically(out / "findings.json", findings.encode())
        with stoppable(lambda: f"stopped; {out / 'findings.json'} is written, its page is not"):
            grid = draw_grid(result.findings, out / "grid.png")
            write_page(result, title, out / "index.html", grid)
        console.print(f"written to {out}: index.html, findings.json{', grid.png' if grid else ''}")


def _on_final_model(run: Path, plan: RunConfig, capture: Capture, data: Federated, seed: int) -> list[Finding]:
    """What an outsider learns from the run's model as it is handed out."""
    from ntkfl.audit.membership import on_final_model

    folder = RunFolder(run)
    tensors = folder.load_checkpoint()[1]
    taken = sorted({i for record in folder.records() for i in record["clients"]})
    fed = data.hold_out(plan.hold_out, seed=plan.seed)[0] if plan.hold_out else data
    return on_final_model(capture, tensors["averaged"][: capture.weights.numel()], fed, taken, seed)


def _show(result: Any, console: Console) -> None:
    """A table of 80 columns and a line a role."""
    from ntkfl.audit.finding import ROLES

    table = Table(box=None, padding=(0, 1), header_style="dim", width=min(console.width, 80))
    for name, justify in (("attack, by whom", "left"), ("measure", "left"), ("value", "right"), ("guess", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("defence")
    for finding in result.findings:
        value = f"{finding.mean:.2f}±{finding.spread:.2f}"
        who = finding.role.replace("aggregator", "aggr.")
        table.add_row(
            f"{finding.attack}, {who}", finding.measure, value, f"{finding.guess:.2f}", finding.verdict or "–"
        )
    console.print(table)
    console.print()
    for role, name in ROLES.items():
        console.print(f"[bold]{name}[/bold]: {result.verdicts[role]}", width=min(console.width, 80))


def _tradeoff(file: Path, out: Path, workers: int, console: Console) -> None:
    from ntkfl.audit import tradeoff, tradeoff_table
    from ntkfl.compare.spec import Comparison

    comparison = Comparison.read(file)
    _make(out / "cells")
    with ProgressBar(0, "cells") as bar:
        rows = tradeoff.run(comparison, out / "cells", lambda line: bar.end(f"✓ {line}"), workers, bar.plan)
    tradeoff_table.write(out, comparison, rows, f"ntkfl audit --tradeoff {file}")
    console.print(tradeoff_table.markdown(rows), soft_wrap=True)
    console.print(f"written to {out}: results.json, table.md, tradeoff.png")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from None
