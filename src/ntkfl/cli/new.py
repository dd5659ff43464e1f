"""`ntkfl new`: a small project to edit."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.errors import ConfigError

PROJECTS = Path(__file__).parent / "project"  # plain and flower: files as they lie in a project, as NAME.txt
PACKAGE = "PACKAGE"  # in their paths: the project's name as Python spells it
FLOWER_NAME = r"[A-Za-z][A-Za-z0-9-]{0,31}"  # Flower's rule for the name of an app


def new(
    name: Annotated[str, typer.Argument(help="The project's name, and the folder that is made.")],
    flower: Annotated[bool, typer.Option("--flower", help="Write a Flower app: server, clients, task.")] = False,
) -> None:
    """Write a small project to edit: data, network, settings, a test; or a Flower app.

    Example: ntkfl new hospitals --flower
    """
    folder = Path(name)
    package = re.sub(r"[- ]", "_", folder.name)
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(
            f"{folder.name!r} cannot be a Python package: take letters, digits, '-' and '_', a letter first"
        )
    if flower and not re.fullmatch(FLOWER_NAME, folder.name):
        raise ConfigError(
            f"{folder.name!r} cannot be a Flower app: take up to 32 letters, digits and '-', a letter first"
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists already; take another name, nothing was written")
    source = PROJECTS / ("flower" if flower else "plain")
    for file in source.rglob("*.txt"):
        path = folder / str(file.relative_to(source).with_suffix("")).replace(PACKAGE, package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.read_text().replace("{package}", package).replace("{name}", folder.name))
    start, command = (
        ("task.py", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run . --stream")
        if flower
        else ("data.py", "ntkfl train --config config.toml --out runs/first")
    )
    typer.echo(f"wrote {folder}: start with {folder / package / start}. To try it as it is:\n")
    typer.echo(f"  cd {folder}\n  {command}")
