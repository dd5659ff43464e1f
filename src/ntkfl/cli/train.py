"""`ntkfl train`: one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ntkfl.cli.verbs import (
    DATASETS,
    METHODS,
    MODELS,
    PARTITIONS,
    AllowCode,
    ClientColumn,
    LabelColumn,
    SplitColumn,
    stoppable,
)
from ntkfl.errors import ConfigError, NumericalError

if TYPE_CHECKING:
    from ntkfl.federation.config import RunConfig


def train(
    dataset: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(DATASETS)}, FILE.csv, .parquet or .npz, a folder, or package.module:function "
            f"(default {DATASETS[0]})"
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help=f"{', '.join(PARTITIONS)} (default {PARTITIONS[0]})")] = None,
    clients: Annotated[int | None, typer.Option(help="clients in all (default 300)")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Dirichlet concentration, above 0: smaller is more heterogeneous (default 0.1)")
    ] = None,
    standardize: Annotated[
        bool | None,
        typer.Option(
            "--standardize",
            help="inputs to mean 0 and deviation 1 by feature or channel, from sums that clients tell once",
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(help="of a file: what whole numbers are, real or classes; as the loss has it if not given"),
    ] = None,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)} (default {METHODS[0]}), or package.module:Class")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory (default {MODELS[0]})")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="any other setting, with a value as in TOML: lr=0.1, 'model.hidden=[64]', stop_at=0.9; "
            "may be repeated",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="communication rounds (default 10)")] = None,
    clients_per_round: Annotated[
        int | None, typer.Option(help="clients drawn each round, or all where there are fewer (default 20)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="root of everything random (default 0)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML of settings; options given here win")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    allow_code: AllowCode = False,
    private: Annotated[
        bool,
        typer.Option("--private", help="differentially private: secure sums, ε = 3 for a record (--set epsilon=1)"),
    ] = False,
    secure_sum: Annotated[
        bool | None,
        typer.Option(
            "--secure-sum",
            help="replies are masked, so that the server learns their sum alone: for methods that need no more",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per round on stdout, nothing else")] = False,
) -> None:
    """Train one model over many clients.

    Example: ntkfl train --dataset fashion-mnist --alpha 0.1 --rounds 10 --out runs/a
    """
    from ntkfl.federation.server import remarks
    from ntkfl.federation.simulation import execute
    from ntkfl.progress import RoundTable

    if resume and out is None:
        raise ConfigError("--resume needs --out, the run's folder")
    data: dict[str, Any] = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "alpha": alpha,
        "standardize": standardize,
    }
    data |= {"targets": targets, "label_column": label_column, "client_column": client_column}
    given: dict[str, dict[str, Any]] = {
        "data": data | {"split_column": split_column},
        "model": {"name": model},
        "method": {"name": method},
        "privacy": {"secure_sum": secure_sum},
        "": {"rounds": rounds, "clients_per_round": clients_per_round, "seed": seed},
    }
    base = _settings_before(config, out if resume else None, allow_code)
    run_config = _config(base, given, set_ or [], private)
    display = RoundTable(run_config.rounds, remarks, quiet=as_json)
    for line in _notes(run_config):
        display.note(line)
    if out is None:
        display.note("not kept: without --out no model, history or report is left when this ends")

    def on_round(record: dict[str, Any], timing: dict[str, Any]) -> None:
        if as_json:
            typer.echo(json.dumps(record))
        else:
            display.show(record, timing)

    listener = SimpleNamespace(on_start=display.note, on_round=on_round)
    with stoppable(lambda: _stopped(out, bool(run_config.code))):
        run = execute(run_config, out=out, resume=resume, device=device, callbacks=[listener])
    if not as_json:
        display.summary(run.history, run.timings, out)
    if run.failure:
        raise NumericalError(run.failure)


def _settings_before(file: Path | None, resumed: Path | None, allow_code: bool) -> dict[str, Any]:
    """Settings of the user's own file, which may name code; or of the run that is resumed, somebody else's perhaps."""
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run_folder import RunFolder

    if file is not None:
        read = RunConfig.read(file, allow_code=True)
    elif resumed is not None:
        RunFolder(resumed).config()  # says so where there is no run
        read = RunConfig.read(resumed / "config.toml", allow_code=allow_code)
    else:
        return {}
    return read.model_dump(mode="json", exclude_unset=True)


def _config(
    base: dict[str, Any], given: dict[str, dict[str, Any]], assigned: Sequence[str], private: bool
) -> RunConfig:
    """The settings of the command line, by table ("": of none), on top of `base`; None is what was not given."""
    from ntkfl.cli.settings import assign, private_name, private_settings
    from ntkfl.federation.config import RunConfig

    for table, values in given.items():
        own = {name: value for name, value in values.items() if value is not None}
        if table == "method" and own.get("name") not in (None, base.get("method", {}).get("name")):
            base["method"] = own  # another method: the file's options are not its own
        elif own and table:
            base[table] = base.get(table, {}) | own
        else:
            base |= own
    method = base.setdefault("method", {})
    method["name"] = private_name(method.get("name")) if private else method.get("name", METHODS[0])
    assign(base, assigned)
    return RunConfig(**(private_settings(base) if private else base))


def _notes(config: RunConfig) -> list[str]:
    """What is trained on what, with every option that differs from its default, and what clients show of inputs."""
    from ntkfl.compare.captions import caption
    from ntkfl.methods.base import kinds_of

    method = config.built_method
    model = config.model.suited(method).model_dump(mode="json")
    config = config if config.data.own else config.with_cohort(config.data.clients)
    lines = [caption(config.model_dump(mode="json") | {"model": model})]
    if "rows" in kinds_of(method) and config.settled[0].projected_dim is None:
        lines.append(f"{config.method['name']} sends rows that contain the inputs: for people's data see --private")
    return lines


def _stopped(out: Path | None, code: bool) -> str:
    """The line of an interrupted run: what is kept, and how to go on."""
    if out is None:
        return "stopped; nothing was kept, as no --out was given"
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.progress import plural

    done, allowed = plural(len(RunFolder(out).records()), "whole round"), " --allow-code" * code
    return f"stopped after {done}; continue with: ntkfl train --resume --out {out}{allowed}"
