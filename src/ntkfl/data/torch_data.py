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
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for number, item in enumerate(_items(who, source)):
        at = f"{who}: {kind} {number}"
        item = item if pair is None else pair(item)
        if not isinstance(item, tuple | list) or len(item) != 2:
            shown = f"{len(item)} parts" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise DataError(f"{at} is {shown}; {_ADVICE}")
        x, y = _tensor(at, "x", item[0]), _tensor(at, "y", item[1])
        if batched and (not x.ndim or not y.ndim or len(x) != len(y)):
            raise DataError(f"{at} has x of shape {list(x.shape)} and y of shape {list(y.shape)}")
        for name, new, first in (("x", x, xs[:1]), ("y", y, ys[:1])):
            if first and _shape(new, batched) != _shape(first[0], batched):
                raise DataError(
                    f"{at} has {name} of shape {_shape(new, batched)}, but {kind} 0 has {_shape(first[0], batched)}"
                )
            if first and new.is_floating_point() != first[0].is_floating_point():
                raise DataError(f"{at} has {name} of {new.dtype}, but {kind} 0 has {first[0].dtype}")
        xs.append(x)
        ys.append(y)
    if not xs:
        raise DataError(f"{who} has no samples")
    join = torch.cat if batched else torch.stack
    return join(xs), join(ys)


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
            if pair is not None and isinstance(source, DataLoader):
                once, again = pair(once), pair(again)
            elif pair is not None:
                once, again = ([pair(item) for item in read] for read in (once, again))
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


def _shape(value: Tensor, batched: bool) -> list[int]:
    return list(value.shape[1:] if batched else value.shape)


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
