"""A dataset before it is dealt to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkfl.data.federated import Federated, TableRows, generator, kind_of
from ntkfl.data.partitions import Partition
from ntkfl.errors import ConfigError


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows with labels or real targets (`classes` is None), split into train and test.

    writers int64 [N] is whose each training row is, where known, as an index into `client_names` where those are.
    `about` goes into the description of clients made of it. The rest is as for `Federated`.
    """

    name: str
    rows: TableRows
    test_rows: TableRows
    classes: int | None
    writers: Tensor | None = None
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    classes_declared: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        rows = f"{len(self.rows)} training and {len(self.test_rows)} test rows {list(self.rows.x.shape[1:])}"
        return f"Dataset({self.name!r}: {rows}, {kind_of(self.classes)})"

    def __len__(self) -> int:
        """Training rows."""
        return len(self.rows)

    @property
    def output_dim(self) -> int:
        """Outputs a network needs: the classes, or the targets' width for regression."""
        return self.classes if self.classes is not None else self.rows.y.shape[1]

    def partition(self, how: Partition, seed: int = 0) -> Federated:
        """Deal the training rows to clients; the same dataset, partition and seed give the same clients."""
        if self.classes is None and how.by_class:
            raise ConfigError(f"regression targets have no classes to deal by: partition {how.kind!r} needs some")
        labels = self.rows.y if self.rows.y.dim() == 1 else self.rows.y[:, 0]
        writers = None if self.writers is None else self.writers.numpy()
        shares = how.assign(labels.numpy(), writers, generator(seed, "partition"))
        names: tuple[str, ...] = ()
        if how.by_writer and writers is not None and self.client_names:
            names = tuple(self.client_names[writers[int(share[0])]] for share in shares)
        return Federated(
            name=self.name,
            rows=self.rows,
            test_rows=self.test_rows,
            indices=tuple(torch.from_numpy(np.asarray(share, dtype=np.int64)) for share in shares),
            classes=self.classes,
            description={"dataset": self.name, "partition": how.describe(), "seed": int(seed), **self.about},
            client_names=names,
            class_names=self.class_names,
            feature_names=self.feature_names,
            classes_declared=self.classes_declared,
        )

    def without(self, fraction: float, seed: int = 0) -> tuple[Dataset, Tensor, Tensor]:
        """Take a uniformly random `fraction` of the training rows out: what is left, and x [n, ...], y [n] taken."""
        count = round(fraction * len(self)) if 0 < fraction < 1 else 0
        if not 0 < count < len(self):
            raise ConfigError(
                f"fraction must take out at least one and not all of {len(self)} training rows, not {fraction!r}"
            )
        order = torch.from_numpy(generator(seed, "without").permutation(len(self)))
        out, left = order[:count].sort().values, order[count:].sort().values
        rest = replace(
            self,
            rows=replace(self.rows, x=self.rows.x[left], y=self.rows.y[left]),
            writers=None if self.writers is None else self.writers[left],
            about={**self.about, "without": {"fraction": float(fraction), "seed": int(seed)}},
        )
        return rest, *self.rows.take(out)
