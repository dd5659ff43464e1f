"""`ntkfl personalize`: a head that suits one client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.errors import ConfigError


def personalize(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    client: Annotated[str, typer.Option(help="The client's name, as its data have it, or its number.")],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    weight: Annotated[float, typer.Option(help="κ: how many times more the client's own samples count")] = 10.0,
) -> None:
    """Write a model whose head suits one client, as `ntkfl export` writes a run's: ntkfl.load_exported("north") gives
    it as a torch module.

    Example: ntkfl personalize runs/a --client north --out north
    """
    from ntkfl.federation import shares
    from ntkfl.federation.export import export

    if out.suffix == ".safetensors":
        raise ConfigError(
            f"--out is a folder, which gets the weights as model.safetensors: --out {out.with_suffix('')}"
        )
    known = shares.SharesOfRun(run, "a head of one client's own")
    number = known.find(client)
    own, weights = known.share(number), shares.personal_weights(known, number, weight)
    before, after = (float(own.error(w)) / float(own.samples) for w in (known.solution(), weights))
    export(run, out, {}, tensors=known.model(weights))
    typer.echo(f"wrote {out}: squared error on client {client}'s own samples {before:.4f} before, {after:.4f} now")
