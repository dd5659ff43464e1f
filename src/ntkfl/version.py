"""The version of the package, and the git commit of the checkout that it runs from."""

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit() -> str | None:
    """The commit of the source this runs from, with '+' where it was changed since; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
