"""The partitions that need no Dirichlet draw, and every partition by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ntkfl.data.dirichlet import Dirichlet
from ntkfl.data.partition import Indices, Partition, check_enough, check_positive
from ntkfl.errors import ConfigError, DataError, unknown


@dataclass(frozen=True)
class IID(Partition):
    """A uniformly random split of all rows into clients of sizes equal to within one."""

    kind: ClassVar[str] = "iid"

    clients: int

    def __post_init__(self) -> None:
        check_positive("clients", self.clients)

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Rows of each client, see the class."""
        check_enough(len(labels), self.clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), self.clients)]


@dataclass(frozen=True)
class Shards(Partition):
    """Rows sorted by label are cut into clients · per_client shards, dealt at random (McMahan et al. 2017)."""

    kind: ClassVar[str] = "shards"
    by_class: ClassVar[bool] = True

    clients: int
    per_client: int = 2

    def __post_init__(self) -> None:
        check_positive("clients", self.clients)
        check_positive("per_client", self.per_client)

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Rows of each client, see the class."""
        count = self.clients * self.per_client
        if len(labels) < count:
            raise ConfigError(
                f"{self.clients} clients with {self.per_client} shards each need {count} samples, not {len(labels)}"
            )
        mixed = rng.permutation(len(labels))  # so that a shard is a random part of its class, not a run of the file
        shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], count)
        hands = rng.permutation(count).reshape(self.clients, self.per_client)
        return [np.sort(np.concatenate([shards[shard] for shard in hand])) for hand in hands]


@dataclass(frozen=True)
class ByWriter(Partition):
    """Natural clients: one a writer with at least min_samples training rows, in the order of the writers' ids.

    clients=None takes all of them; a smaller number is chosen uniformly at random.
    """

    kind: ClassVar[str] = "writer"
    by_writer: ClassVar[bool] = True

    clients: int | None = None
    min_samples: int = 16

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_positive("clients", self.clients)
        check_positive("min_samples", self.min_samples)

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Rows of each client, see the class."""
        if writers is None:
            raise DataError("this dataset does not say who wrote its rows: partition by writer needs femnist or mnist")
        names, counts = np.unique(writers, return_counts=True)
        chosen = names[counts >= self.min_samples]
        wanted = max(1, len(chosen)) if self.clients is None else self.clients
        if wanted > len(chosen):
            raise ConfigError(
                f"{wanted} clients asked for, but {len(chosen)} writers have at least {self.min_samples} samples: "
                "ask for fewer, or lower min_samples"
            )
        chosen = np.sort(rng.choice(chosen, wanted, replace=False))
        order = np.argsort(writers, kind="stable")  # groups writers, keeps rows increasing within each
        first, last = (np.searchsorted(writers[order], chosen, side=side) for side in ("left", "right"))
        return [order[a:b] for a, b in zip(first, last, strict=True)]


@dataclass(frozen=True)
class ByClient(Partition):
    """One client per name in a file's column `client`, in the names' order."""

    kind: ClassVar[str] = "client"
    by_writer: ClassVar[bool] = True

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Rows of each client, see the class."""
        if writers is None:
            raise DataError(
                "this dataset does not say whose its rows are: it has no column or array 'client'; name the one that "
                "does by --client-column (in Python: client=), or deal the rows, as by --partition iid --clients 10"
            )
        return [np.flatnonzero(writers == number) for number in np.unique(writers)]


PARTITIONS: dict[str, type[Partition]] = {cls.kind: cls for cls in (Dirichlet, ByWriter, IID, Shards, ByClient)}


def make(kind: str, options: Mapping[str, Any]) -> Partition:
    """The partition named `kind` with `options`; an option that it does not have is an error, not ignored."""
    if kind not in PARTITIONS:
        raise unknown("partition", kind, PARTITIONS)
    cls = PARTITIONS[kind]
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ConfigError(f"{name} is no option of partition {kind!r}: it takes {', '.join(known)}")
    for name, field in known.items():
        if name not in options and field.default is MISSING:
            raise ConfigError(f"partition {kind!r} needs {name}")
    return cls(**options)
