"""The log of every role: a line per round and per problem, plain or JSON, with names and numbers and never a secret."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

_logger = logging.getLogger("ntkfl.services")


def configure_logging(role: str, stream: TextIO | None = None, form: str = "json", level: str = "info") -> None:
    """Log to `stream` (standard error): ours from `level` on, the libraries' from WARNING on. Requests are of level
    debug. `form` is "plain" (time, role, event, fields) or "json".
    """
    handler = logging.StreamHandler(stream) if stream else _StandardError()
    handler.setFormatter(_Lines(role, as_json=form == "json"))
    own = getattr(logging, level.upper())
    for name, least in (("ntkfl.services", own), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log(event: str, *, level: int = logging.INFO, failed: BaseException | None = None, **fields: object) -> None:
    """One line: time, level, role, event and the given fields. Never give it headers, bodies, tokens or keys."""
    _logger.log(level, event, extra={"fields": fields}, exc_info=failed)


def warn(event: str) -> None:
    """A line about something that does not work."""
    log(event, level=logging.WARNING)


class _StandardError(logging.StreamHandler[TextIO]):
    """Whatever standard error is when a line is written: a progress display stands before it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Lines(logging.Formatter):
    """Of an exception only its type and place are told: its message may quote what must not be seen."""

    def __init__(self, role: str, as_json: bool) -> None:
        super().__init__()
        self._role, self._as_json = role, as_json

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().splitlines() or [""]
        event, fields = message[0], dict[str, Any](getattr(record, "fields", {}))
        if len(message) > 1:  # a library's traceback, as text
            fields["error"] = message[-1].partition(":")[0]
        if record.exc_info and record.exc_info[0]:
            trace = record.exc_info[2]
            while trace and trace.tb_next:
                trace = trace.tb_next
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
            fields |= {"error": record.exc_info[0].__name__, "where": where}
        when, level = datetime.fromtimestamp(record.created, UTC), record.levelname.lower()
        role = fields.pop("service", self._role)
        if self._as_json:
            time = when.isoformat(timespec="milliseconds")
            return json.dumps({"time": time, "level": level, "service": role, "event": event} | fields, default=_kind)
        said = "" if level == "info" else f"{level}: "
        values = "".join(f" {name}={json.dumps(value, default=_kind)}" for name, value in fields.items())
        return f"{when:%Y-%m-%d %H:%M:%SZ} {role}: {said}{event}{values}"


def _kind(value: object) -> str:
    """What stands for a value that JSON has no form for, and that may be a secret."""
    return f"<{type(value).__name__}>"
