"""Label skew by Dirichlet draws, in the two readings found in the literature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ntkfl.data.partition import Indices, Partition, check_enough, check_positive
from ntkfl.errors import ConfigError, unknown

Reading: TypeAlias = Literal["composition", "shares"]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Every client m draws a class mix q_m ~ Dir(α, …, α); small alpha gives few classes a client, large alpha IID.

    reading="composition" (Hsu, Qi & Brown 2019): client m's samples have the class mix q_m. By default clients are
    disjoint, use all N rows and have sizes equal to within one: where a class runs dry, q_m is renormalised over the
    classes left. With overlap=True each client draws from whole classes, so images are shared between clients, and
    takes ⌊q_m · N/clients⌋ of each class, so it has a few less than N/clients.
    reading="shares": the images of class c are split between clients in proportion to q_{m,c}; disjoint, sizes vary.
    """

    kind: ClassVar[str] = "dirichlet"
    by_class: ClassVar[bool] = True

    clients: int
    alpha: float
    reading: Reading = "composition"
    overlap: bool = False

    def __post_init__(self) -> None:
        check_positive("clients", self.clients)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be a number above 0, not {self.alpha!r}")
        if self.reading not in get_args(Reading):
            raise unknown("reading", self.reading, get_args(Reading))
        if self.overlap and self.reading == "shares":
            raise ConfigError("overlap needs reading 'composition': shares split each class, so clients are disjoint")

    @property
    def text(self) -> str:
        """In words: α and the reading, which make very different clients of one α."""
        return f"Dirichlet α = {self.alpha:g}, {self.reading}{', overlapping' if self.overlap else ''}"

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        """Rows of each client, see the class."""
        check_enough(len(labels), self.clients)
        pools = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        log_mix = log_dirichlet(self.alpha, (self.clients, len(pools)), rng)
        if self.reading == "shares":
            shares = shares_reading(pools, log_mix, rng)
        elif self.overlap:
            shares = _overlapping(pools, log_mix, rng)
        else:
            shares = disjoint(pools, log_mix, rng)
        return [np.sort(share) for share in shares]


def log_dirichlet(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of `shape[0]` draws from the symmetric Dirichlet over `shape[1]` categories.

    In logarithms because at α = 0.001 most entries lie below the smallest double, and renormalising a draw of zeros
    gives NaN. Uses Gamma(α) = Gamma(α + 1) · U^(1/α); −log U is exponential.
    """
    alpha = max(alpha, 1e-300)  # below it −log U/α overflows, and the draws are one-hot either way
    log_mix: NDArray[np.float64] = (
        np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    )
    log_mix -= log_mix.max(axis=1, keepdims=True)
    log_mix -= np.log(np.exp(log_mix).sum(axis=1, keepdims=True))
    return log_mix


def _softmax(logits: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits - logits.max(axis=axis, keepdims=True))
    weights /= weights.sum(axis=axis, keepdims=True)
    return weights


def disjoint(pools: list[Indices], log_mix: NDArray[np.float64], rng: np.random.Generator) -> list[Indices]:
    """Deal shuffled pools out without replacement, every client to its full size."""
    clients, rows = len(log_mix), sum(map(len, pools))
    left = np.array([len(pool) for pool in pools])
    shares: list[Indices] = [np.empty(0, np.int64)] * clients
    # In random order, since those served last live on what is left: a client's number should say nothing about it.
    for client in rng.permutation(clients):
        missing = rows // clients + int(client < rows % clients)
        start = left.copy()
        while missing:
            # Draws beyond a pool are drawn again from the classes left: the same as Hsu's one by one, only faster.
            mix = _softmax(np.where(left > 0, log_mix[client], -np.inf), axis=0)
            drawn = np.minimum(rng.multinomial(missing, mix), left)
            left -= drawn
            missing -= int(drawn.sum())
        shares[client] = np.concatenate([pool[b:a] for pool, a, b in zip(pools, start, left, strict=True)])
    return shares


def _overlapping(pools: list[Indices], log_mix: NDArray[np.float64], rng: np.random.Generator) -> list[Indices]:
    """Every client draws from the whole of each class, without replacement inside the client."""
    sizes = np.array([len(pool) for pool in pools])
    each = int(sizes.sum()) // len(log_mix)
    shares = []
    for mix in np.exp(log_mix):
        counts = np.minimum(np.floor(mix * each).astype(np.int64), sizes)
        if not counts.any():
            counts[mix.argmax()] = 1
        drawn = [rng.choice(pool, n, replace=False) for pool, n in zip(pools, counts, strict=True)]
        shares.append(np.concatenate(drawn))
    return shares


def shares_reading(pools: list[Indices], log_mix: NDArray[np.float64], rng: np.random.Generator) -> list[Indices]:
    """Cut every shuffled class at the clients' cumulated shares; an empty client gets one row of the largest client."""
    weights = _softmax(log_mix, axis=0)
    parts = []
    for pool, weight in zip(pools, weights.T, strict=True):
        cuts = np.rint(np.cumsum(weight)[:-1] * len(pool)).astype(np.int64)
        parts.append(np.split(pool, cuts))
    shares = [np.concatenate(part) for part in zip(*parts, strict=True)]
    for empty in [client for client, share in enumerate(shares) if len(share) == 0]:
        largest = max(range(len(shares)), key=lambda client: len(shares[client]))
        row = rng.integers(len(shares[largest]))
        shares[empty] = shares[largest][row : row + 1]
        shares[largest] = np.delete(shares[largest], row)
    return shares
