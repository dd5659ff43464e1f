"""`ntkfl train`: one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.cli.verbs import DATASETS, METHODS, MODELS, PARTITIONS, AllowCode, one_of
from ntkfl.errors import ConfigError

if TYPE_CHECKING:
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run_folder import Record
    from ntkfl.report.events import EventFiles

_DATA, _METHOD, _HIDING, _BACKBONE = "Data and clients", "Method", "What clients hide", "A pretrained backbone"
_METHODS = f"{', '.join(METHODS)} (default ntk-fl)"
Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Real: TypeAlias = float | None


def train(
    dataset: Annotated[
        Text,
        typer.Option(
            help=f"{', '.join(DATASETS)} (default {DATASETS[0]}), or package.module:function",
            rich_help_panel=_DATA,
            autocompletion=one_of(DATASETS),
        ),
    ] = None,
    partition: Annotated[
        Text,
        typer.Option(
            help="dirichlet (default), writer, iid or shards", rich_help_panel=_DATA, autocompletion=one_of(PARTITIONS)
        ),
    ] = None,
    alpha: Annotated[
        Real, typer.Option(help="Dirichlet concentration, above 0 (default 0.1)", rich_help_panel=_DATA)
    ] = None,
    clients: Annotated[Whole, typer.Option(help="clients in all (default 300)", rich_help_panel=_DATA)] = None,
    reading: Annotated[
        Text, typer.Option(help="of the Dirichlet draw: composition or shares", rich_help_panel=_DATA)
    ] = None,
    overlap: Annotated[
        bool | None, typer.Option(help="clients may hold the same images", rich_help_panel=_DATA)
    ] = None,
    method: Annotated[
        Text, typer.Option(help=_METHODS, rich_help_panel=_METHOD, autocompletion=one_of(METHODS))
    ] = None,
    kernel: Annotated[
        Text, typer.Option(help="full (default), or trace (the paper's)", rich_help_panel=_METHOD)
    ] = None,
    scheme: Annotated[Text, typer.Option(help="flow (default), descent or paper", rich_help_panel=_METHOD)] = None,
    steps: Annotated[
        Text, typer.Option(help="candidate t: 'paper', '100,200,400' or '100:2000:100'", rich_help_panel=_METHOD)
    ] = None,
    average: Annotated[
        Real, typer.Option(help="running average of round weights; 0: none", rich_help_panel=_METHOD)
    ] = None,
    lr: Annotated[Real, typer.Option(help="learning rate", rich_help_panel=_METHOD)] = None,
    local_steps: Annotated[
        Whole, typer.Option(help="local steps of averaging methods", rich_help_panel=_METHOD)
    ] = None,
    batch_size: Annotated[Whole, typer.Option(help="local batch size", rich_help_panel=_METHOD)] = None,
    loss: Annotated[Text, typer.Option(help="ce or mse", rich_help_panel=_METHOD)] = None,
    subsample_rate: Annotated[
        Real, typer.Option(help="part of its samples a client uses in a round", rich_help_panel=_HIDING)
    ] = None,
    projected_dim: Annotated[
        Whole, typer.Option(help="features that the secret projection leaves", rich_help_panel=_HIDING)
    ] = None,
    sparsity: Annotated[
        Real, typer.Option(help="part of an upload's smallest values left out", rich_help_panel=_HIDING)
    ] = None,
    values: Annotated[
        Text, typer.Option(help="how values kept travel: float32, float16, 8bit", rich_help_panel=_HIDING)
    ] = None,
    shuffle: Annotated[
        bool | None, typer.Option(help="send sealed rows through a shuffler", rich_help_panel=_HIDING)
    ] = None,
    codec: Annotated[
        Text, typer.Option(help="of NTK-FL's Jacobians: auto, factored, dense, topk", rich_help_panel=_HIDING)
    ] = None,
    replay: Annotated[
        bool | None, typer.Option(help="the server keeps rows and goes on training on them", rich_help_panel=_METHOD)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="any other option of the method", rich_help_panel=_METHOD),
    ] = None,
    model: Annotated[
        Text,
        typer.Option(
            help="mlp (default), cnn, resnet, gru, transformer, or package.module:factory",
            autocompletion=one_of(MODELS),
        ),
    ] = None,
    hidden: Annotated[Text, typer.Option(help="hidden widths of an mlp, e.g. 200,100 (default 100)")] = None,
    model_set: Annotated[
        list[str] | None, typer.Option("--model-set", metavar="OPTION=VALUE", help="any other option of the model")
    ] = None,
    backbone: Annotated[
        Text, typer.Option(help="package.module:factory of a pretrained network, frozen", rich_help_panel=_BACKBONE)
    ] = None,
    head: Annotated[
        Text, typer.Option(help="hidden widths of its head, e.g. 128 (default linear)", rich_help_panel=_BACKBONE)
    ] = None,
    trainable: Annotated[
        Text, typer.Option(help="what trains, e.g. 'head,layer4.*' (default head)", rich_help_panel=_BACKBONE)
    ] = None,
    lora: Annotated[
        Text, typer.Option(help="its linear layers that get adapters, e.g. '*.query'", rich_help_panel=_BACKBONE)
    ] = None,
    lora_rank: Annotated[Whole, typer.Option(help="of adapters (default 8)", rich_help_panel=_BACKBONE)] = None,
    drop: Annotated[Text, typer.Option(help="its submodule to leave out, e.g. fc", rich_help_panel=_BACKBONE)] = None,
    rounds: Annotated[Whole, typer.Option(help="communication rounds (default 10)")] = None,
    clients_per_round: Annotated[Whole, typer.Option(help="clients drawn each round (default 20)")] = None,
    hold_out: Annotated[Whole, typer.Option(help="clients set aside as a validation set")] = None,
    stop_at: Annotated[Real, typer.Option(help="end once the test accuracy is this")] = None,
    seed: Annotated[Whole, typer.Option(help="root of everything random (default 0)")] = None,
    poison: Annotated[
        Text,
        typer.Option(
            metavar="KIND:FRACTION[:SCALE]", help="clients that lie, e.g. sign-flip:0.2:5 (docs/robustness.md)"
        ),
    ] = None,
    precision: Annotated[Text, typer.Option(help="float32 (default) or float64")] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML of settings; options given here win")] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    allow_code: AllowCode = False,
    record_wire: Annotated[
        list[int] | None,
        typer.Option(metavar="ROUND", help="keep this round's messages in --out, for ntkfl audit; may be repeated"),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="also write event files into --out (needs the extra)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a round on stdout, nothing else")] = False,
) -> None:
    """Train one model over many clients.

    Example: ntkfl train --dataset fashion-mnist --alpha 0.1 --rounds 10 --out runs/a
    """
    from ntkfl.cli.options import (
        parse_numbers,
        parse_poison,
        parse_setting,
        parse_steps,
        parse_words,
    )  # slow to import, as all below the verbs is
    from ntkfl.cli.progress import RoundDisplay
    from ntkfl.federation.callbacks import Functions
    from ntkfl.federation.simulation import execute

    given: dict[str, Any] = {
        "rounds": rounds, "clients_per_round": clients_per_round, "hold_out": hold_out, "stop_at": stop_at,
        "seed": seed, "precision": precision, "poison": parse_poison(poison),
        "data": {"dataset": dataset, "partition": partition, "alpha": alpha, "clients": clients, "reading": reading,
                 "overlap": overlap},
        "model": {"name": model, "hidden": parse_numbers("hidden", hidden, int), "backbone": backbone,
                  "head": parse_numbers("head", head, int), "trainable": parse_words(trainable),
                  "lora": parse_words(lora), "lora_rank": lora_rank, "drop": drop,
                  "options": dict(parse_setting(text) for text in model_set) if model_set else None},
        "method": {"name": method, "kernel": kernel, "scheme": scheme, "steps": parse_steps(steps), "average": average,
                   "lr": lr, "local_steps": local_steps, "batch_size": batch_size, "loss": loss,
                   "subsample_rate": subsample_rate, "projected_dim": projected_dim, "sparsity": sparsity,
                   "values": values, "shuffle": shuffle, "codec": codec, "replay": replay,
                   **dict(parse_setting(text) for text in set_ or [])},
    }  # fmt: skip
    if record_wire and out is None:
        raise ConfigError("--record-wire needs --out, the folder that keeps the messages")
    run_config = _config(given, config, out, resume, allow_code)
    display = RoundDisplay(run_config.method["name"], run_config.rounds, quiet=as_json)
    events = _events(out) if tensorboard else None

    def on_round(record: Record, timing: Record) -> None:
        if as_json:
            typer.echo(json.dumps(record))
        else:
            display.show(record, timing)
        if events:
            events.write(record, timing)

    with stoppable(lambda: _stopped(out, bool(run_config.code))), display:
        run = execute(
            run_config, out=out, resume=resume, device=device, record=record_wire or (),
            callbacks=[Functions(on_start=display.note, on_round=on_round)],
        )  # fmt: skip
    if events:
        events.close()
    if not as_json:
        display.summary(run.history, run.timings, out)


def _events(out: Path | None) -> EventFiles:
    from ntkfl.report.events import EventFiles

    if out is None:
        raise ConfigError("--tensorboard needs --out, the folder its event files go into")
    return EventFiles(out)


def _config(given: dict[str, Any], file: Path | None, out: Path | None, resume: bool, allow_code: bool) -> RunConfig:
    """Settings from the file (or, when resuming, from the run's own), with those of the command line on top.

    The file is the user's own and may name code; a run's folder may be somebody else's.
    """
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run_folder import RunFolder

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    if file is None and resume and out is not None:
        folder = RunFolder(out)
        folder.config()  # says so where there is no run
        base = _values(out / "config.toml", allow_code)
    else:
        base = _values(file, True) if file else {}
    for key, value in given.items():
        if isinstance(value, dict):
            inner = {k: v for k, v in value.items() if v is not None}
            if key == "method" and "name" in inner and inner["name"] != base.get("method", {}).get("name"):
                base[key] = inner  # another method: the file's options are not its own
            elif inner:
                base[key] = base.get(key, {}) | inner
        elif value is not None:
            base[key] = value
    base.setdefault("method", {}).setdefault("name", "ntk-fl")
    return RunConfig(**base)


def _values(file: Path, allow_code: bool) -> dict[str, Any]:
    from ntkfl.federation.config import RunConfig

    return RunConfig.read(file, allow_code=allow_code).model_dump(mode="json", exclude_unset=True)


def _stopped(out: Path | None, code: bool) -> str:
    if out is None:
        return "stopped; nothing was kept, as no --out was given"
    from ntkfl.federation.run_folder import RunFolder

    done = len(RunFolder(out).records())
    return f"stopped after {done} whole rounds; continue with: ntkfl train --resume --out {out}{' --allow-code' * code}"
