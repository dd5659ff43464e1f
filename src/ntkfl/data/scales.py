"""Columns of a table that are so much larger than others that training would go by them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ntkfl.data.federated import Federated

_LARGE = 50.0  # a mean or a deviation, where networks expect numbers near 1
_APART = 1e3  # the largest deviation over the smallest that is not 0
_NAMED = 3  # columns in a line


def extreme_columns(fed: Federated) -> list[str]:
    """Columns of a table with their ranges, the largest first: those whose mean or deviation is above 50, or whose
    deviation is over 1,000 times the smallest one.
    """
    x = fed.rows.x
    if not fed.feature_names or x.ndim != 2 or not x.is_floating_point():
        return []
    deviations, means = torch.std_mean(x.double(), dim=0, correction=0)
    least = min((float(d) for d in deviations if d > 0), default=math.inf)
    sizes = torch.maximum(deviations, means.abs())
    extreme = (sizes > _LARGE) | (deviations > _APART * least)
    low, high = x.amin(0), x.amax(0)
    largest_first = sizes.argsort(descending=True).tolist()
    return [f"{fed.feature_names[i]!r} ({low[i]:,.6g} to {high[i]:,.6g})" for i in largest_first if extreme[i]]


def shown(columns: Sequence[str]) -> str:
    """At most three, and how many others there are."""
    more = f" and {len(columns) - _NAMED:,} more" if len(columns) > _NAMED else ""
    return ", ".join(columns[:_NAMED]) + more


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
