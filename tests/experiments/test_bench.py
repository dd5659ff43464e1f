"""Every suite at its smallest: it runs, and what it compares is the same thing. Speed is never asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ntkfl_experiments.bench import SUITES, Setting
from ntkfl_experiments.bench.any_network import INITIALISATIONS, NETWORKS, SEEDS, play
from ntkfl_experiments.bench.libraries import NETWORKS as BENCHED
from ntkfl_experiments.bench.libraries import PRODUCTS, TASKS, jacobians, network

from tests.fork_server import run

LIBRARIES = {"BackPACK": "backpack", "curvlinops": "curvlinops", "neural-tangents": "neural_tangents", "JAX": "jax"}


@pytest.mark.parametrize("suite", [name for name in SUITES if name != "jacobians"])
def test_the_command_writes_what_a_suite_found(suite: str, tmp_path: Path) -> None:
    done = run("-m", "ntkfl", "bench", suite, "--quick", "--json", tmp_path / "bench.json")
    assert done.returncode == 0, done.stderr
    assert f"{suite}: " in done.stdout
    content = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert content.keys() == {"command", "quick", "machine", "rows"}
    rows = content["rows"]
    assert {row["suite"] for row in rows} == {suite}
    assert len({row["what"] for row in rows}) == len(rows) > 1
    assert all(math.isfinite(row["seconds"]) and row["seconds"] > 0 for row in rows)
    assert all(row["difference"] is None or row["difference"] < 1e-4 for row in rows)


@pytest.mark.parametrize(("task", "way"), [(task, way) for task in TASKS for way in TASKS[task] if way != "ntkfl"])
def test_another_librarys_result_is_ours(task: str, way: str) -> None:
    if way in LIBRARIES:
        pytest.importorskip(LIBRARIES[way], exc_type=ImportError)
    for name in ("MLP", "CNN"):
        model, x = network(name, 3, quick=True)
        ours, theirs = TASKS[task]["ntkfl"](model, x), TASKS[task][way](model, x)
        assert (theirs - ours).norm() < 1e-4 * ours.norm()  # float32, sums of up to 10⁵ products


@pytest.mark.long
def test_the_suite_of_libraries() -> None:
    rows = jacobians(Setting(quick=True))
    titles = [*BENCHED, *(f"{name}, {PRODUCTS} products" for name in BENCHED)]
    assert [row.what for row in rows if row.ratio == 1.0] == [f"{title}: ntkfl" for title in titles]
    others = [row for row in rows if row.ratio != 1.0]
    assert {row.what for row in others} >= {f"{title}: torch.func" for title in titles}
    assert all(row.difference is not None and row.difference < 1e-3 for row in others)  # four samples in float32


# `sum-ntk-fl` trains any network that FedAvg trains, with its defaults: after five rounds, where that is enough to part
# the two and quick.
QUICK = [
    *((name, start, 4) for name in ("mlp2", "mlp3", "wide") for start in INITIALISATIONS),
    ("cnnpool", "torch", 4),
    ("cnnpool", "he", 8),  # of four clients its first two steps are taken back, and 12 rounds are needed
    *((name, start, 8) for name in ("mlp2", "mlp3") for start in INITIALISATIONS),
    ("resnet", "he", 4),
    ("transformer", "he", 4),
]


@pytest.mark.parametrize(("name", "start", "cohort"), QUICK)
def test_sums_are_ahead_of_averages_after_five_rounds(name: str, start: str, cohort: int) -> None:
    ours, averaging = (play(name, start, method, 20, 5, cohort)["accuracy"] for method in ("sum-ntk-fl", "fedavg"))
    assert ours[-1] > averaging[-1]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cohort", [4, 8])
@pytest.mark.parametrize("start", INITIALISATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_are_ahead_of_averages_after_twelve(name: str, start: str, cohort: int, seed: int) -> None:
    ours, averaging = (play(name, start, method, seed, 12, cohort)["accuracy"] for method in ("sum-ntk-fl", "fedavg"))
    assert ours[-1] > averaging[-1]
