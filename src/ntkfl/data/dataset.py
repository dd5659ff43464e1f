"""Rows, a dataset of them, and the clients that a partition deals its training rows to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.data.moments import Moments, Standardization
from ntkfl.data.partitions import Partition
from ntkfl.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, repr=False)
class TableRows:
    """Inputs x (uint8 [N, C, H, W], or float32 [N, ...] ready for use) and targets y (int64 [N], or float32 [N, d2]).

    Bytes stay bytes until rows are asked for: float32 would be four times as large, and clients may share rows.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rows at `index` (int64 [n]; all rows if None): x float32 [n, ...] normalised, y [n] or [n, d2]."""
        x, y = (self.x, self.y) if index is None else (self.x[index], self.y[index])
        return (x, y) if x.dtype != torch.uint8 else (normalised(x, self.mean, self.std), y)

    def standardized(self, to: Standardization) -> TableRows:
        """(x − mean)/std of what `take` gives. Bytes stay bytes: their own mean and std are changed."""
        if self.x.dtype != torch.uint8:
            return replace(self, x=to.standardize(self.x))
        to.standardize(self.take(torch.arange(0))[0])  # refuses numbers of another width
        mean = tuple(own + std * more for own, std, more in zip(self.mean, self.std, to.mean, strict=True))
        return replace(self, mean=mean, std=tuple(std * more for std, more in zip(self.std, to.std, strict=True)))


def normalised(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x/255 − mean)/std as float32, of bytes x [N, C, H, W] and a number for each channel."""
    means, stds = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))
    return x.to(torch.float32).div_(255).sub_(means).div_(stds)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Samples:
    """Training and test rows with labels or real targets (`classes` is None), and what is known of them.

    `client_names`, `class_names` and `feature_names` (of a table's columns), where they are known, are never sent.
    `classes_declared` is false where the classes were collected from the labels: which classes there are then tells of
    single records, and runs with differential privacy refuse such data.
    """

    name: str
    rows: TableRows
    test_rows: TableRows
    classes: int | None
    description: Mapping[str, Any] = field(default_factory=dict)
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    classes_declared: bool = True

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, e.g. (1, 28, 28)."""
        return tuple(self.rows.x.shape[1:])

    @property
    def output_dim(self) -> int:
        """Outputs a network needs: the classes, or the targets' width for regression."""
        return self.classes if self.classes is not None else self.rows.y.shape[1]

    def _known(self) -> dict[str, Any]:
        """All these fields, for samples that are dealt or pooled."""
        return {known.name: getattr(self, known.name) for known in fields(_Samples)}

    def _inputs_and_targets(self) -> str:
        """Their kinds, for people."""
        targets = "real targets" if self.classes is None else f"{self.classes} classes"
        return f"inputs {list(self.input_shape)}, {targets}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Dataset(_Samples):
    """Samples before they are dealt to clients.

    writers int64 [N] is whose each training row is, where known, as an index into `client_names` where those are.
    """

    writers: Tensor | None = None

    def __repr__(self) -> str:
        rows = f"{len(self)} training and {len(self.test_rows)} test samples"
        return f"Dataset({self.name!r}: {rows}, {self._inputs_and_targets()})"

    def __len__(self) -> int:
        """Training rows."""
        return len(self.rows)

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
        about = {"dataset": self.name, "partition": how.describe(), "seed": int(seed)}
        indices = tuple(torch.from_numpy(np.asarray(share, dtype=np.int64)) for share in shares)
        changes = {"description": about | {**self.description}, "client_names": names}
        return Federated(**self._known() | changes, indices=indices)

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
            description={**self.description, "without": {"fraction": float(fraction), "seed": int(seed)}},
        )
        return rest, *self.rows.take(out)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Federated(_Samples):
    """Clients as index sets over one store of rows, so that dealing rows out copies none.

    Made by `Dataset.partition` or `from_clients`; indices holds one int64 [n] a client.
    """

    indices: tuple[Tensor, ...]
    shared: tuple[Tensor, Tensor] | None = None  # data that the server holds for all clients (data-share)
    standardization: Standardization | None = None  # where inputs were standardised

    def __post_init__(self) -> None:
        if not self.indices:
            raise DataError(f"{self.name}: a federation needs at least one client")
        for number, index in enumerate(self.indices):
            if len(index) == 0:
                raise DataError(f"{self.name}: client {number} has no samples")
            if index.min() < 0 or index.max() >= len(self.rows):
                raise DataError(f"{self.name}: client {number} has a row outside 0..{len(self.rows) - 1}")
        named = {"clients": (self.client_names, len(self)), "classes": (self.class_names, self.classes)}
        for what, (names, count) in named.items():
            if names and (len(names) != count or len(set(names)) != count):
                raise DataError(f"{self.name}: {len(set(names))} names for {count} {what}: each needs its own")

    def __repr__(self) -> str:
        """Sizes alone: whoever prints a federation does not print people's rows."""
        least, most = min(self.sizes), max(self.sizes)
        each = f"{least}" if least == most else f"{least} to {most}"
        return (
            f"Federated({self.name!r}: {len(self)} clients of {each} samples, {self._inputs_and_targets()}, "
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

    @property
    def sizes(self) -> list[int]:
        """Samples of each client."""
        return [len(index) for index in self.indices]

    def counts(self) -> NDArray[np.int64]:
        """Samples of each class at each client, [clients, classes]."""
        if self.classes is None:
            raise DataError(f"{self.name}: regression targets have no classes to count")
        labels = self.rows.y.numpy()
        return np.stack([np.bincount(labels[index.numpy()], minlength=self.classes) for index in self.indices])

    def pooled(self) -> Dataset:
        """All clients' rows as `from_clients` joined them, to be dealt anew; each row's writer is its client."""
        writers = torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.sizes))
        return Dataset(**self._known() | {"description": {}}, writers=writers)

    def describe(self) -> dict[str, Any]:
        """What these clients are, in plain values for JSON or TOML."""
        sizes = {"clients": len(self), "samples": sum(self.sizes), "test_samples": len(self.test_rows)}
        return dict(self.description) | sizes

    def fingerprint(self) -> str:
        """sha256 (hex) over all that determines training: inputs, targets, normalisation, who has which row, test."""
        digest = hashlib.sha256(f"ntkfl data 1; {self.classes} {self.sizes};".encode())
        for rows in (self.rows, self.test_rows):
            digest.update(f"{rows.mean} {rows.std};".encode())
            for tensor in (rows.x, rows.y):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
                digest.update(tensor.contiguous().numpy().data)
        digest.update(torch.cat(self.indices).numpy().data)
        return digest.hexdigest()

    def moments(self) -> Moments:
        """n, Σ x and Σ x² of all clients' inputs: what each of them would tell, added up."""
        return reduce(add, (Moments.of(self.client(number)[0]) for number in range(len(self))))

    def standardized(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Federated:
        """The same clients and test set with inputs of mean 0 and deviation 1 by feature (of images, by channel), taken
        from `moments`; or, where no client may tell them, public numbers `mean` and `std`. A run keeps them:
        `Run.evaluate` and exported models take inputs as they were before; to `run.model` itself, give what
        `run.standardization.standardize` makes of them.
        """
        public = mean is not None or std is not None
        to = Standardization(mean=mean, std=std, public=True) if public else Standardization.of(self.moments())
        return replace(
            self,
            rows=self.rows.standardized(to),
            test_rows=self.test_rows.standardized(to),
            description={**self.description, "standardized": to.model_dump(mode="json") if public else True},
            shared=None if self.shared is None else (to.standardize(self.shared[0]), self.shared[1]),
            standardization=to,
        )

    def hold_out(self, count: int, seed: int = 0) -> tuple[Federated, Federated]:
        """Set `count` random clients aside: (training clients, held-out clients), both in the old order."""
        if not 1 <= count < len(self):
            raise ConfigError(f"hold_out must leave clients on both sides: 1..{len(self) - 1} of them, not {count!r}")
        order = generator(seed, "hold out").permutation(len(self))

        def part(name: str, numbers: NDArray[np.int64]) -> Federated:
            step = {"count": int(count), "seed": int(seed), "part": name}
            return replace(
                self,
                indices=tuple(self.indices[number] for number in numbers),
                client_names=tuple(self.client_names[number] for number in numbers) if self.client_names else (),
                description={**self.description, "hold_out": [*self.description.get("hold_out", []), step]},
            )

        return part("training", np.sort(order[count:])), part("held-out", np.sort(order[:count]))


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A stream determined by `seed` and `purpose`: one seed may serve a partition and a hold-out without tying them."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *purpose.encode()])))
