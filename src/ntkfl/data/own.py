"""Clients made of a user's own arrays, torch Datasets, DataLoaders or folders.

Whatever it comes from, a client's data are one pair (x, y): x float32 [n, …] (or tokens int64), and y as classes
int64 [n] or regression targets float32 [n, d2].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ntkfl.data.dataset import Federated, TableRows, normalised
from ntkfl.data.partitions import Partition
from ntkfl.data.published import Bytes
from ntkfl.errors import ConfigError, DataError

Array: TypeAlias = Tensor | NDArray[Any]
TorchData: TypeAlias = Dataset[Any] | DataLoader[Any]
Source: TypeAlias = tuple[Array, Array] | TorchData  # of one client's samples
Pair: TypeAlias = Callable[[Any], tuple[Any, Any]]
Read: TypeAlias = Callable[[Sequence[Path]], Array]
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
_BATCH = 256  # items of a torch Dataset collated at once


def from_clients(
    clients: Iterable[Source] | Mapping[str, Source],
    *,
    test: Source,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "own",
    tokens: bool = False,
) -> Federated:
    """A federation of one (x, y), torch Dataset or DataLoader per client, and a test set that every run is measured on.

    A mapping names the clients, `class_names` the classes, for reports and commands; no name is ever sent.

    Items of a Dataset are pairs (x, y) of one sample, those of a DataLoader are batches; each is read once, whole, so
    that a random transform is drawn once for all rounds.
    x is [n, ...] of one feature shape, made float32 and used as it is, so normalise it first; with `tokens` it holds
    whole numbers, for a network that begins with an embedding, and stays whole. y is integer labels [n]
    in 0..classes-1 (classes defaults to the largest label + 1, at least 2), or float regression targets [n] or [n, d2]:
    make floats of a count or an age.
    """
    named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not named:
        raise DataError("from_clients needs at least one client (x, y)")
    sources = {**{f"client {who}": source for who, source in named.items()}, "test": test}
    pairs = {who: read_source(who, source, tokens) for who, source in sources.items()}
    known = _classes(pairs, classes or len(class_names) or None)
    test_x, test_y = pairs.pop("test")
    xs, ys = zip(*pairs.values(), strict=True)
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


def from_datasets(train: Source, *, test: Source, partition: Partition, seed: int = 0, **options: Any) -> Federated:
    """One training set, dealt to clients by `partition` from `seed`. `options` are those of `from_clients`."""
    return from_clients([train], test=test, **options).pooled().partition(partition, seed)


def read_source(
    who: str, source: Source, tokens: bool | None = False, pair: Pair | None = None
) -> tuple[Tensor, Tensor]:
    """A client's samples, once and whole, as copies: x float32 (tokens: int64) [n, ...] and y (int64 [n] or float32
    [n, d2]). With `tokens` of None, x that holds whole numbers does hold tokens. `pair` makes (x, y) of a batch that is
    something else, such as a dictionary; `who` is for errors.
    """
    given = _batches(who, source, pair) if isinstance(source, Dataset | DataLoader) else source
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{who} must be a pair (x, y), a torch Dataset or a DataLoader, not {type(given).__name__}")
    x, y = (_numbers(who, part, value) for part, value in zip("xy", given, strict=True))
    if x.dim() < 2 or len(x) == 0:
        raise DataError(f"{who} has no samples [n, features…] but x of shape {list(x.shape)}")
    real, whole = y.is_floating_point(), x.dtype in (torch.int32, torch.int64) if tokens is None else tokens
    if y.shape[:1] != x.shape[:1] or y.dim() > 1 + real:
        wanted = "regression targets [n] or [n, d2]" if real else "integer labels [n]"
        several = (
            "; several labels per sample are real targets: make floats of them" if y.dim() > 1 and not real else ""
        )
        raise DataError(f"{who} has {len(x)} samples, so y must be {wanted}, not {list(y.shape)}{several}")
    if whole and (x.is_floating_point() or x.min() < 0):
        raise DataError(f"{who}: tokens must be whole numbers from 0 on, not {x.dtype}")
    x = x.to(torch.int64 if whole else torch.float32, copy=True)
    y = y.to(torch.float32 if real else torch.int64, copy=True)
    for part, value in (("x", x), ("y", y)):
        if not value.isfinite().all():
            raise DataError(f"{who}: {part} has a value that is not finite as float32: leave out such rows, or scale x")
    return x, y.reshape(len(y), -1) if real else y


def _batches(who: str, source: TorchData, pair: Pair | None) -> tuple[Tensor, Tensor]:
    """x [n, ...] and y [n] or [n, d2] of one pass over a DataLoader's batches, or over a Dataset's items in batches."""
    if isinstance(source, TensorDataset) and len(source.tensors) == 2 and pair is None:
        return source.tensors[0], source.tensors[1]
    xs, ys = list[Tensor](), list[Tensor]()
    try:
        if isinstance(source, Dataset):  # a generator of its own: what its user draws later stays as it is
            source = DataLoader(source, batch_size=_BATCH, generator=torch.Generator())
        for batch in source:
            found = batch if pair is None else pair(batch)
            if not isinstance(found, tuple | list) or len(found) != 2:
                keys = f" of {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
                raise DataError(
                    f"{who}: batch {len(xs)} is a {type(found).__name__}{keys}; every item must be a pair (x, y): wrap "
                    "the dataset in one whose items are (docs/data.md), or with Flower give reply(…, batch=lambda b: …)"
                )
            x, y = (_numbers(who, part, value) for part, value in zip("xy", found, strict=True))
            if x.ndim == 0 or x.shape[:1] != y.shape[:1]:
                raise DataError(f"{who}: batch {len(xs)} has x {list(x.shape)} and y {list(y.shape)}")
            xs.append(x)
            ys.append(y)
        return torch.cat(xs), torch.cat(ys)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError) as error:  # ragged, or no numbers
        reason = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {reason}" if isinstance(error, LookupError) or not reason else reason
        raise DataError(f"{who} cannot be read as batches of numbers (x, y): {reason}") from error


def _numbers(who: str, part: str, value: Any) -> Tensor:
    """Real numbers on the CPU: an array's as int64 where they are whole, else as float32; a tensor keeps its type."""
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{who}: {part} must hold numbers, not {array.dtype}")
        with np.errstate(over="ignore"):  # what overflows is found later, as not finite
            return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
    if value.is_complex():
        raise DataError(f"{who}: {part} must hold real numbers, not {value.dtype}")
    return value.detach().cpu()


