"""`die_at.py STEP WORDS --out FOLDER`: `ntkfl WORDS`, killed at its STEP-th touch of the folder; 0: not killed."""

from __future__ import annotations

import os
import signal
import sys


def die_at(step: int, folder: str) -> None:
    """From now on, this process dies on its `step`-th touch of something in `folder`, just before it happens."""
    touched = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal touched
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(folder):
            touched += 1
            if touched == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    from ntkfl.cli import main

    if sys.argv[1] != "0":
        die_at(int(sys.argv[1]), sys.argv[sys.argv.index("--out") + 1])
    sys.argv = ["ntkfl", *sys.argv[2:]]
    main()
