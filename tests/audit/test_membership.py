"""Membership: the arithmetic of rates by hand, a model that memorised, and one that never learned."""

from __future__ import annotations

import pytest
import torch

import ntkfl.models
from ntkfl.audit.capture import capture
from ntkfl.audit.membership import advantage, area, by_loss, matched, on_final_model, recall
from ntkfl.data import IID, load
from ntkfl.methods import Task
from ntkfl.tangent.parameters import flatten
from tests.audit.fixtures import config


def test_rates_by_hand() -> None:
    members, others = torch.tensor([4.0, 3.0, 1.0]), torch.tensor([3.0, 2.0, 0.0, -1.0])
    assert recall(members, others, 0.0) == pytest.approx(1 / 3)  # 3 ties with another record, so it does not count
    assert recall(members, others, 0.25) == pytest.approx(2 / 3)
    assert recall(members, others, 1.0) == 1.0
    pairs = [(m > o) + 0.5 * (m == o) for m in (4, 3, 1) for o in (3, 2, 0, -1)]
    assert area(members, others) == pytest.approx(sum(pairs) / 12)
    assert advantage(torch.arange(10.0) + 100, torch.arange(10.0), 0) == 1.0


def test_advantage_of_equal_scores_is_zero_on_average() -> None:
    draws = torch.Generator().manual_seed(0)
    values = [advantage(*torch.randn(2, 200, generator=draws).unbind(), seed) for seed in range(40)]
    assert abs(sum(values) / 40) < 0.03  # a threshold's best on the records it was chosen on would be about 0.1


def test_classes_are_matched() -> None:
    x = torch.arange(10.0).unsqueeze(1)
    (_, a), (_, b) = matched((x, torch.tensor([0] * 7 + [1] * 3)), (x, torch.tensor([0] * 2 + [1] * 7 + [2])), 0)
    assert a.tolist() == b.tolist() == [0, 0, 1, 1, 1]


def test_a_model_of_random_labels_gives_its_members_away_and_an_untrained_one_does_not() -> None:
    x = load("digits").partition(IID(clients=1), seed=0).client(0)[0][:600].flatten(1)
    y = torch.randint(10, (600,), generator=torch.Generator().manual_seed(1))
    model = ntkfl.models.mlp(64, 100, 10)
    task = Task(model, 10, "ce")
    members, others = (x[:300], y[:300]), (x[300:], y[300:])
    (found,) = by_loss(task, task.like, members, others, role="outsider", on="the model")
    assert abs(found.mean) < 0.12  # of five draws from 300 records: one standard error is about 0.03
    assert found.details["TPR at 1.0% FPR"] < 0.06
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    (found,) = by_loss(task, flatten(model), members, others, role="outsider", on="the model")
    assert found.mean > 0.8
    assert found.details["AUC"] > 0.95
    assert found.details["TPR at 1.0% FPR"] > 0.1  # a tenth of the others have, by chance, the label it predicts


@pytest.mark.parametrize("projected", [None, 24])
def test_an_outsider_with_an_untrained_model_learns_nothing(projected: int | None) -> None:
    """Through the projection, where there is one."""
    plan = config({"name": "ntk-fl"}, privacy={"projected_dim": projected})
    heard = capture(plan, 1)
    (found,) = on_final_model(heard, heard.weights, range(6))
    assert found.role == "outsider"
    assert abs(found.mean) < 0.1 + 2 * found.spread
