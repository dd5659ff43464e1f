"""Labels: read off rows, and drawn from averaging updates."""

from __future__ import annotations

import pytest
import torch

from ntkfl.audit.capture import capture
from ntkfl.audit.labels import attack, infer_mix, mix, overlap
from tests.audit.fixtures import config

SKEWED = {"dataset": "digits", "clients": 6, "partition": "dirichlet", "alpha": 0.1}


def test_overlap_is_the_part_of_labels_that_is_right() -> None:
    truth = torch.stack([mix(torch.tensor([0, 0, 1, 2]), 4)])
    assert overlap(torch.tensor([[0.25, 0.25, 0.25, 0.25]]), truth).tolist() == [0.75]
    assert overlap(truth, truth).tolist() == [1.0]


def test_rows_carry_their_labels_and_a_shuffler_hides_whose() -> None:
    plain = {
        f.attack: f
        for f in attack(capture(config({"name": "ntk-fl"}, data=SKEWED, privacy={"subsample_rate": 0.2}), 1))
    }
    assert plain["labels of rows"].values == (1.0,)
    assert plain["class mix of clients"].mean == pytest.approx(1.0)
    mixed = config({"name": "ntk-fl"}, data=SKEWED, privacy={"subsample_rate": 0.2, "shuffle": True})
    shuffled = {f.attack: f for f in attack(capture(mixed, 1))}
    assert shuffled["labels of rows"].values == (1.0,)
    assert shuffled["class mix of clients"].success < 0.9 * plain["class mix of clients"].success


def test_an_update_tells_the_class_mix() -> None:
    heard = capture(config({"name": "fedavg", "lr": 0.05, "local_steps": 5}, data=SKEWED), 1)
    shares = infer_mix(heard)
    assert shares is not None
    torch.testing.assert_close(shares.sum(1), torch.ones(3, dtype=torch.float64))
    (found,) = attack(heard)
    assert found.mean > 0.85
    assert found.guess < 0.4
