"""Optional requirements, and the command that installs them.

The command names the packages themselves: it works whether ntkfl was installed from a checkout, a wheel or an address.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

from ntkfl.errors import ConfigError


def _of_extra(extra: str) -> list[str]:
    """What an extra requires, as `name[extras]>=bound`; its own extras are spelt out."""
    try:
        texts = requires("ntkfl") or []
    except PackageNotFoundError:  # run from its source, not installed
        return []
    found = []
    for text in texts:
        wanted, _, marker = text.partition(";")
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            own = re.match(r"ntkfl\[(.*?)\]", wanted)
            found += [w for name in own[1].split(",") for w in _of_extra(name)] if own else [wanted.strip()]
    return found


def install_command(extra: str) -> str:
    """`pip install …` for an extra's packages."""
    packages = [f"'{wanted}'" for wanted in _of_extra(extra)]
    return f"pip install {' '.join(packages)}" if packages else "its packages are listed in pyproject.toml"


def missing(what: str, extra: str) -> ConfigError:
    """The error to raise where `what` is asked for and the packages of `extra` are not installed."""
    return ConfigError(f"{what} needs the extra {extra!r}: {install_command(extra)}")
