"""`ntkfl value`: what each client's data are worth to the model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.progress import ProgressBar


def value(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    permutations: Annotated[int, typer.Option(help="random orders, where clients are too many for all")] = 100,
    seed: Annotated[int, typer.Option(help="of the random orders")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")] = False,
) -> None:
    """Value what each client adds to a model.

    Example: ntkfl value runs/a
    """
    from ntkfl.federation.shapley import shapley_values
    from ntkfl.federation.shares import SharesOfRun

    known = SharesOfRun(run, "valuing clients")
    with stoppable(), ProgressBar(0, "solutions") as bar:

        def solved(done: int, planned: int) -> None:
            bar.plan(planned)
            bar.end(pieces=1)

        values = shapley_values(known.shares, known.penalty, permutations=permutations, seed=seed, on_solve=solved)
    values = [replace(v, name=known.called(v.client) if known.names else "") for v in values]
    known.folder.write("values.json", json.dumps([asdict(v) for v in values], indent=1).encode())
    if as_json:
        typer.echo(json.dumps([asdict(v) for v in values]))
        return
    sampled = any(v.error for v in values)
    wide = max(6, *(len(known.called(v.client)) for v in values))
    typer.echo(f"{'client':>{wide}}  samples    value{'  ± standard error' if sampled else ''}")
    for v in sorted(values, key=lambda v: -v.value):
        spread = f"  ± {v.error:.4f}" if sampled else ""
        typer.echo(f"{known.called(v.client):>{wide}} {v.samples:8,d} {v.value:8.4f}{spread}")
    typer.echo(f"{'all':>{wide}} {sum(v.samples for v in values):8,d} {sum(v.value for v in values):8.4f}")
    typer.echo(
        f"part of the squared error removed, at λ = {known.penalty:g} of all clients for every coalition; "
        "a coalition whose model is worse than none counts 0 (docs/backbones.md)"
    )
