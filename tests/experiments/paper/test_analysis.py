"""Items of the paper's analysis: the work functions against the mathematics, verdicts that follow from the data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ntkfl_experiments.paper import ITEMS, analysis, figure9, weight_gap

from ntkfl_experiments.paper import lemma1, lemma2, lemma3, lemma4, theorem1, theorem2  # isort: skip
from ntkfl_experiments.paper.item import Context
from ntkfl_experiments.theory.dynamics import descended
from ntkfl_experiments.theory.two_layer import draw, in_span

Key = dict[str, Any]
RESULTS = Path(__file__).parents[3] / "results" / "paper"


def stored(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name / "result.json").read_text())["data"]
    return data


# -- Verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place", "change", "claim", "holds"),
    [
        ("theorem1", "asked", lambda c: {"network": [0.9 * b for b in c["bound"]]}, 0, True),
        ("theorem1", "asked", lambda c: {"linearised": [2.0] * len(c["linearised"])}, 1, False),
        ("theorem2", "grid", lambda c: {"fedavg": (1 + c["printed"]) / 2}, 0, False),  # halfway to no progress at all
        ("theorem2", "rounds", lambda c: {"falls": [1.0, 0.5 if c["method"] == "ntk-fl" else 0.4]}, 1, False),
        ("lemma1", "tight", lambda c: {"all": c["all"] | {"printed": 0.95}}, 0, True),
        ("lemma2", "curves", lambda c: {"gap": [1e9] * len(c["gap"])}, 0, False),
        ("lemma3", "breaking", lambda c: {"held": c["held"] | {"printed": 0.95}}, 0, True),
        ("lemma4", "grid", lambda c: {"held": 0.8}, 0, False),
        ("lemma4", "later", lambda c: {"knows": 1.0}, 1, True),
        ("lemma4", "later", lambda c: {"knows": 1.0, "steps": c["steps"] / 10}, 1, None),  # fresh, but short
        ("fig9", "curves", lambda c: {"gap": [*c["gap"][:2], c["gap"][1] / 2, *c["gap"][3:]]}, 0, False),
    ],
)
def test_a_verdict_turns_with_the_data(
    name: str, place: str, change: Callable[[Any], Any], claim: int, holds: bool | None
) -> None:
    data = stored(name)
    assert ITEMS[name].judge(data)[0][claim].holds is not holds
    for cell in data[place]:
        cell |= change(cell)
    assert ITEMS[name].judge(data)[0][claim].holds is holds


@pytest.mark.parametrize("module", [figure9, lemma1, lemma2, lemma3, lemma4, theorem1, theorem2])
def test_a_stored_result_can_be_drawn(module: Any) -> None:
    name = {"figure9": "fig9"}.get(module.__name__.split(".")[-1], module.__name__.split(".")[-1])
    data = stored(name)
    assert len(module.picture(data.get("curves", data)).axes) in (2, 3)


# -- Work -------------------------------------------------------------------------------------------------------------


def test_inputs_are_unit_pictures_with_both_signs() -> None:
    x, y = analysis.unit_inputs("digits", 30, seed=0)
    assert x.shape == (30, 64)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(30, dtype=torch.float64))
    assert set(y.tolist()) == {-1.0, 1.0}
    assert not torch.equal(x, analysis.unit_inputs("digits", 30, seed=1)[0])


def of_theorem1(**more: Any) -> Key:
    plain = {"dataset": "digits", "samples": 3, "pictures": 0, "seed": 0, "width": None, "lr": None, "steps": None}
    return {**plain, "descend_to": 50, **more}


def test_as_theorem_1_asks_the_linearised_residual_is_inside_and_the_network_leaves_in_the_end() -> None:
    cell = theorem1.measure(of_theorem1())
    assert cell["width"] == math.ceil(cell["asked_width"])
    assert cell["bound"] == pytest.approx([math.exp(-s) for s in theorem1.EXPONENTS], rel=0.05)
    assert all(m <= b for m, b in zip(cell["linearised"], cell["bound"], strict=True))
    assert all(m <= b for m, b in zip(cell["network"][:4], cell["bound"], strict=False))
    assert cell["network"][-1] > cell["bound"][-1]  # it stops where the linearisation's error is
    assert cell["moved"] > cell["radius"]


def test_the_linearised_residual_is_the_kernels() -> None:
    cell = theorem1.measure(of_theorem1(width=40, lr=2.0, steps=[1, 4]))
    x, y = analysis.unit_inputs("digits", 3, 0)
    z = in_span(x)
    network = draw(40, 3, 0)
    r = y - network.outputs(z)
    for t, found in zip([1, 4], cell["linearised"], strict=True):
        left = torch.matrix_exp(-2.0 * t / 3 * network.kernel(z)) @ r
        assert found == pytest.approx(float(left.square().sum() / r.square().sum()))
    after = y - descended(network, z, y, 2.0, 4).outputs(z)
    assert cell["descent"][-1] == pytest.approx(float(after.square().sum() / r.square().sum()))


def test_shares_of_clients_are_equal_and_whole() -> None:
    y = torch.tensor([1.0, -1.0] * 6)
    for split in theorem2.SPLITS:
        shares = theorem2.deal(y, 4, split, seed=0)
        assert sorted(torch.cat(shares).tolist()) == list(range(12))
        assert {len(s) for s in shares} == {3}
    assert all(len(set(y[s].tolist())) == 1 for s in theorem2.deal(y, 4, "label", seed=0))


def test_one_step_is_central_and_dividing_twice_is_four_times_slower() -> None:
    key = {"dataset": "digits", "samples": 12, "width": 64, "clients": 4, "local_steps": 1, "split": "label"}
    cell = theorem2.one_round({**key, "lr": 1e-3, "seed": 0})
    assert cell["difference"] < 1e-14
    assert cell["fedavg"] == pytest.approx(cell["central"], abs=1e-13)
    assert (1 - cell["fedavg"]) / (1 - cell["divided_twice"]) == pytest.approx(4, rel=0.01)
    assert (1 - cell["corrected"]) / (1 - cell["printed"]) == pytest.approx(4)
    assert cell["theorem1"] == pytest.approx(cell["corrected"])


def test_flips_are_counted_and_the_union_is_needed() -> None:
    radius = 0.99 * analysis.DELTA / (lemma1.FLIP * 16)
    key = {"dataset": "orthonormal", "samples": 40, "pictures": 0, "width": 16, "radius": radius, "draws": 100}
    cell = lemma1.count(key)
    assert cell["mean"] == pytest.approx(cell["expected"], rel=0.1)
    assert cell["one"] >= 0.8
    assert cell["all"]["printed"] < 0.2  # 0.9^40 = 0.015 is expected
    assert cell["all"]["everywhere"] == cell["all"]["concentrated"] == 1
    trained = lemma1.train({"dataset": "digits", "samples": 10, "width": 64, "pictures": 0, "lr": 1.0, "steps": 20})
    assert 0 < trained["flipped"] <= trained["reachable"]


def test_drift_is_bounded_in_training_and_not_always_by_an_adversary() -> None:
    key = {"dataset": "digits", "samples": 10, "width": 64, "seed": 0, "lr": 1.0, "steps": [1, 20]}
    cell = lemma3.train(key)
    assert cell["radius"] == sorted(cell["radius"])
    for drift, radius in zip(cell["drift"], cell["radius"], strict=True):
        assert drift <= lemma3.bounds(64, 10, radius)["printed"]
    x = lemma3.alike(5)
    torch.testing.assert_close(x @ x.T, torch.full((5, 5), 0.5) + 0.5 * torch.eye(5), check_dtype=False)
    held = lemma3.attack({"dataset": "alike", "samples": 5, "width": 50, "radius": 0.1, "draws": 5})
    assert held["held"]["summed"] == 1
    assert held["largest"] > 0


def test_a_whole_item_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call reads what the first one kept, and finds the same."""
    monkeypatch.setattr(lemma3, "available", lambda name: "digits")
    context = Context("quick", tmp_path)
    outcome = lemma3.run(context)
    assert lemma3.judge(outcome.data)[0][0].holds is False
    monkeypatch.setattr(lemma3, "unit_inputs", None)  # nothing is computed any more
    assert lemma3.run(context).data == outcome.data


