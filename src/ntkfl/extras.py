"""Optional requirements, and the command that installs them.

The command names the packages themselves: it works whether ntkfl was installed from a checkout, a wheel or an address.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

from ntkfl.errors import ConfigError


def install_command(extra: str) -> str:
    """`pip install …` for an extra's packages, with their bounds."""
    try:
        texts = requires("ntkfl") or []
    except PackageNotFoundError:  # run from its source, not installed
        return "its packages are listed in pyproject.toml"
    found = [text.partition(";") for text in texts]
    return " ".join(["pip install", *(f"'{name.strip()}'" for name, _, marker in found if f'"{extra}"' in marker)])


def missing(what: str, extra: str) -> ConfigError:
    """The error to raise where `what` is asked for and the packages of `extra` are not installed."""
    return ConfigError(f"{what} needs the extra {extra!r}: {install_command(extra)}")
