"""Clients made of a user's own arrays, torch Datasets or DataLoaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntkfl.data.dataset import Dataset as Whole
from ntkfl.data.federated import Federated
from ntkfl.data.partitions import Partition
from ntkfl.data.table import TableRows
from ntkfl.data.torch_data import TorchData, read_torch, varies
from ntkfl.errors import ConfigError, DataError, unknown

Array: TypeAlias = Tensor | NDArray[Any]
Source: TypeAlias = tuple[Array, Array] | TorchData  # of one client's samples
TARGETS = ("real", "classes")


def from_clients(
    clients: Iterable[Source] | Mapping[str, Source],
    *,
    test: Source,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "own",
    tokens: bool = False,
    targets: str | None = None,
) -> Federated:
    """A federation of one (x, y), torch Dataset or DataLoader per client, and a test set that every run is measured on.

    A mapping names the clients, `class_names` the classes, for reports and commands; no name is ever sent.

    Items of a Dataset are pairs (x, y) of one sample, those of a DataLoader are batches; each is read once, whole.
    x is [n, ...] of one feature shape, made float32 and used as it is, so normalise it first; with `tokens` it holds
    whole numbers, for a network that begins with an embedding, and stays whole. y is integer labels [n]
    in 0..classes-1 (classes defaults to the largest label + 1, at least 2), or float regression targets [n] or [n, d2].
    `targets="real"` makes whole numbers regression targets too (a count, an age), `targets="classes"` refuses others.
    """
    if targets not in (None, *TARGETS):
        raise unknown("kind of targets", targets, TARGETS)
    named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not named:
        raise DataError("from_clients needs at least one client (x, y)")
    sources = [(f"client {who}", source) for who, source in named.items()] + [("test", test)]
    pairs: list[tuple[Tensor, Tensor]] = []
    for who, source in sources:
        x, y = read_source(who, source, tokens)
        pairs.append((x, _as_told(who, y, targets)))
        (first_x, first_y), (x, y), first = pairs[0], pairs[-1], sources[0][0]
        if x.shape[1:] != first_x.shape[1:]:
            raise DataError(f"{who} has features {list(x.shape[1:])}, but {first} has {list(first_x.shape[1:])}")
        if y.dtype != first_y.dtype or y.shape[1:] != first_y.shape[1:]:
            raise DataError(f"{who} has {_kind(y)}, but {first} has {_kind(first_y)}")
    labelled = {who: y for (who, _), (_, y) in zip(sources, pairs, strict=True)}
    known = _classes(labelled, classes or len(class_names) or None)

    *parts, (test_x, test_y) = pairs
    xs, ys = zip(*parts, strict=True)
    return Federated(
        name=name,
        rows=TableRows(torch.cat(xs), torch.cat(ys)),
        test_rows=TableRows(test_x, test_y),
        indices=torch.split(torch.arange(sum(map(len, ys))), [len(y) for y in ys]),
        classes=known,
        description={"dataset": name},
        client_names=tuple(map(str, clients)) if isinstance(clients, Mapping) else (),
        class_names=tuple(class_names),
    )


def from_datasets(
    train: TorchData | tuple[Array, Array] | Sequence[Source] | Mapping[str, Source],
    *,
    test: Source,
    partition: Partition | None = None,
    seed: int = 0,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "own",
    tokens: bool = False,
    targets: str | None = None,
) -> Federated:
    """One training set, dealt to clients by `partition` from `seed`; or a list (or mapping by name) of them, one per
    client, as they are.

    Everything else is as for `from_clients`.
    """
    made = {"test": test, "classes": classes, "class_names": class_names, "name": name, "tokens": tokens}
    made["targets"] = targets
    if isinstance(train, list | Mapping) or (isinstance(train, tuple) and not _is_pair(train)):
        if partition is not None:
            raise ConfigError("partition deals one training set to clients, and a list of them comes dealt")
        return from_clients(train, **made)  # type: ignore[arg-type]
    if partition is None:
        raise ConfigError("one training set needs a partition, such as ntkfl.data.Dirichlet(clients=20, alpha=0.1)")
    whole = from_clients([train], **made)  # type: ignore[arg-type, list-item]
    rows = Whole(name, whole.rows, whole.test_rows, whole.classes, class_names=whole.class_names)
    return rows.partition(partition, seed)


def _is_pair(value: tuple[Any, ...]) -> bool:
    return len(value) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in value)


def read_source(who: str, source: Source, tokens: bool = False) -> tuple[Tensor, Tensor]:
    """A client's samples, checked: see `checked_pair`."""
    if isinstance(source, Dataset | DataLoader):
        if varies(source):
            warnings.warn(
                "items of a torch Dataset change when they are read again, as those of a random transform do: they are "
                "read once, so that every round trains on one draw of each and nothing is augmented",
                stacklevel=2,
            )
        source = read_torch(who, source)
    return checked_pair(who, source, tokens)


