"""Columns of a table, which pandas reads, as numbers or classes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import DataError
from ntkfl.extras import missing

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_SHOWN = 10  # names of columns in an error
_WRONG = 5  # bad cells in an error
_FEW = 20  # rows of which each may have a class of its own


def read_table(path: Path, texts: Sequence[str]) -> DataFrame:
    """The rows of a CSV or Parquet file; the columns `texts` hold what is written there, others numbers if they can."""
    try:
        import pandas
    except ImportError:
        raise missing(f"{path}: a table", "data") from None
    try:
        # a row that is longer than the header
        with warnings.catch_warnings(action="error", category=pandas.errors.ParserWarning):
            if path.suffix.lower() == ".parquet":
                frame = pandas.read_parquet(path)
            else:
                written = dict.fromkeys(texts, str)
                frame = pandas.read_csv(path, dtype=written, keep_default_na=False, index_col=False)
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow; or save the table as CSV") from None
    except Exception as error:  # whatever a broken file makes it raise
        raise DataError(f"{path} cannot be read as a table: {' '.join(str(error).split())}") from None
    if frame.empty:
        raise DataError(f"{path} has no rows below its header")
    if len(lacking := np.flatnonzero(frame.isna().any(axis=1))):
        raise DataError(f"{path}: row {lacking[0] + 2} lacks values that the header has")
    frame.columns = frame.columns.astype(str).str.strip()
    for name in frame.columns.intersection(texts):
        frame[name] = frame[name].astype(str).str.strip()
    return frame


def numbers(path: Path, column: Series, hint: str = "") -> NDArray[np.float64]:
    """A column whose cells must be numbers."""
    import pandas

    if column.dtype.kind in "mM":  # dates, of which pandas would make nanoseconds
        column = column.astype(str)
    found: NDArray[np.float64] = pandas.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = [(row + 2, str(column.iloc[row])) for row in np.flatnonzero(np.isnan(found))]
    if wrong:
        cells = ", ".join(f"row {row} has {value[:40]!r}" for row, value in wrong[:_WRONG])
        more = f" and {len(wrong) - _WRONG:,} more" if len(wrong) > _WRONG else ""
        raise DataError(f"{path}: {cells}{more} in column {column.name!r}, which must be numbers{hint}")
    return found


def labels(path: Path, column: Series) -> tuple[NDArray[Any], tuple[str, ...]]:
    """(classes or real targets [N], the classes' names where labels are text)."""
    import pandas

    found = pandas.to_numeric(column, errors="coerce")
    if pandas.api.types.is_integer_dtype(found):
        return found.to_numpy(np.int64), ()
    if found.notna().all() or (found.dropna() % 1 != 0).any():  # real targets, and an error where one is text
        return numbers(path, column), ()
    return named_labels(path, str(column.name), column.to_numpy(str))


def named_labels(path: Path, name: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Classes [N] of labels that are text, numbered in the order of their names; and the names."""
    known, y = np.unique(values, return_inverse=True)
    if "" in known:
        raise DataError(f"{path}: {rows_of(values, '')} without a label in column {name!r}")
    if len(known) == len(values) > _FEW:
        raise DataError(f"{path}: column {name!r} has a label of its own in every row: is it the column of labels?")
    return y.astype(np.int64), tuple(map(str, known))


def rows_of(values: Iterable[str], value: str) -> str:
    """ "row 3", or "rows 3, 7", of a file whose header is row 1; at most five by number."""
    found = [str(number) for number, own in enumerate(values, start=2) if own == value]
    more = f" and {len(found) - _WRONG:,} more" if len(found) > _WRONG else ""
    return f"row{'s' if len(found) > 1 else ''} {', '.join(found[:_WRONG])}{more}"


def listed(names: Iterable[str]) -> str:
    """At most ten of them: tables of pixels have hundreds."""
    known = [repr(name) if "," in name else name for name in names]
    return ", ".join(known if len(known) <= _SHOWN else [*known[: _SHOWN // 2], "…", *known[-_SHOWN // 2 :]])
