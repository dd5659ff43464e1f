"""Every contender computes the same kernel and products, or says what it cannot do. Speed is never asserted."""

from __future__ import annotations

import pytest
from ntkfl_experiments.bench import Setting
from ntkfl_experiments.bench.contenders import NETWORKS, PRODUCTS, TASKS, network
from ntkfl_experiments.bench.jacobians import jacobians

_LIBRARIES = {
    "BackPACK": "backpack",
    "curvlinops": "curvlinops",
    "neural-tangents": "neural_tangents",
    "JAX": "jax",
}


@pytest.mark.parametrize(("task", "way"), [(task, way) for task in TASKS for way in TASKS[task] if way != "ntkfl"])
def test_the_result_is_ours(task: str, way: str) -> None:
    if way in _LIBRARIES:
        pytest.importorskip(_LIBRARIES[way], exc_type=ImportError)
    for name in ("MLP", "CNN"):
        model, x = network(name, 3, quick=True)
        ours, theirs = TASKS[task]["ntkfl"](model, x), TASKS[task][way](model, x)
        assert (theirs - ours).norm() < 1e-4 * ours.norm()  # float32, sums of up to 10⁵ products


@pytest.mark.long
def test_the_suite() -> None:
    rows = jacobians(Setting(quick=True))
    titles = [*NETWORKS, *(f"{name}, {PRODUCTS} products" for name in NETWORKS)]
    assert [row.what for row in rows if row.ratio == 1.0] == [f"{title}: ntkfl" for title in titles]
    others = [row for row in rows if row.ratio != 1.0]
    assert {row.what for row in others} >= {f"{title}: torch.func" for title in titles}
    for row in others:
        assert row.difference is not None
        assert row.difference < 1e-3  # four samples in float32
        assert row.details["peak_megabytes"] >= 0
