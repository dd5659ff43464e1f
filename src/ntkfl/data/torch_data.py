"""torch Datasets and DataLoaders read whole, as the arrays (x, y) that a client's data are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from itertools import starmap
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ntkfl.errors import DataError

TorchData: TypeAlias = Dataset[Any] | DataLoader[Any]
Pair: TypeAlias = Callable[[Any], tuple[Any, Any]]
_READ_TWICE = 8  # items
_ADVICE = "every item must be a pair (x, y): wrap the dataset in one whose items are (docs/data.md has an example)"


def read_torch(who: str, source: TorchData, pair: Pair | None = None) -> tuple[Tensor, Tensor]:
    """x [n, ...] and y [n] or [n, d2] of one pass: items of a Dataset, batches of a DataLoader. `who` is for errors;
    `pair` makes (x, y) of an item or batch that is something else, such as a dictionary.
    """
    if isinstance(source, TensorDataset) and len(source.tensors) == 2 and pair is None:
        return source.tensors[0], source.tensors[1]
    batched = isinstance(source, DataLoader) and source.batch_sampler is not None
    kind = "batch" if batched else "item"
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, item in enumerate(_items(who, source)):
        at = f"{who}: {kind} {number}"
        item = item if pair is None else pair(item)
        if not isinstance(item, tuple | list) or len(item) != 2:
            shown = f"{len(item)} parts" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise DataError(f"{at} is {shown}; {_ADVICE}")
        values = [_tensor(at, name, value) for name, value in zip("xy", item, strict=True)]
        if batched and (not all(value.ndim for value in values) or len(values[0]) != len(values[1])):
            raise DataError(f"{at} has x of shape {list(values[0].shape)} and y of shape {list(values[1].shape)}")
        for name, value, column in zip("xy", values, columns, strict=True):
            first, shape = (column or [value])[0], slice(int(batched), None)
            if value.shape[shape] != first.shape[shape]:
                was, now = list(first.shape[shape]), list(value.shape[shape])
                raise DataError(f"{at} has {name} of shape {now}, but {kind} 0 has {was}")
            if value.is_floating_point() != first.is_floating_point():
                raise DataError(f"{at} has {name} of {value.dtype}, but {kind} 0 has {first.dtype}")
            column.append(value)
    if not columns[0]:
        raise DataError(f"{who} has no samples")
    join = torch.cat if batched else torch.stack
    return join(columns[0]), join(columns[1])


def varies(source: TorchData, pair: Pair | None = None) -> bool:
    """Whether a few items, read twice, differ. Not of what can only be iterated: it may give every item once alone."""
    items = source.dataset if isinstance(source, DataLoader) else source
    if isinstance(items, IterableDataset | TensorDataset) or not isinstance(items, Sized):
        return False
    collate = source.collate_fn if isinstance(source, DataLoader) else list
    chosen = range(0, len(items), max(1, len(items) // _READ_TWICE))[:_READ_TWICE]
    try:
        with torch.random.fork_rng(devices=[]):  # what its user draws later stays as it is
            once, again = (collate([items[i] for i in chosen]) for _ in range(2))
        if pair is not None:
            read = pair if isinstance(source, DataLoader) else lambda batch: [pair(item) for item in batch]
            once, again = read(once), read(again)
        return not all(starmap(_equal, zip(once, again, strict=True)))
    except Exception:  # a sampler of other keys than 0, 1, …: it was read, and cannot be read so
        return False


def _equal(one: Any, other: Any) -> bool:
    """Of items, or of batches: pairs of tensors, arrays or numbers."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(starmap(_equal, zip(one, other, strict=True)))
    return torch.equal(_tensor("", "x", one), _tensor("", "x", other))


def _items(who: str, source: TorchData) -> Iterable[Any]:
    if isinstance(source, DataLoader | IterableDataset):
        return source
    if not isinstance(source, Sized):
        raise DataError(f"{who}: {type(source).__name__} has no length: define __len__, or make it an IterableDataset")
    return (source[i] for i in range(len(source)))  # most define no iteration of their own


def _tensor(at: str, name: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, bool | int | float | np.ndarray | np.generic | list | tuple):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "biu" else np.float32))
    if name == "y":
        raise DataError(f"{at} has the label {value!r}: labels must be integers 0, 1, …, or floats for regression")
    hint = ": give the dataset a transform that makes tensors" if hasattr(value, "convert") else ""
    raise DataError(f"{at} has x of type {type(value).__name__}, not a tensor or array of numbers{hint}")