def _classes(pairs: Mapping[str, tuple[Tensor, Tensor]], given: int | None) -> int | None:
    """The number of classes, or None for regression, of clients whose inputs and targets are alike."""
    forms = {}
    for who, (x, y) in pairs.items():
        targets = f"regression targets of width {y.shape[1]}" if y.is_floating_point() else "integer labels"
        forms[who] = f"features {list(x.shape[1:])} and {targets}"
    first = next(iter(pairs))
    for who, form in forms.items():
        if form != forms[first]:
            raise DataError(f"{who} has {form}, but {first} has {forms[first]}: all must be alike")
    if pairs[first][1].is_floating_point():
        if given is not None:
            raise ConfigError("classes was given, but y holds floats, which are regression targets: make y integers")
        return None
    classes = given or max(2, 1 + max(int(y.max()) for _, y in pairs.values()))
    for who, (_, y) in pairs.items():
        if y.min() < 0 or y.max() >= classes:
            raise DataError(
                f"{who}: labels must lie in 0..{classes - 1}, not {int(y.min())}..{int(y.max())}: is classes too small?"
            )
    return classes


def from_folders(
    root: Path | str,
    read: Read,
    *,
    test: Path | str | None = None,
    tokens: bool = False,
    classes: Sequence[str] | None = None,
) -> Federated:
    """A federation of the folders in `root`, one per client, with a folder for each class and files in those.

    `read(paths)` gives the inputs [n, …] of some files: `pictures((3, 32, 32))`, or a function of yours, as for texts.
    `classes` names the folders that there may be, in the order of their numbers; by default they are those found, by
    name, which differential privacy does not allow. Clients are called as their folders. `test` is a folder of
    classes, by default the one called test in `root`. With `tokens`, inputs are whole numbers.
    """
    root = Path(root)
    held = Path(test) if test is not None else root / "test"
    if not held.is_dir():
        raise DataError(f"no test set at {held}: a folder with a folder for each class")
    clients = [folder for folder in _folders(root) if folder.resolve() != held.resolve()]
    if not clients:
        raise DataError(f"{root} holds no folder of a client")
    found = sorted({group.name for folder in (*clients, held) for group in _folders(folder)})
    names = found if classes is None else list(classes)
    if strange := [name for name in found if name not in names]:
        raise DataError(f"{root}: folder {strange[0]!r} is none of the classes {', '.join(names)}")
    if len(names) < 2:
        raise DataError(f"{root}: files lie in CLIENT/CLASS/FILE, and {len(names)} classes were found")

    def samples(folder: Path) -> tuple[Array, Tensor]:
        """Inputs and labels [n] of the files in a folder with a folder for each class."""
        files = [
            (file, names.index(group.name)) for group in _folders(folder) for file in _visible(group, Path.is_file)
        ]
        if not files:
            raise DataError(f"{folder} holds no files: they lie in a folder for each class")
        x = read([file for file, _ in files])
        if len(x) != len(files):
            raise DataError(f"{folder}: {len(files)} files were read to {len(x)} inputs")
        return x, torch.tensor([label for _, label in files])

    parts = {folder.name: samples(folder) for folder in clients}
    fed = from_clients(parts, test=samples(held), class_names=names, name=root.name, tokens=tokens)
    return replace(fed, classes_declared=classes is not None)


