"""What a partition is, and the checks all partitions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from numbers import Integral
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import ConfigError

Indices: TypeAlias = NDArray[np.int64]


class Partition(ABC):
    """How training rows are dealt to clients. A partition of your own is a frozen dataclass that subclasses this."""

    kind: ClassVar[str]
    by_class: ClassVar[bool] = False  # whether it reads labels as classes
    by_writer: ClassVar[bool] = False  # whether a client is a writer, with that one's rows alone

    @abstractmethod
    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Each client's rows as increasing indices into labels [N]; no client is empty. Randomness from `rng` alone."""

    def describe(self) -> dict[str, object]:
        """The options in plain values; those left unset are left out."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        return {"kind": self.kind} | {name: value for name, value in plain.items() if value is not None}

    @property
    def text(self) -> str:
        """In words, for titles and tables: the kind and its options, without the number of clients."""
        words = [self.kind]
        for option, value in self.describe().items():
            if option not in ("kind", "clients") and value is not False:
                words.append(option if value is True else value if isinstance(value, str) else f"{option} {value}")
        return ", ".join(words).replace("_", " ")


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")


def check_enough(rows: int, clients: int) -> None:
    """Raise unless every client can have a row of its own."""
    if rows < clients:
        raise ConfigError(f"{clients} clients cannot share {rows} samples without one being empty: use fewer clients")