def test_kernels_tend_to_their_limit() -> None:
    key = {"dataset": "digits", "samples": 8, "pictures": 0, "draws": 20}
    for covariance in ("isotropic", "uneven"):
        near, far = (lemma4.deviate({**key, "width": w, "covariance": covariance})["deviations"] for w in (1600, 100))
        assert sum(far) / sum(near) == pytest.approx(4, rel=0.35)


def test_draws_know_nothing_of_the_labels_and_trained_weights_do() -> None:
    """Over draws of the signs the score is standardised: mean 0, variance 1."""
    key = {"dataset": "digits", "samples": 12, "width": 64, "lr": 1.0}
    scores = torch.tensor([lemma4.later({**key, "seed": s, "steps": 0})["knows"] for s in range(200)])
    assert abs(float(scores.mean())) < 4 / math.sqrt(200)
    assert 0.6 < float(scores.square().mean()) < 1.4  # four standard errors of a variance are 0.4
    assert lemma4.later({**key, "seed": 0, "steps": 300})["knows"] > 4


def test_weight_gaps_by_hand() -> None:
    """One step apart: both descents take the same first step, and differ from the second on."""
    key = {"dataset": "digits", "samples": 10, "width": 20, "seed": 0, "lr": 2.0, "steps": [1, 2, 5], "every": True}
    cell = weight_gap.analysis_network(key)
    assert cell["gap"][0] == pytest.approx(0, abs=1e-9)
    assert cell["gammas"][0] == 0
    assert cell["gap"] == sorted(cell["gap"])
    x, y = analysis.unit_inputs("digits", 10, 0)
    network = draw(20, 64, 0)
    r0 = y - network.outputs(x)
    assert cell["first"] == pytest.approx(float(r0.abs().max()))
    once = descended(network, x, y, 2.0, 1)
    assert cell["gammas"][1] == pytest.approx(float((y - once.outputs(x)).abs().max()))
    change = descended(network, x, y, 2.0, 2).v - network.v
    shared = network.pull_back(x, r0 + (y - once.outputs(x))) * 0.2
    assert cell["lemma"][1] == pytest.approx(float((shared - change).abs().sum()))
    flow = torch.matrix_exp(-0.2 * network.kernel(x)) @ r0
    own = network.pull_back(x, r0 + flow) * 0.2
    assert cell["gap"][1] == pytest.approx(float((own - change).abs().sum()))
    assert cell["differing"][1] == pytest.approx(float((flow - (y - once.outputs(x))).abs().mean()))


def test_corrected_bounds_of_lemma_2_hold() -> None:
    for cell in stored("lemma2")["curves"]:
        for i in range(1, len(cell["steps"])):
            assert cell["lemma"][i] <= cell["bounds"]["within"][i]
            assert cell["gap"][i] <= cell["bounds"]["both"][i]
            assert cell["bounds"]["certain"][i] <= cell["bounds"]["printed"][i]


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_weight_gaps_of_the_papers_network_grow(loss: str) -> None:
    key = {"dataset": "digits", "samples": 20, "seed": 0, "width": 30, "steps": [1, 2, 5, 10], "lr": 0.1, "loss": loss}
    gap = figure9.one({**key, "network": f"mlp-{loss}"})["gap"]
    assert gap == sorted(gap)
    assert gap[0] < gap[-1]
