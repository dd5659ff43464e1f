"""A run's rounds as TensorBoard event files, for people whose dashboards read those. `history.jsonl` has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.federation.run_folder import Record

FOLDER = "tensorboard"


class EventFiles:
    """Event files in a run's folder `tensorboard/`, one point a round."""

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--tensorboard needs an extra: pip install 'ntkfl[tensorboard]'") from None
        self.folder = run / FOLDER
        self._make = SummaryWriter
        self._writer: Any = None

    def write(self, record: Record, timing: Record) -> None:
        """One round; made with the first, as a run's folder must be new. A resumed run's later points are replaced."""
        number = int(record["round"])
        if self._writer is None:
            self._writer = self._make(str(self.folder), purge_step=number)
        values = {f"round/{name}": value for name, value in record.items() if name != "round"}
        values |= {f"time/{name}": value for name, value in timing.items() if name != "round"}
        for direction in ("uplink", "downlink"):
            values |= {f"{direction}/{kind}": count for kind, count in (record.get(direction) or {}).items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
