"""Every contender computes the same kernel and products, or says what it cannot do. Speed is never asserted."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from ntkfl_experiments.bench import Setting
from ntkfl_experiments.bench.contenders import KERNEL_WAYS, NETWORKS, PRODUCTS, TASKS, main, network
from ntkfl_experiments.bench.jacobians import jacobians
from torch import Tensor, nn

suite = sys.modules["ntkfl_experiments.bench.jacobians"]  # the package has the function under this name

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


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_map_images_to_ten_outputs(name: str) -> None:
    model, x = network(name, 2, quick=True)
    assert model(x).shape == (2, 10)


def test_our_row_names_libraries_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, and installed but without an answer, are told apart."""

    def child(task: str, way: str, *_: object) -> dict[str, Any]:
        return {
            "BackPACK": {"missing": "No module named 'backpack'"},
            "curvlinops": {"missing": "No module named 'curvlinops'"},
            "neural-tangents": {"cannot": "no such layer"},
        }.get(way, {"seconds": 1.0, "added": 2e6, "result": np.ones(3)})

    monkeypatch.setattr(suite, "in_a_process", child)
    notes = {row.what: row.note for row in jacobians(Setting(quick=True))}
    for name in NETWORKS:
        said = "neural-tangents cannot: no such layer; not installed: BackPACK, curvlinops"
        assert notes[f"{name}: ntkfl"] == f"peak 2 MB; N=4; {said}"
        assert notes[f"{name}, {PRODUCTS} products: ntkfl"] == "peak 2 MB; N=4; not installed: curvlinops"
        assert "not installed" not in notes[f"{name}: torch.func"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'backpack'"), {"missing": "No module named 'backpack'"}),
        (ImportError("cannot import name 'x'"), {"cannot": "cannot import name 'x'"}),  # installed, and does not fit
    ],
)
def test_a_process_says_why_it_has_no_answer(
    error: Exception, said: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def way(model: nn.Module, x: Tensor) -> Tensor:
        raise error

    monkeypatch.setitem(KERNEL_WAYS, "BackPACK", way)
    monkeypatch.setattr("sys.argv", ["", "kernel", "BackPACK", "MLP", "2", "True", "nowhere.npy"])
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        main()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert json.loads(capsys.readouterr().out) == said


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
