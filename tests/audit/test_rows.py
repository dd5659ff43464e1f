"""Rows under attack: labels read off, links through the shuffler, records looked up; and no such attack on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ntkfl.audit import membership, rows, sums
from ntkfl.audit.analytic import Recovery, distances
from ntkfl.audit.capture import Capture, capture
from ntkfl.audit.finding import Finding, mix, overlap
from tests.audit.fixtures import config
from tests.methods.known import METHODS

SKEWED = {"dataset": "digits", "clients": 6, "partition": "dirichlet", "alpha": 0.1}
SHUFFLED = {"subsample_rate": 0.4, "projected_dim": 24, "shuffle": True}
PRIVACY: dict[str, dict[str, Any]] = {"cp-ntk-fl": {"projected_dim": 20}}
LOCAL = {  # whose replies tell the server local models
    "fedavg", "fedprox", "fedadam", "data-share", "scaffold", "fednova", "fedcom", "qsgd",
}  # fmt: skip


def found(data: dict[str, Any] | None = None, **privacy: Any) -> dict[str, Finding]:
    more: dict[str, Any] = {"data": data} if data else {}
    return {f.attack: f for f in rows.attack(capture(config({"name": "ntk-fl"}, privacy=privacy, **more)))}


def captured(name: str) -> Capture:
    """Batches hold all of a client's samples."""
    own = {"local_steps": 2, "batch_size": 1000}
    options = {option: value for option, value in own.items() if option in METHODS[name].model_fields}
    method = {"name": METHODS[name].name} | options
    return capture(config(method, model={"hidden": (4,)}, privacy=PRIVACY.get(name, {})), 1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_asked_and_attacked(name: str) -> None:
    seen = captured(name)
    trained = [model for upload in seen.uploads if (model := seen.local_model(upload))]
    assert len(trained) == (3 if name in LOCAL else 0)
    for weights, length in trained:
        assert length == 2 * 0.1
        assert weights.shape == seen.weights.shape
    attacked = {finding.attack for finding in [*rows.attack(seen), *membership.attack(seen), *sums.attack(seen)]}
    assert ("labels of rows" in attacked) == (name in ("ntk-fl", "cp-ntk-fl"))
    assert ("membership by loss, each client's model" in attacked) == (name in LOCAL)
    # Whoever sees the next broadcast has the round's new weights; pooled samples need no attack.
    assert ("membership by loss, the round's new weights" in attacked) == (name != "centralized")


@pytest.mark.parametrize(("name", "rounding"), [("fedavg", 1e-3), ("fednova", 1e-3), ("fedcom", 0.05)])
def test_local_weights_are_those_that_the_client_trained(name: str, rounding: float) -> None:
    seen = captured(name)
    (x, y), trained = seen.truth[1], seen.local_model(seen.uploads[1])
    assert trained is not None
    model = seen.task.at(seen.weights)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    by_hand = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert float((trained[0] - by_hand).norm() / (by_hand - seen.weights).norm()) < rounding


def test_overlap_is_the_part_of_labels_that_is_right() -> None:
    truth = torch.stack([mix(torch.tensor([0, 0, 1, 2]), 4)])
    assert overlap(torch.tensor([[0.25, 0.25, 0.25, 0.25]]), truth).tolist() == [0.75]
    assert overlap(truth, truth).tolist() == [1.0]


def test_rows_carry_their_labels_and_a_shuffler_hides_whose() -> None:
    plain, shuffled = found(SKEWED, subsample_rate=0.2), found(SKEWED, subsample_rate=0.2, shuffle=True)
    assert plain["labels of rows"].values == shuffled["labels of rows"].values == [1.0]
    assert plain["class mix of clients"].mean > 0.999
    assert shuffled["class mix of clients"].success < 0.9 * plain["class mix of clients"].success


def test_distances_are_over_what_both_tell() -> None:
    a = Recovery(torch.tensor([[3.0, 4.0, 0.0]] * 2), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool(), torch.zeros(2))
    near = Recovery.whole(torch.tensor([[3.0, 1.0, 9.0]]))
    # The third coordinate is not told by both; one coordinate of three is too few.
    assert distances(a, near).flatten().tolist() == [pytest.approx(3 / 5), float("inf")]
    whole = Recovery.whole(torch.tensor([[3.0, 1.0, 0.0]]))
    assert distances(Recovery.whole(a.x[:1]), whole).item() == pytest.approx(3 / 5)


def test_links_of_shuffled_rows() -> None:
    within = found(SKEWED, **SHUFFLED)["rows of one sender"]
    assert within.details["of all rows"] > within.guess + 0.2
    open_one = found(subsample_rate=0.4)["rows of one sender"]
    assert within.success < open_one.success == 1


def test_records_can_be_looked_up() -> None:
    looked = found(subsample_rate=0.3)["membership by looking rows up"]
    assert looked.mean > 0.95
    assert looked.role == "aggregator"
    helped = found(subsample_rate=0.3, projected_dim=24, shuffle=True)["membership by looking rows up"]
    assert helped.role == "aggregator+insider"  # nobody else can project the record to ask about
    assert helped.mean > 0.95