def checked_pair(who: str, pair: tuple[Array, Array], tokens: bool = False) -> tuple[Tensor, Tensor]:
    """x float32 (tokens: int64) [n, ...] and y (int64 [n] or float32 [n, d2]); copies: the originals may change."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), a torch Dataset or a DataLoader, not {type(pair).__name__}")
    raw_x, raw_y = _tensor(who, "x", pair[0], tokens), _tensor(who, "y", pair[1], True)
    if raw_x.dim() < 2:
        raise DataError(f"{who}: x must be [samples, features…], not {list(raw_x.shape)}")
    if len(raw_x) == 0:
        raise DataError(f"{who} has no samples")
    if raw_y.dim() == 0 or len(raw_y) != len(raw_x):
        raise DataError(f"{who} has {len(raw_x)} samples but y of shape {list(raw_y.shape)}")
    if tokens and (raw_x.is_floating_point() or raw_x.min() < 0):
        raise DataError(f"{who}: tokens must be whole numbers from 0 on, not {raw_x.dtype}")
    x = raw_x.to(torch.int64 if tokens else torch.float32, copy=True)
    if raw_y.is_floating_point():
        if raw_y.dim() > 2:
            raise DataError(f"{who}: regression targets must be [n] or [n, d2], not {list(raw_y.shape)}")
        y = raw_y.to(torch.float32, copy=True).reshape(len(raw_y), -1)
    else:
        if raw_y.dim() != 1:
            raise DataError(f"{who}: labels must be one integer a sample [n], not {list(raw_y.shape)}")
        y = raw_y.to(torch.int64, copy=True)
    for label, value in (("x", x), ("y", y)):
        if not value.isfinite().all():
            raise DataError(f"{who}: {label} has a value that is not finite as float32 (NaN, inf or too large)")
    return x, y


def _as_told(who: str, y: Tensor, targets: str | None) -> Tensor:
    """Checked targets as the kind that was named: real ones float32 [n, d2], classes int64 [n]."""
    if targets == "real" and not y.is_floating_point():
        return y.to(torch.float32).unsqueeze(1)
    if targets == "classes" and y.is_floating_point():
        if y.shape[1] != 1 or not bool((y == y.round()).all()):
            raise DataError(f"{who}: targets are told to be classes, and y holds numbers that are not whole")
        return y[:, 0].to(torch.int64)
    return y


def _tensor(who: str, label: str, value: Array, may_be_whole: bool) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{who}: {label} must hold numbers, not {array.dtype}")
        whole = may_be_whole and array.dtype.kind in "biu"
        with np.errstate(over="ignore"):  # what overflows is found below, as not finite
            tensor = torch.from_numpy(array.astype(np.int64 if whole else np.float32))
    if tensor.is_complex():
        raise DataError(f"{who}: {label} must hold real numbers, not {tensor.dtype}")
    return tensor


def _kind(y: Tensor) -> str:
    return f"regression targets of width {y.shape[1]}" if y.is_floating_point() else "integer labels"


def _classes(targets: Mapping[str, Tensor], given: int | None) -> int | None:
    """The number of classes, or None for regression."""
    if next(iter(targets.values())).is_floating_point():
        if given is not None:
            raise ConfigError("classes was given, but y holds floats, which are regression targets: make y integers")
        return None
    if given is not None and given < 2:
        raise ConfigError(f"classes must be at least 2, not {given!r}")
    classes = given or max(2, 1 + max(int(y.max()) for y in targets.values()))
    for who, y in targets.items():
        if y.min() < 0 or y.max() >= classes:
            raise DataError(f"{who}: labels must lie in 0..{classes - 1}, not {int(y.min())}..{int(y.max())}")
    return classes
