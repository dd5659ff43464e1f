"""Every contender computes the same kernel, or says what it cannot do. Speed is never asserted."""

from __future__ import annotations

import pytest
from ntkfl_experiments.bench import Setting
from ntkfl_experiments.bench.contenders import NETWORKS, WAYS, network
from ntkfl_experiments.bench.jacobians import jacobians

_LIBRARIES = {"BackPACK": "backpack", "curvlinops": "curvlinops", "neural-tangents": "neural_tangents"}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ntkfl"])
def test_the_kernel_is_ours(way: str) -> None:
    if way in _LIBRARIES:
        pytest.importorskip(_LIBRARIES[way], exc_type=ImportError)
    for name in ("MLP", "CNN"):
        model, x = network(name, 3, quick=True)
        ours, theirs = WAYS["ntkfl"](model, x), WAYS[way](model, x)
        assert (theirs - ours).norm() < 1e-4 * ours.norm()  # float32, sums of up to 10⁵ products


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_map_images_to_ten_outputs(name: str) -> None:
    model, x = network(name, 2, quick=True)
    assert model(x).shape == (2, 10)


@pytest.mark.long
def test_the_suite() -> None:
    rows = jacobians(Setting(quick=True))
    assert [row.what for row in rows if row.ratio == 1.0] == [f"{name}: ntkfl" for name in NETWORKS]
    others = [row for row in rows if row.ratio != 1.0]
    assert {row.what for row in others} >= {f"{name}: torch.func" for name in NETWORKS}
    for row in others:
        assert row.difference is not None
        assert row.difference < 1e-3  # four samples of a kernel in float32
        assert row.details["peak_megabytes"] >= 0
