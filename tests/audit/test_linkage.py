"""Links through the shuffler, by what inputs tell."""

from __future__ import annotations

import pytest
import torch

from ntkfl.audit.capture import capture
from ntkfl.audit.inputs import Inputs, distances, seen_inputs
from ntkfl.audit.linkage import attack
from ntkfl.audit.received import rows_of
from tests.audit.fixtures import config

SKEWED = {"dataset": "digits", "clients": 6, "partition": "dirichlet", "alpha": 0.1}
SHUFFLED = {"subsample_rate": 0.4, "projected_dim": 24, "shuffle": True}


def test_distances_are_over_what_both_tell() -> None:
    every = torch.ones(1, 3, dtype=torch.bool)
    a = Inputs(torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([[True, True, False]]))
    near = Inputs(torch.tensor([[3.0, 1.0, 9.0]]), every)
    assert distances(a, near).item() == pytest.approx(3 / 5)  # the third coordinate is not told by both
    single = Inputs(torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[True, False, False]]))
    assert distances(single, near).tolist() == [[float("inf")]]  # one coordinate of three is too few
    whole = Inputs(a.x, every)
    assert distances(whole, Inputs(torch.tensor([[3.0, 1.0, 0.0]]), every)).item() == pytest.approx(3 / 5)


def test_sparsified_entries_give_coordinates_exactly() -> None:
    heard = capture(config({"name": "ntk-fl"}, privacy=SHUFFLED | {"sparsity": 0.7}), 1)
    seen = seen_inputs(heard, rows_of(heard))
    assert seen is not None
    truth = heard.aligned()[0]
    assert 0.2 < float(seen.known.double().mean()) < 1
    torch.testing.assert_close(seen.x[seen.known], truth[seen.known], rtol=1e-3, atol=1e-4)
    assert bool((seen.x[~seen.known] == 0).all())


def test_links_of_shuffled_rows() -> None:
    (within,) = attack(capture(config({"name": "ntk-fl"}, data=SKEWED, privacy=SHUFFLED)))
    assert within.details["of all rows"] > within.guess + 0.2
    (open_one,) = attack(capture(config({"name": "ntk-fl"}, privacy={"subsample_rate": 0.4})))
    assert within.success < open_one.success == 1


def test_averaging_has_no_rows_to_link() -> None:
    assert attack(capture(config({"name": "fedavg", "local_steps": 1}), 1)) == []
