"""`ntkfl uncertainty`: how sure a run's model is, and how right it is to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.verbs import AllowCode, ClientColumn, LabelColumn, SplitColumn


def uncertainty(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge or sum-ntk-fl run.")],
    data: Annotated[
        str | None, typer.Option(help="samples to measure on, as for join --data; default: the run's own test set")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="samples to fit a temperature on first, likewise; or `test`: half of the run's test set"),
    ] = None,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Measure how well a model knows what it knows.

    Example: ntkfl uncertainty runs/a
    """
    from torch import Tensor

    from ntkfl.data.client import Images, read_own
    from ntkfl.data.files import Columns
    from ntkfl.errors import ConfigError
    from ntkfl.federation.build import load_data
    from ntkfl.federation.config import RunConfig
    from ntkfl.federation.run import Run
    from ntkfl.federation.run_folder import RunFolder, names_in, other_features
    from ntkfl.federation.uncertainty import calibration, halves
    from ntkfl.progress import percent, plural
    from ntkfl.user_code import find_factory

    loaded = Run.load(run, allow_code=allow_code)
    classes, features = (tuple(names_in(loaded.config, kind)) for kind in ("classes", "features"))
    images, fed = Images(tuple(loaded.config["shape"]["inputs"]), classes=classes, features=features), None
    trained_on, halved = loaded.config["data"].get("dataset"), calibrate == "test"
    if data is None or halved:
        fed = load_data(RunConfig.read(run / "config.toml", allow_code=allow_code))
        if changed := other_features(loaded.config, fed.feature_names):
            raise ConfigError(f"{trained_on} has changed since the run: {changed}")
    own = {name: loaded.config["data"].get(f"{name}_column") for name in ("label", "client", "split")}
    given = Columns(label_column, client_column, split_column)._asdict()
    columns = Columns(**{name: given[name] or own[name] for name in own})

    def read(source: str) -> tuple[Tensor, Tensor]:
        """Samples of a file, standardised where the run's were."""
        if trained_on is not None and Path(source).resolve() == Path(trained_on).resolve():
            raise ConfigError(
                f"{source} is what the run was trained on, and a model is surer of what it has seen: leave --data out "
                "for the run's test set, give `--calibrate test`, or give a file of other samples"
            )
        x, y = read_own(source, images, find_factory, columns)
        return x if loaded.standardization is None else loaded.standardization.standardize(x), y

    x, y = fed.test if data is None and fed is not None else read(str(data))
    where = "the run's test set" if data is None else data
    posterior, fitted = loaded.posterior(), ""
    if calibrate is not None:
        if halved and fed is not None:
            first, second = halves(len(fed.test[1]))
            on = (fed.test[0][first], fed.test[1][first])
            x, y = (x[second], y[second]) if data is None else (x, y)
            where = "the other half of the run's test set" if data is None else data
        else:
            on = read(str(calibrate))
        posterior = posterior.tempered(*on)
        source = "half of the run's test set" if halved else calibrate
        fitted = f"temperature {posterior.temperature:.3g}, fitted on {plural(len(on[1]), 'sample')}: {source}"
    found = calibration(posterior.predict(x), y)
    RunFolder(run).write("uncertainty.json", found.json().encode())
    if as_json:
        typer.echo(found.json())
        return
    typer.echo(f"measured on {plural(found.samples, 'sample')}: {where}")
    typer.echo(fitted or "no temperature: --calibrate test fits one on half of the test set and measures on the other")
    typer.echo(f"standard deviation of an output, on average: {found.mean_std:.4f}")
    if found.coverage is not None:
        for level, part in found.coverage.items():
            typer.echo(f"intervals of {percent(float(level), 0)} hold {percent(part)} of the targets")
        return
    assert found.accuracy is not None
    assert found.plain_accuracy is not None
    typer.echo("                     calibration error   log loss   accuracy")
    for name, error, loss, accuracy in (
        ("with the posterior", found.calibration_error, found.log_loss, found.accuracy),
        ("outputs, softmax", found.plain_calibration_error, found.plain_log_loss, found.plain_accuracy),
    ):
        typer.echo(f"{name:18}   {error:17.4f}   {loss:8.4f}   {percent(accuracy):>8}")
    if found.accuracy != found.plain_accuracy:
        typer.echo("training measures the class of the largest output; the posterior's likeliest class can be another")
    typer.echo(f"written to {run / 'uncertainty.json'}")
