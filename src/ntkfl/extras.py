"""Optional requirements, and the command that installs them.

The command names the packages themselves: it works whether ntkfl was installed from a checkout, a wheel or an address.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING

from ntkfl.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def by_extra() -> dict[str, list[Requirement]]:
    """What ntkfl requires, by extra; the core's under ''. An extra's own extras are spelt out."""
    from packaging.requirements import Requirement  # most runs lack nothing, and start without it

    found: dict[str, list[Requirement]] = {"": []}
    try:
        texts = requires("ntkfl") or []
    except PackageNotFoundError:  # run from its source, not installed
        texts = []
    for text in texts:
        marked = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        found.setdefault(marked[1] if marked else "", []).append(Requirement(text))
    return {extra: _spelt_out(wanted, found) for extra, wanted in found.items()}


def _spelt_out(wanted: list[Requirement], all_of: dict[str, list[Requirement]]) -> list[Requirement]:
    own = [requirement for requirement in wanted if requirement.name != "ntkfl"]
    for requirement in wanted:
        if requirement.name == "ntkfl":
            own += [other for extra in sorted(requirement.extras) for other in _spelt_out(all_of[extra], all_of)]
    return own


def install_command(extra: str) -> str:
    """`pip install …` for an extra's packages."""
    packages = []
    for requirement in by_extra().get(extra, []):
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        packages.append(f"'{requirement.name}{extras}{requirement.specifier}'")
    return f"pip install {' '.join(packages)}" if packages else "its packages are listed in pyproject.toml"


def missing(what: str, extra: str) -> ConfigError:
    """The error to raise where `what` is asked for and the packages of `extra` are not installed."""
    return ConfigError(f"{what} needs the extra {extra!r}: {install_command(extra)}")
