"""`ntkfl join`: one client of a federation, with its own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable, stopped_by
from ntkfl.cli.verbs import AllowCode, ClientColumn, LabelColumn, LogFormat, LogLevel, SplitColumn


def join(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The client's folder, see `ntkfl keys init`.")],
    data: Annotated[
        str,
        typer.Option(help="FILE.npz, .csv or .parquet, a folder of pictures, or package.module:function."),
    ],
    patience: Annotated[float, typer.Option(help="Seconds to keep asking a service that cannot be reached.")] = 60,
    label_column: LabelColumn = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    allow_code: AllowCode = False,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """Take part in a run, with data of your own.

    Enrols at the first start (as a client or an evaluator: the token decides), and answers until the run ends.

    Example: ntkfl join demo/clients/client-0 --data mine.npz
    """
    from ntkfl.data.client import read_own
    from ntkfl.data.files import Columns
    from ntkfl.deployment.client import ShuffledClient  # needs the extra
    from ntkfl.deployment.contract import Federation
    from ntkfl.deployment.ledger import has_ended
    from ntkfl.services.log import configure_logging, log
    from ntkfl.services.role_lock import role_lock
    from ntkfl.user_code import find_factory

    configure_logging(folder.resolve().name, form=log_format, level=log_level)
    federation = Federation.read(folder)
    if has_ended(folder, federation.run):
        log("the run has ended: there is nothing more to take part in")
        return
    columns = Columns(label_column, client_column, split_column)
    allowed = columns.flags() + (" --allow-code" if allow_code else "")

    def stopped() -> str:
        again = f"the same command takes part again: ntkfl join {folder} --data {data}{allowed}"
        log(f"stopped by {stopped_by()}; {again}")
        return ""

    with role_lock(folder), stoppable(stopped, terminable=True):
        x, y = read_own(data, federation.terms.images, find_factory, columns)
        ShuffledClient(folder, x, y, patience=patience, say=log, allow_code=allow_code).run()
