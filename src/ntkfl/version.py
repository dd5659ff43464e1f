"""The version, and the commit where there is one, in one place."""

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit() -> str | None:
    """The commit of the source this runs from, with '+' where it was changed since; None outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
            return None
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout.strip()
