"""How training rows are dealt to clients: partitions by their names, and what one of your own is made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import ConfigError, DataError

Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


class Partition(ABC):
    """How training rows are dealt to clients. A partition of your own is a frozen dataclass that subclasses this."""

    kind: ClassVar[str]
    by_class: ClassVar[bool] = False  # whether it reads labels as classes
    by_writer: ClassVar[bool] = False  # whether a client is a writer, with that one's rows alone

    @abstractmethod
    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Each client's rows as increasing indices into labels [N]; no client is empty. Randomness from `rng` alone."""

    def __post_init__(self) -> None:
        for name, value in self.describe().items():
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {value!r}")

    def describe(self) -> dict[str, object]:
        """The options in plain values; those left unset are left out."""
        return {"kind": self.kind} | {name: value for name, value in vars(self).items() if value is not None}


def check_enough(rows: int, clients: int, each: int = 1) -> None:
    """Raise unless every client can have `each` rows, or shards, of its own."""
    if rows < clients * each:
        raise ConfigError(f"{clients} clients of at least {each} cannot share {rows} samples: use fewer clients")


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Client m's samples have a class mix q_m ~ Dir(α, …, α) (Hsu, Qi & Brown 2019); a small alpha gives a client few
    classes, a large one IID.

    Clients are disjoint, use all N rows and have sizes equal to within one: where a class runs dry, q_m is renormalised
    over the classes left.
    """

    kind: ClassVar[str] = "dirichlet"
    by_class: ClassVar[bool] = True

    clients: int
    alpha: float

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        check_enough(len(labels), self.clients)
        pools = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        log_mix = log_dirichlet(self.alpha, (self.clients, len(pools)), rng)
        return [np.sort(share) for share in deal(pools, log_mix, rng)]


def log_dirichlet(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Logarithms of `shape[0]` draws from the symmetric Dirichlet over `shape[1]` categories.

    In logarithms because at α = 0.001 most entries lie below the smallest double, and renormalising a draw of zeros
    gives NaN. Uses Gamma(α) = Gamma(α + 1) · U^(1/α); −log U is exponential.
    """
    alpha = max(alpha, 1e-300)  # below it −log U/α overflows, and the draws are one-hot either way
    log_mix: Floats = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    log_mix -= log_mix.max(axis=1, keepdims=True)
    log_mix -= np.log(np.exp(log_mix).sum(axis=1, keepdims=True))
    return log_mix


def deal(pools: list[Indices], log_mix: Floats, rng: np.random.Generator) -> list[Indices]:
    """Deal shuffled pools of rows, one a class, out without replacement: every client to its full size, by its mix
    exp(log_mix[client]) over classes.

    Every round of the inner loop draws the client's missing rows from a multinomial over the classes that have some
    left, and takes no more of a class than there are. It ends, since each round empties a class or fills the client.
    """
    clients, rows = len(log_mix), sum(map(len, pools))
    left = np.array([len(pool) for pool in pools])
    shares: list[Indices] = [np.empty(0, np.int64)] * clients
    # In random order, since those served last live on what is left: a client's number should say nothing about it.
    for client in rng.permutation(clients):
        missing = rows // clients + int(client < rows % clients)
        start = left.copy()
        while missing:
            # Draws beyond a pool are drawn again from the classes left: the same as Hsu's one by one, only faster.
            logits = np.where(left > 0, log_mix[client], -np.inf)
            mix = np.exp(logits - logits.max())
            drawn = np.minimum(rng.multinomial(missing, mix / mix.sum()), left)
            left -= drawn
            missing -= int(drawn.sum())
        shares[client] = np.concatenate([pool[b:a] for pool, a, b in zip(pools, start, left, strict=True)])
    return shares


@dataclass(frozen=True)
class IID(Partition):
    """A uniformly random split of all rows into clients of sizes equal to within one."""

    kind: ClassVar[str] = "iid"

    clients: int

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        check_enough(len(labels), self.clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), self.clients)]


@dataclass(frozen=True)
class Shards(Partition):
    """Rows sorted by label are cut into clients · per_client shards, dealt at random (McMahan et al. 2017)."""

    kind: ClassVar[str] = "shards"
    by_class: ClassVar[bool] = True

    clients: int
    per_client: int = 2

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        count = self.clients * self.per_client
        check_enough(len(labels), self.clients, self.per_client)
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

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        if writers is None:
            raise DataError("this dataset does not say who wrote its rows: partition by writer needs femnist")
        names, counts = np.unique(writers, return_counts=True)
        chosen = names[counts >= self.min_samples]
        wanted = max(1, len(chosen)) if self.clients is None else self.clients
        if wanted > len(chosen):
            raise ConfigError(
                f"{wanted} clients asked for, but {len(chosen)} writers have at least {self.min_samples} samples: "
                "ask for fewer, or lower min_samples"
            )
        return [np.flatnonzero(writers == name) for name in np.sort(rng.choice(chosen, wanted, replace=False))]


@dataclass(frozen=True)
class ByClient(Partition):
    """One client per name in a file's column `client`, in the names' order."""

    kind: ClassVar[str] = "client"
    by_writer: ClassVar[bool] = True

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        if writers is None:
            raise DataError(
                "this dataset does not say whose its rows are: it has no column or array 'client'; name the one that "
                "does by --client-column (in Python: client=), or deal the rows, as by --partition iid --clients 10"
            )
        return [np.flatnonzero(writers == number) for number in np.unique(writers)]


PARTITIONS: dict[str, type[Partition]] = {cls.kind: cls for cls in (Dirichlet, ByWriter, IID, Shards, ByClient)}
