"""`ntkfl personalize`: a head that suits one client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def personalize(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    client: Annotated[str, typer.Option(help="The client's name, as its data have it, or its number.")],
    out: Annotated[Path, typer.Option(help="The model to write, a .safetensors file.")],
    weight: Annotated[float, typer.Option(help="κ: how many times more the client's own samples count")] = 10.0,
) -> None:
    """Write a model whose head suits one client.

    Example: ntkfl personalize runs/a --client north --out north.safetensors
    """
    from safetensors.torch import save

    from ntkfl.atomic import write_atomically
    from ntkfl.federation import shares

    known = shares.SharesOfRun(run, "a head of one client's own")
    number = known.find(client)
    own, weights = known.share(number), shares.personal_weights(known, number, weight)
    before, after = (float(own.error(w)) / float(own.samples) for w in (known.solution(), weights))
    write_atomically(out, save(known.model(weights)))
    typer.echo(f"wrote {out}: squared error on client {client}'s own samples {before:.4f} before, {after:.4f} now")
