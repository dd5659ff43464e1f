"""The services' log: one JSON line per event, with names and numbers and never a secret."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

_logger = logging.getLogger("ntkfl.services")


def configure_logging(service: str, stream: TextIO | None = None) -> None:
    """Log as JSON lines to `stream` (standard error): ours from INFO on, the libraries' from WARNING on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(service))
    for name, level in (("ntkfl.services", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log(event: str, *, level: int = logging.INFO, failed: BaseException | None = None, **fields: object) -> None:
    """One line: time, level, service, event and the given fields. Never give it headers, bodies, tokens or keys."""
    _logger.log(level, event, extra={"fields": fields}, exc_info=failed)


class _JsonLines(logging.Formatter):
    """Of an exception only its type and place are told: its message may quote what must not be seen."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().splitlines() or [""]
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": message[0],
            **getattr(record, "fields", {}),
        }
        if len(message) > 1:  # a library's traceback, as text
            line["error"] = message[-1].partition(":")[0]
        if record.exc_info and record.exc_info[0]:
            trace = record.exc_info[2]
            while trace and trace.tb_next:
                trace = trace.tb_next
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
            line |= {"error": record.exc_info[0].__name__, "where": where}
        return json.dumps(line, default=lambda value: f"<{type(value).__name__}>")
