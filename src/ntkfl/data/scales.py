"""What is odd about a table: columns so much larger than others that training would go by them, and classes and clients
with one row, which often are a misspelt name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ntkfl.data.federated import Federated

_LARGE = 50.0  # a mean or a deviation, where networks expect numbers near 1
_APART = 1e3  # the largest deviation over the smallest that is not 0
_NAMED = 3  # columns in a line


class Scale(NamedTuple):
    """A column's smallest and largest number, and how far from 1 its mean and deviation are."""

    name: str
    least: float
    most: float
    size: float

    def __str__(self) -> str:
        return f"{self.name!r} ({self.least:,.6g} to {self.most:,.6g})"


def extreme_columns(fed: Federated) -> list[Scale]:
    """Columns of a table, the largest first, whose mean or deviation is above 50, or whose deviation is over 1,000
    times the smallest one.
    """
    x = fed.rows.x
    if not fed.feature_names or x.ndim != 2 or not x.is_floating_point():
        return []
    deviations, means = torch.std_mean(x.double(), dim=0, correction=0)
    least = min((float(d) for d in deviations if d > 0), default=math.inf)
    sizes = torch.maximum(deviations, means.abs())
    extreme = (sizes > _LARGE) | (deviations > _APART * least)
    low, high = x.amin(0), x.amax(0)
    found = [
        Scale(fed.feature_names[i], float(low[i]), float(high[i]), float(sizes[i]))
        for i in torch.nonzero(extreme).flatten().tolist()
    ]
    return sorted(found, key=lambda one: -one.size)


def shown(columns: Sequence[Scale]) -> str:
    """At most three by name and range, and how many others there are."""
    more = f" and {len(columns) - _NAMED:,} more" if len(columns) > _NAMED else ""
    return ", ".join(map(str, columns[:_NAMED])) + more


def scale_advice(fed: Federated, hides: bool) -> list[str]:
    """A warning for training on such columns as they are. Methods that hide (`hides`) cannot standardise: that tells
    the server means and deviations.
    """
    columns = extreme_columns(fed)
    if not columns or fed.standardization is not None:
        return []
    what = "divide them by public numbers in the file" if hides else "give --standardize"
    return [
        f"columns are of very different or very large scale, {shown(columns)}: {what}, and leave out a column that "
        "is a number of the row or of a person"
    ]


def single_rows(fed: Federated) -> list[str]:
    """A line on classes, and one on clients, that a table has one row of."""
    if not fed.feature_names:
        return []
    said = []
    if fed.class_names:
        labels = torch.cat([fed.rows.y, fed.test_rows.y])
        counts = torch.bincount(labels, minlength=len(fed.class_names)).tolist()
        said += _single("class", "classes", [n for n, c in zip(fed.class_names, counts, strict=True) if c == 1])
    if fed.client_names:
        said += _single("client", "clients", [n for n, c in zip(fed.client_names, fed.sizes, strict=True) if c == 1])
    return said


def _single(one: str, many: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = " …" if len(names) > _NAMED else ""
    shown_names = ", ".join(repr(name) for name in names[:_NAMED])
    return [f"{len(names)} {one if len(names) == 1 else many} with 1 row ({shown_names}{more}): a misspelt name?"]
