"""Columns of a table that are so much larger than others that training would follow them alone."""

from __future__ import annotations

import math

import torch

from ntkfl.data.federated import Federated

_LARGE = 50.0  # a mean or a deviation, where networks expect numbers near 1
_APART = 1e3  # the largest deviation over the smallest that is not 0
_NAMED = 3  # columns in a line


def scale_advice(fed: Federated, hides: bool) -> list[str]:
    """A warning that names the columns, with their ranges, whose mean or deviation is above 50, or whose deviation is
    over 1,000 times the smallest one. Methods that hide (`hides`) cannot standardise: that tells the server means and
    deviations.
    """
    x = fed.rows.x
    if not fed.feature_names or x.ndim != 2 or not x.is_floating_point() or fed.standardization is not None:
        return []
    deviations, means = torch.std_mean(x.double(), dim=0, correction=0)
    least = min((float(d) for d in deviations if d > 0), default=math.inf)
    sizes = torch.maximum(deviations, means.abs())
    extreme = (sizes > _LARGE) | (deviations > _APART * least)
    found = [i for i in sizes.argsort(descending=True).tolist() if extreme[i]]
    if not found:
        return []
    low, high = x.amin(0), x.amax(0)
    columns = [f"{fed.feature_names[i]!r} ({low[i]:,.6g} to {high[i]:,.6g})" for i in found[:_NAMED]]
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    what = "divide them by public numbers in the file" if hides else "give --standardize"
    return [
        f"columns are of very different or very large scale, {', '.join(columns)}{more}: {what}, and leave out a "
        "column that is a number of the row or of a person"
    ]
