"""`python debug_logging.py ARGUMENTS`: `ntkfl ARGUMENTS` with every logger at its lowest level, a bad idea in use."""

from __future__ import annotations

import logging
import sys

from ntkfl.services import log


def configure_debug_logging(service: str, **_: object) -> None:
    configure_logging(service)
    for name in ("ntkfl.services", "uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(1)


if __name__ == "__main__":
    logging.basicConfig(level=1, stream=sys.stderr)
    configure_logging, log.configure_logging = log.configure_logging, configure_debug_logging
    from ntkfl.cli import main

    main()
