"""Clients and a test set: what training consumes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.data.moments import Moments, Standardization
from ntkfl.data.seeds import generator
from ntkfl.data.table import TableRows, new_digest
from ntkfl.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, repr=False)
class Federated:
    """Clients as index sets over one store of rows, so that clients sharing rows cost no copies.

    Made by `Dataset.partition` or `from_clients`; indices holds one int64 [n] a client, classes is None for regression.
    `client_names`, `class_names` and `feature_names` (of a table's columns), where they are known, are never sent.
    """

    name: str
    rows: TableRows
    test_rows: TableRows
    indices: tuple[Tensor, ...]
    classes: int | None
    description: Mapping[str, Any]
    shared: tuple[Tensor, Tensor] | None = None  # data that the server holds for all clients (data-share)
    standardization: Moments | None = None  # of all clients, where inputs were standardised by it
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.indices:
            raise DataError(f"{self.name}: a federation needs at least one client")
        for number, index in enumerate(self.indices):
            if len(index) == 0:
                raise DataError(f"{self.name}: client {number} has no samples")
            if index.min() < 0 or index.max() >= len(self.rows):
                raise DataError(f"{self.name}: client {number} has a row outside 0..{len(self.rows) - 1}")
        for what, names, count in (
            ("clients", self.client_names, len(self.indices)),
            ("classes", self.class_names, self.classes),
        ):
            if names and (len(names) != count or len(set(names)) != len(names)):
                raise DataError(f"{self.name}: {len(set(names))} names for {count} {what}: each needs its own")

    def __repr__(self) -> str:
        """Sizes alone: whoever prints a federation does not print people's rows."""
        kind = "real targets" if self.classes is None else f"{self.classes} classes"
        least, most = min(self.sizes), max(self.sizes)
        each = f"{least}" if least == most else f"{least} to {most}"
        return (
            f"Federated({self.name!r}: {len(self)} clients of {each} samples, inputs {list(self.input_shape)}, {kind}, "
            f"{len(self.test_rows)} test samples)"
        )

    def __len__(self) -> int:
        """Clients."""
        return len(self.indices)

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Client `number`'s x float32 [n, *input_shape] and y (int64 [n], or float32 [n, output_dim])."""
        if not 0 <= number < len(self):
            raise DataError(f"{self.name}: no client {number}, clients are 0..{len(self) - 1}")
        return self.rows.take(self.indices[number])

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """The test set, x and y as for a client. Kept once made, as every round asks for it: do not write into it."""
        return self.test_rows.take()

    def with_shared(self, x: Tensor, y: Tensor) -> Federated:
        """The same clients, and data x, y that the server holds for all of them: what `data-share` deals out."""
        return replace(self, shared=(x, y))

    def moments(self) -> Moments:
        """n, Σ x and Σ x² of all clients' inputs: what each of them would tell, added up."""
        return reduce(add, (Moments.of(self.client(number)[0]) for number in range(len(self))))

    def standardized(self) -> Federated:
        """The same clients and test set with inputs of mean 0 and deviation 1 by feature (of images, by channel), taken
        from `moments`. A run keeps them: `Run.evaluate` and exported models take inputs as they were before; to
        `run.model` itself, give what `run.standardization.standardize` makes of them.
        """
        moments = self.moments()
        to = Standardization.of(moments)
        return replace(
            self,
            rows=_standardized(self.rows, to),
            test_rows=_standardized(self.test_rows, to),
            description={**self.description, "standardized": True},
            shared=None if self.shared is None else (to.standardize(self.shared[0]), self.shared[1]),
            standardization=moments,
        )

    @property
    def sizes(self) -> list[int]:
        """Samples of each client."""
        return [len(index) for index in self.indices]

    @property
    def distinct(self) -> int:
        """Training rows that at least one client has; less than the sum of `sizes` where clients overlap."""
        return len(np.unique(torch.cat(self.indices).numpy()))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, e.g. (1, 28, 28)."""
        return tuple(self.rows.x.shape[1:])

    @property
    def output_dim(self) -> int:
        """Outputs a network needs: the classes, or the targets' width for regression."""
        return self.classes if self.classes is not None else self.rows.y.shape[1]

    def counts(self) -> NDArray[np.int64]:
        """Samples of each class at each client, [clients, classes]."""
        if self.classes is None:
            raise DataError(f"{self.name}: regression targets have no classes to count")
        labels = self.rows.y.numpy()
        return np.stack([np.bincount(labels[index.numpy()], minlength=self.classes) for index in self.indices])

    def describe(self) -> dict[str, Any]:
        """What these clients are, in plain values for JSON or TOML."""
        made = copy.deepcopy(dict(self.description))
        return made | {"clients": len(self), "samples": sum(self.sizes), "test_samples": len(self.test_rows)}

    def fingerprint(self) -> str:
        """sha256 (hex) over all that determines training: inputs, targets, normalisation, who has which row, test."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = new_digest()
        for rows in (self.rows, self.test_rows):
            rows.feed(digest)
        digest.update(f"{self.classes} {self.sizes};".encode())
        digest.update(torch.cat(self.indices).numpy().data)
        return digest.hexdigest()

    def hold_out(self, count: int, seed: int = 0) -> tuple[Federated, Federated]:
        """Set `count` random clients aside: (training clients, held-out clients), both in the old order.

        No client is on both sides. Where clients overlap (`Dirichlet(overlap=True)`), rows can be.
        """
        if not 1 <= count < len(self):
            raise ConfigError(f"hold_out must leave clients on both sides: 1..{len(self) - 1} of them, not {count!r}")
        order = generator(seed, "hold out").permutation(len(self))
        note = {"count": int(count), "seed": int(seed)}
        return (
            self._only(np.sort(order[count:]), {**note, "part": "training"}),
            self._only(np.sort(order[:count]), {**note, "part": "held-out"}),
        )

    def _only(self, clients: NDArray[np.int64], note: Mapping[str, object]) -> Federated:
        steps = [*self.description.get("hold_out", []), dict(note)]
        return replace(
            self,
            indices=tuple(self.indices[number] for number in clients),
            client_names=tuple(self.client_names[number] for number in clients) if self.client_names else (),
            description={**self.description, "hold_out": steps},
        )


def _standardized(rows: TableRows, to: Standardization) -> TableRows:
    """Bytes stay bytes: their own mean and std are changed."""
    if rows.x.dtype != torch.uint8:
        return replace(rows, x=to.standardize(rows.x))
    return replace(
        rows,
        mean=tuple(mean + std * more for mean, std, more in zip(rows.mean, rows.std, to.mean, strict=True)),
        std=tuple(std * more for std, more in zip(rows.std, to.std, strict=True)),
    )
