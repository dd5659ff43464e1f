"""One client's own data, in the form it has them: a file, a folder of pictures for each class, a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ntkfl.data.files import USUAL, Columns, is_data_file, read_rows
from ntkfl.data.folders import PICTURES, Images, read_classes
from ntkfl.data.from_arrays import checked_pair, read_source
from ntkfl.errors import DataError


def read_own(
    source: str,
    images: Images,
    find: Callable[[str], Callable[..., Any]],
    columns: Columns = USUAL,
    *,
    test: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [n, …] and y of `source`: FILE.npz, .csv or .parquet, a folder, or `package.module:function`.

    The function gives (x, y), a torch Dataset or a DataLoader; `columns` are what a file calls its own. With `test`,
    of a file that says which rows are for testing these alone.

    `find` turns such a name into the function. A folder holds a folder of pictures for each class, named by its number
    or as in `images.classes`.
    """
    path = Path(source)
    if path.is_dir():
        found = read_classes(path, images.read, lambda name: _label(name, images.classes, path), PICTURES)
        return checked_pair(source, found)
    if is_data_file(source):
        return checked_pair(source, read_rows(path, columns, images.classes, images.features, test=test))
    if ":" in source and not path.exists():
        return read_source(source, find(source)())
    raise DataError(
        f"no data at {source}: expected an .npz, .csv or .parquet file, a folder, or package.module:function"
    )


def _label(name: str, classes: Sequence[str], folder: Path) -> int:
    if name in classes:
        return classes.index(name)
    if not classes and name.isdecimal() and len(name) < 10:
        return int(name)
    expected = (
        f"one of {', '.join(classes)}"
        if classes
        else "a class's number; for names, list them in the run's setting class_names"
    )
    raise DataError(f"{folder}: a folder called {name!r}, expected {expected}")
