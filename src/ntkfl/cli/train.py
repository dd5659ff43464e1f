"""`ntkfl train`: one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ntkfl.cli.verbs import (
    DATASETS,
    METHODS,
    MODELS,
    PARTITIONS,
    AllowCode,
    ClientColumn,
    Json,
    LabelColumn,
    OfData,
    OfMethod,
    OfOutput,
    OfPrivacy,
    OfRun,
    Set,
    SplitColumn,
    stoppable,
)
from ntkfl.errors import ConfigError, NumericalError

if TYPE_CHECKING:
    from ntkfl.federation.config import RunConfig


def train(
    dataset: Annotated[
        str | None,
        OfData(
            help=f"{', '.join(DATASETS)}, FILE.csv, .parquet or .npz, a folder, or package.module:function "
            f"(default {DATASETS[0]})."
        ),
    ] = None,
    partition: Annotated[
        str | None, OfData(help=f"{', '.join(PARTITIONS)} (default {PARTITIONS[0]}; client for a file or folder).")
    ] = None,
    clients: Annotated[int | None, OfData(help="Clients in all (default 300).")] = None,
    alpha: Annotated[
        float | None, OfData(help="Dirichlet concentration, above 0: smaller is more heterogeneous (default 0.1).")
    ] = None,
    standardize: Annotated[
        bool | None,
        OfData("--standardize", help="Scale each feature or channel to mean 0 and deviation 1, by clients' sums."),
    ] = None,
    targets: Annotated[
        str | None, OfData(help="File: whole numbers are real targets or classes (default: as the loss needs).")
    ] = None,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    method: Annotated[
        str | None, OfMethod(help=f"{', '.join(METHODS)}, or package.module:Class (default {METHODS[0]}).")
    ] = None,
    model: Annotated[
        str | None, OfMethod(help=f"{', '.join(MODELS)}, or package.module:factory (default {MODELS[0]}).")
    ] = None,
    set_: Set = None,
    rounds: Annotated[int | None, OfRun(help="Communication rounds (default 10; with --private 20).")] = None,
    clients_per_round: Annotated[
        int | None, OfRun(help="Clients drawn each round (default 20, or all where there are fewer; --private: all).")
    ] = None,
    seed: Annotated[int | None, OfRun(help="Root of everything random (default 0).")] = None,
    device: Annotated[str | None, OfRun(help="cpu or cuda (default cpu).")] = None,
    config: Annotated[Path | None, OfRun(help="TOML of settings; options given here win.")] = None,
    resume: Annotated[bool, OfRun("--resume", help="Continue the run in --out.")] = False,
    allow_code: AllowCode = False,
    private: Annotated[
        bool,
        OfPrivacy("--private", help="Differential privacy with secure sums: ε = 3 for a record (--set epsilon=1)."),
    ] = False,
    secure_sum: Annotated[
        bool | None, OfPrivacy("--secure-sum", help="Mask replies: the server learns only their sum.")
    ] = None,
    out: Annotated[Path | None, OfOutput(help="Folder to keep the run in (default: it is not kept).")] = None,
    as_json: Json = False,
) -> None:
    """Train one model over many clients.

    Example: ntkfl train --dataset fashion-mnist --alpha 0.1 --rounds 10 --out runs/a
    """
    from ntkfl.federation.server import remarks
    from ntkfl.federation.simulation import execute
    from ntkfl.progress import RoundTable

    if resume and out is None:
        raise ConfigError("--resume needs the folder of the run to continue: add --out FOLDER")
    flags = {
        "data.dataset": dataset,
        "data.partition": partition,
        "data.clients": clients,
        "data.alpha": alpha,
        "data.standardize": standardize,
        "data.targets": targets,
        "data.label_column": label_column,
        "data.client_column": client_column,
        "data.split_column": split_column,
        "method.name": method,
        "model.name": model,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "seed": seed,
        "privacy.secure_sum": secure_sum,
    }
    base = _settings_before(config, out if resume else None, allow_code)
    run_config = _config(base, flags, set_ or [], private)
    display = RoundTable(run_config.rounds, remarks, quiet=as_json)
    for line in _notes(run_config):
        display.on_start(line)
    if out is None:
        display.on_start("not kept: without --out no model, history or report is left when this ends")

    listener = (lambda record, _: typer.echo(json.dumps(record))) if as_json else display
    with stoppable(lambda: _stopped(out, run_config)):
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


def _config(base: dict[str, Any], flags: Mapping[str, Any], assigned: Sequence[str], private: bool) -> RunConfig:
    """The settings `base` with the flags that were given, then with what --set assigns."""
    from ntkfl.cli.settings import assign, private_name, private_settings, put
    from ntkfl.federation.config import RunConfig

    method = base.setdefault("method", {})
    if flags["method.name"] not in (None, method.get("name")):
        method.clear()  # the options of the file are another method's
    for name, value in flags.items():
        if value is not None:
            put(base, name.split("."), value)
    method["name"] = private_name(method.get("name")) if private else method.get("name", METHODS[0])
    assign(base, assigned)
    return RunConfig(**(private_settings(base) if private else base))


def _notes(config: RunConfig) -> list[str]:
    """What is trained on what, with every option that differs from its default, and what clients show of inputs."""
    from ntkfl.compare.captions import caption
    from ntkfl.data.files import is_own
    from ntkfl.methods.base import kinds_of

    method = config.built_method
    model = config.model.suited(method).model_dump(mode="json")
    uncounted = config.data.own or is_own(config.data.dataset)  # until the data are read
    cohort: int | str = config.with_cohort(config.data.clients).clients_per_round
    if uncounted and "clients_per_round" not in config.model_fields_set:
        cohort = f"up to {config.clients_per_round}"
    lines = [caption(config.model_dump(mode="json") | {"model": model, "clients_per_round": cohort})]
    if "rows" in kinds_of(method) and config.settled[0].projected_dim is None:
        lines.append(f"{config.method['name']} sends rows that contain the inputs: for people's data see --private")
    return lines


def _stopped(out: Path | None, config: RunConfig) -> str:
    """The line of an interrupted run: what is kept, and how to go on."""
    if out is None:
        return "stopped; nothing was kept, as no --out was given"
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.progress import plural

    folder = RunFolder(out)
    done, words, why = len(folder.records()), " --allow-code" * bool(config.code), ""
    if (lost := max(0, folder.attempts - done)) and (most := config.settled[0].budget_rounds - lost) < config.rounds:
        words, why = f"{words} --rounds {most}", " (interrupted rounds count for ε, too)"
    return f"stopped after {plural(done, 'whole round')}{why}; continue with: ntkfl train --resume --out {out}{words}"
