"""What an aggregator has in its hands, by kind of reply: against what clients really computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ntkfl.audit import labels, linkage, membership
from ntkfl.audit.capture import Capture, capture
from ntkfl.audit.received import local_models, rows_of, sends_rows, sends_samples
from ntkfl.methods import METHODS
from tests.audit.fixtures import config

PRIVACY: dict[str, dict[str, Any]] = {"cp-ntk-fl": {"projected_dim": 20}}
LOCAL = {  # whose replies tell the server local models
    "fedavg", "fedprox", "fedadam", "data-share", "scaffold", "fednova", "fedcom", "qsgd",
}  # fmt: skip


def captured(name: str) -> Capture:
    """Batches hold all of a client's samples."""
    own = {"local_steps": 2, "batch_size": 1000}
    options = {option: value for option, value in own.items() if option in METHODS[name].model_fields}
    return capture(config({"name": name} | options, model={"hidden": (4,)}, privacy=PRIVACY.get(name, {})), 1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_asked_and_attacked(name: str) -> None:
    seen = captured(name)
    assert sends_rows(seen) == (name in ("ntk-fl", "cp-ntk-fl"))
    assert sends_samples(seen) == (name == "centralized")
    updates = local_models(seen)
    assert len(updates) == (3 if name in LOCAL else 0)
    for update in updates:
        assert (update.steps, update.lr, update.batch_size) == (2, 0.1, 1000)
        assert update.weights.shape == seen.weights.shape
    found = [*labels.attack(seen), *linkage.attack(seen), *membership.attack(seen)]
    attacked = {finding.attack for finding in found}
    assert ("labels of rows" in attacked) == sends_rows(seen)
    assert ("membership by loss, each client's model" in attacked) == (name in LOCAL)
    # Whoever sees the next broadcast has the round's new weights; pooled samples need no attack.
    assert ("membership by loss, the round's new weights" in attacked) == (name != "centralized")


@pytest.mark.parametrize(("name", "rounding"), [("fedavg", 1e-3), ("fednova", 1e-3), ("fedcom", 0.05)])
def test_local_weights_are_those_that_the_client_trained(name: str, rounding: float) -> None:
    seen = captured(name)
    (x, y), update = seen.truth[1], local_models(seen)[1]
    model = seen.task.at(seen.weights)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    by_hand = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert float((update.weights - by_hand).norm() / (by_hand - seen.weights).norm()) < rounding


def test_a_method_without_rows_says_so() -> None:
    seen = captured("fedavg")
    with pytest.raises(Exception, match="replies of fedavg have no rows of samples"):
        rows_of(seen)
