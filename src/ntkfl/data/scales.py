"""How large a table's features are: which columns differ so much from the others that training would go by them."""

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