def _visible(folder: Path, kind: Callable[[Path], bool]) -> list[Path]:
    """What is of this kind in a folder and not hidden, by name: classes and samples have the same order everywhere."""
    return sorted(path for path in folder.iterdir() if kind(path) and not path.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    return _visible(folder, Path.is_dir)


def pictures(shape: Sequence[int], mean: Sequence[float] = (), std: Sequence[float] = ()) -> Read:
    """Reads pictures of one shape (channels, height, width): (bytes/255 − mean)/std, a number for each channel."""
    means, stds = tuple(mean) or (0.0,) * shape[0], tuple(std) or (1.0,) * shape[0]
    if len(shape) != 3 or shape[0] not in (1, 3) or not len(means) == len(stds) == shape[0] or min(stds) <= 0:
        raise DataError("pictures have 1 or 3 channels, [C, H, W], and a mean and a std above 0 for each")

    def read(files: Sequence[Path]) -> Tensor:
        return normalised(torch.from_numpy(np.stack([read_picture(file, shape) for file in files])), means, stds)

    return read


def read_picture(file: Path, shape: Sequence[int] | None = None) -> Bytes:
    """A picture's bytes uint8 [C, H, W], 1 or 3 channels, in any format that Pillow reads. Where a shape is given, the
    picture must have it.
    """
    from PIL import Image  # only this way of keeping data needs it

    if file.suffix.lower() not in PICTURES:
        raise DataError(f"{file} is not a supported picture ({', '.join(PICTURES)}): move it out of the classes")
    try:
        # A picture that claims to be huge is refused by its size, before anything is decoded: no warning is needed.
        with warnings.catch_warnings(action="ignore"), Image.open(file) as picture:
            if shape is not None and picture.size[::-1] != tuple(shape[1:]):
                wide, high = picture.size
                raise DataError(
                    f"{file} has {high}×{wide} pixels (height, width), and {shape[1]}×{shape[2]} are asked for: "
                    "pictures are not scaled here, so resize the files first, as by Pillow's Image.resize"
                )
            grey = picture.mode in ("1", "L") if shape is None else shape[0] == 1
            pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    except DataError:
        raise
    except Exception:  # broken pictures raise whatever their readers come across
        raise DataError(f"{file} cannot be read as a picture") from None
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
