"""A dataset before it is dealt to clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.data.federated import Federated
from ntkfl.data.partition import Partition
from ntkfl.data.seeds import generator
from ntkfl.data.table import Rows
from ntkfl.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images with labels, split into train and test.

    images uint8 [N, C, H, W], labels int64 [N], test_images uint8 [N', C, H, W], test_labels int64 [N'];
    mean and std hold one number a channel, for pixels in 0..1; writers int64 [N] is who made each training row.
    """

    name: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    writers: Tensor | None = None
    source: str = "memory"
    taken: tuple[tuple[float, int], ...] = ()  # (fraction, seed) of every `without`

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("training", self.images, self.labels),
            ("test", self.test_images, self.test_labels),
        ):
            if images.dtype != torch.uint8 or images.dim() != 4 or labels.dtype != torch.int64:
                raise DataError(
                    f"{self.name}: {part} images must be uint8 [N, C, H, W] with int64 labels, "
                    f"not {images.dtype} {list(images.shape)} with {labels.dtype}"
                )
            if len(images) == 0 or labels.shape != images.shape[:1]:
                raise DataError(f"{self.name}: {len(images)} {part} images with labels of shape {list(labels.shape)}")
            if labels.min() < 0 or labels.max() >= self.classes:
                raise DataError(
                    f"{self.name}: {part} labels must lie in 0..{self.classes - 1}, "
                    f"not {int(labels.min())}..{int(labels.max())}"
                )
        channels = self.images.shape[1]
        if self.test_images.shape[1:] != self.images.shape[1:]:
            raise DataError(f"{self.name}: training and test images differ in shape")
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise DataError(f"{self.name}: mean and std must hold {channels} numbers each, std above 0")
        if self.writers is not None and self.writers.shape != self.labels.shape:
            raise DataError(f"{self.name}: {len(self.writers)} writers for {len(self.labels)} training rows")

    def __repr__(self) -> str:
        shape, test = list(self.images.shape[1:]), len(self.test_labels)
        return f"Dataset({self.name!r}: {len(self)} training and {test} test images {shape}, {self.classes} classes)"

    def __len__(self) -> int:
        """Training rows."""
        return len(self.labels)

    @property
    def train_rows(self) -> Rows:
        """The training rows, normalised when taken."""
        return Rows(self.images, self.labels, self.mean, self.std)

    @property
    def test_rows(self) -> Rows:
        """The test rows, normalised when taken."""
        return Rows(self.test_images, self.test_labels, self.mean, self.std)

    def partition(self, how: Partition, seed: int = 0) -> Federated:
        """Deal the training rows to clients; the same dataset, partition and seed give the same clients."""
        taken = [{"fraction": fraction, "seed": drawn} for fraction, drawn in self.taken]
        note: dict[str, object] = {"without": taken} if taken else {}
        writers = None if self.writers is None else self.writers.numpy()
        return _deal(self.name, self.train_rows, self.test_rows, self.classes, writers, how, seed, note)

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
            images=self.images[left],
            labels=self.labels[left],
            writers=None if self.writers is None else self.writers[left],
            taken=(*self.taken, (float(fraction), int(seed))),
        )
        return rest, *self.train_rows.take(out)


@dataclass(frozen=True, eq=False, repr=False)
class RowDataset:
    """Rows of any kind, split into train and test; writers int64 [N] is whose each training row is, where known, as an
    index into `client_names`. `test_drawn` says that the test rows are a random part of all.
    """

    name: str
    rows: Rows
    test_rows: Rows
    classes: int | None
    writers: Tensor | None = None
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()  # of a table's columns
    test_drawn: bool = False

    def __repr__(self) -> str:
        kind = "real targets" if self.classes is None else f"{self.classes} classes"
        shape = list(self.rows.x.shape[1:])
        return (
            f"RowDataset({self.name!r}: {len(self.rows)} training and {len(self.test_rows)} test rows {shape}, {kind})"
        )

    def __len__(self) -> int:
        """Training rows."""
        return len(self.rows)

    def partition(self, how: Partition, seed: int = 0) -> Federated:
        """Deal the training rows to clients; the same rows, partition and seed give the same clients."""
        if self.classes is None and how.by_class:
            raise ConfigError(f"regression targets have no classes to deal by: partition {how.kind!r} needs some")
        writers = None if self.writers is None else self.writers.numpy()
        note: dict[str, object] = {"test": "a random part of all rows"} if self.test_drawn else {}
        dealt = _deal(self.name, self.rows, self.test_rows, self.classes, writers, how, seed, note)
        names: tuple[str, ...] = ()
        if how.by_writer and writers is not None and self.client_names:
            names = tuple(self.client_names[writers[int(share[0])]] for share in dealt.indices)
        return replace(dealt, client_names=names, class_names=self.class_names, feature_names=self.feature_names)


def _deal(
    name: str,
    rows: Rows,
    test_rows: Rows,
    classes: int | None,
    writers: NDArray[np.int64] | None,
    how: Partition,
    seed: int,
    note: dict[str, object],
) -> Federated:
    labels = rows.y if rows.y.dim() == 1 else rows.y[:, 0]
    shares = how.assign(labels.numpy(), writers, generator(seed, "partition"))
    return Federated(
        name=name,
        rows=rows,
        test_rows=test_rows,
        indices=tuple(torch.from_numpy(np.asarray(share, dtype=np.int64)) for share in shares),
        classes=classes,
        description={"dataset": name, "partition": how.describe(), "seed": int(seed)} | note,
    )
