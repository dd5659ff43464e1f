"""`ntkfl train`: one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ntkfl.cli.flags import nested, with_flags
from ntkfl.cli.stopping import stoppable
from ntkfl.cli.train_flags import FLAGS
from ntkfl.cli.verbs import AllowCode, importing
from ntkfl.errors import ConfigError

if TYPE_CHECKING:
    from ntkfl.federation.callbacks import Callback
    from ntkfl.federation.config import RunConfig
    from ntkfl.progress import RoundTable


@with_flags(FLAGS)
def train(
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="any other option of the method", rich_help_panel="Method"),
    ] = None,
    model_set: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=VALUE", help="any other option of the model", rich_help_panel="Model"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda", rich_help_panel="Run")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML of settings; options given here win")] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    allow_code: AllowCode = False,
    private: Annotated[
        bool,
        typer.Option("--private", help="differentially private: secure sums, ε = 3 for a record (--set epsilon=1)"),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="also write event files into --out (needs the extra)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per round on stdout, nothing else")] = False,
    **given: Any,
) -> None:
    """Train one model over many clients.

    Example: ntkfl train --dataset fashion-mnist --alpha 0.1 --rounds 10 --out runs/a
    """
    with importing():
        from ntkfl.cli.options import parse_byzantine, parse_numbers, parse_setting, parse_steps, parse_words
        from ntkfl.federation.callbacks import TensorBoardCallback
        from ntkfl.federation.server import remarks
        from ntkfl.federation.simulation import execute
        from ntkfl.options import NONE
        from ntkfl.progress import RoundTable

    lists = {name: partial(parse_numbers, name, kind=int) for name in ("hidden", "head")}
    words = dict.fromkeys(("trainable", "lora", "also"), parse_words)
    parsers: dict[str, Callable[[str], Any]] = lists | words | {"steps": parse_steps, "byzantine": parse_byzantine}
    for name, parse in parsers.items():
        if given[name] not in (None, NONE):
            given[name] = parse(given[name])
    settings = nested(FLAGS, given)
    settings["method"] |= dict(parse_setting(text) for text in set_ or [])
    if model_set:
        settings["model"]["options"] = dict(parse_setting(text) for text in model_set)
    for flag, wanted in (("--tensorboard", tensorboard), ("--resume", resume)):
        if wanted and out is None:
            raise ConfigError(f"{flag} needs --out, the run's folder")
    run_config = _config(settings, config, out, resume, allow_code, private)
    display = RoundTable(run_config.method["name"], run_config.rounds, remarks, quiet=as_json)
    callbacks = [_printed(display, as_json), *([TensorBoardCallback(out)] if tensorboard and out is not None else [])]
    display.note(_taken(run_config, settings if config is None and not resume else None))
    display.note(f"data: {run_config.data.text}")
    if sends_inputs(run_config):
        name = run_config.method["name"]
        display.note(f"{name} sends rows that contain the inputs: for people's data see --private")
    if out is None:
        display.note("not kept: without --out no model, history or report is left when this ends")
    with stoppable(lambda: _stopped(out, bool(run_config.code))), _placed(run_config.code), display:
        run = execute(
            run_config,
            out=out,
            resume=resume,
            device=device,
            callbacks=callbacks,
            insight=True,
        )
    if not as_json:
        display.summary(run.history, run.timings, out)


@contextmanager
def _placed(code: Sequence[str]) -> Iterator[None]:
    """An error within it goes on with notes: the lines of the user's own code on the way to it."""
    try:
        yield
    except Exception as error:
        from ntkfl.compare.failures import own_frames

        for line in own_frames(error, code):
            error.add_note(line)
        raise


def _taken(config: RunConfig, given: dict[str, Any] | None) -> str:
    """Which method and model a run has, and which of them by default: `given` are settings of the command line where it
    has no others.
    """
    from ntkfl.federation.build import build_method

    name, model = config.method["name"], config.model.suited(build_method(config.method))
    by_default = " (default)" if given is not None and not given["method"].get("name") else ""
    chosen = given is None or given["model"]
    return f"method: {name}{by_default}; model: {model.text}{'' if chosen else ' (default)'}"


def sends_inputs(config: RunConfig) -> bool:
    """Whether what clients send holds their inputs: samples, or rows of such that no secret matrix projects."""
    from ntkfl.federation.build import build_method

    method = build_method(config.method)
    return method.shows in ("rows", "samples") and method.projected_dim is None


def _printed(display: RoundTable, as_json: bool) -> Callback:
    """A callback that shows rounds as a table, or prints each as JSON."""
    from ntkfl.federation.callbacks import Callback

    class Printed(Callback):
        def on_start(self, note: str) -> None:
            display.note(note)

        def on_round(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
            if as_json:
                typer.echo(json.dumps(record))
            else:
                display.show(record, timing)

    return Printed()


def _config(
    given: dict[str, Any], file: Path | None, out: Path | None, resume: bool, allow_code: bool, private: bool
) -> RunConfig:
    """Settings from the file (or, when resuming, from the run's own), with those of the command line on top.

    The file is the user's own and may name code; a run's folder may be somebody else's.
    """
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run_folder import RunFolder

    if file is None and resume and out is not None:
        folder = RunFolder(out)
        folder.config()  # says so where there is no run
        base = _values(out / "config.toml", allow_code)
    else:
        base = _values(file, True) if file else {}
    for key, value in given.items():
        if not isinstance(value, dict) or key == "byzantine":
            base[key] = value
        elif key == "method" and "name" in value and value["name"] != base.get("method", {}).get("name"):
            base[key] = value  # another method: the file's options are not its own
        elif value:
            base[key] = base.get(key, {}) | value
    if private:
        from ntkfl.cli.private import private_settings

        base = private_settings(base)
    base.setdefault("method", {}).setdefault("name", "ntk-fl")
    return RunConfig(**base)


def _values(file: Path, allow_code: bool) -> dict[str, Any]:
    from ntkfl.federation.config import RunConfig

    return RunConfig.read(file, allow_code=allow_code).model_dump(mode="json", exclude_unset=True)


def _stopped(out: Path | None, code: bool) -> str:
    if out is None:
        return "stopped; nothing was kept, as no --out was given"
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.progress import plural

    done, allowed = plural(len(RunFolder(out).records()), "whole round"), " --allow-code" * code
    return f"stopped after {done}; continue with: ntkfl train --resume --out {out}{allowed}"
