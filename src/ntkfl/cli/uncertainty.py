"""`ntkfl uncertainty`: how sure a run's model is, and how right it is to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.verbs import AllowCode


def uncertainty(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge or sum-ntk-fl run.")],
    data: Annotated[
        str | None, typer.Option(help="samples to measure on, as for join --data; default: the run's own test set")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="other samples, likewise, that did not train: to fit a temperature on first")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Measure how well a model knows what it knows.

    Example: ntkfl uncertainty runs/a
    """
    from torch import Tensor

    from ntkfl.data.client import Images, read_own
    from ntkfl.federation.build import load_data
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run import Run
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.federation.uncertainty import calibration
    from ntkfl.user_code import find_factory

    loaded = Run.load(run, allow_code=allow_code)
    images, fed = Images(tuple(loaded.config["shape"]["inputs"])), None
    if data is None or loaded.config["data"].get("standardize"):
        fed = load_data(RunConfig.read(run / "config.toml", allow_code=allow_code))

    def read(source: str) -> tuple[Tensor, Tensor]:
        """Samples of a file, standardised where the run's were."""
        x, y = read_own(source, images, find_factory)
        return x if fed is None or fed.standardization is None else fed.standardization.standardize(x), y

    posterior = loaded.posterior()
    if calibrate is not None:
        posterior = posterior.tempered(*read(calibrate))
    x, y = fed.test if data is None and fed is not None else read(str(data))
    found = calibration(posterior.predict(x), y)
    RunFolder(run).write("uncertainty.json", found.json().encode())
    if as_json:
        typer.echo(found.json())
        return
    typer.echo(f"{found.samples:,} samples; standard deviation of an output, on average: {found.mean_std:.4f}")
    if found.coverage is not None:
        for level, part in found.coverage.items():
            typer.echo(f"intervals of {float(level):.0%} hold {part:.1%} of the targets")
        return
    typer.echo("                     calibration error   log loss")
    typer.echo(f"with the posterior   {found.calibration_error:17.4f}   {found.log_loss:8.4f}")
    typer.echo(f"softmax of outputs   {found.plain_calibration_error:17.4f}   {found.plain_log_loss:8.4f}")
    if calibrate is not None:
        typer.echo(f"temperature {posterior.temperature:.3g}")
    typer.echo(f"accuracy {found.accuracy:.1%}; written to {run / 'uncertainty.json'}")
