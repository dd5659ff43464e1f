"""`ntkfl ARGUMENTS` with every logger at its most talkative, as nobody should run it: `python loud.py ARGUMENTS`."""

from __future__ import annotations

import logging
import sys

from ntkfl.services import log
from ntkfl.services.http import application


def talkative(service: str, stream: object = None) -> None:
    quiet(service)
    for name in ("ntkfl.services", "uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(1)


if __name__ == "__main__":
    logging.basicConfig(level=1, stream=sys.stderr)
    quiet, application.configure_logging = log.configure_logging, talkative
    from ntkfl.cli import main

    main()
