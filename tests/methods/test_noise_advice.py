"""Noise that drowns what is learned is known, and said, before the first round."""

from __future__ import annotations

import math

import pytest
import torch

from ntkfl.methods import PrivateSums
from ntkfl.methods.noisy_sums import NoisySums
from ntkfl.privacy.sum_noise import GRAINS
from tests.cli.test_train import ntkfl

D, RECORDS, ROUNDS = 7510, 923, 20
WEIGHTS = 13.0 * torch.nn.functional.normalize(torch.ones(D), dim=0)


@pytest.mark.parametrize("method", [PrivateSums(), PrivateSums(noise_by="server")])
def test_the_way_that_is_said_is_the_way_that_noise_goes(method: NoisySums) -> None:
    clients = 6 if method.noise_by == "clients" else 1
    deviation = method.widths({"gradient": D})["gradient"] * math.sqrt(clients) / (GRAINS * RECORDS)
    draw = torch.Generator().manual_seed(0)
    state = {"weights": WEIGHTS, "velocity": torch.zeros(D)}
    for _ in range(ROUNDS):
        state = method.moved(state, deviation * torch.randn(D, generator=draw), method.step[1])
    gone = float((state["weights"] - WEIGHTS).norm() / WEIGHTS.norm())
    (said,) = method.noise_advice(WEIGHTS, RECORDS, 6, ROUNDS)
    # A sum of squares of D normal numbers is off by √(2/D) = 1.6 %, and the text has two digits.
    assert float(said.split(" times their norm")[0].split()[-1]) == pytest.approx(gone, rel=0.12)


def test_the_step_that_is_named_ends_the_warning() -> None:
    said = PrivateSums().noise_advice(WEIGHTS, RECORDS, 6, ROUNDS)[0]
    named = float(said.split("lr = ")[1].split()[0])
    assert not PrivateSums(lr=0.95 * named).noise_advice(WEIGHTS, RECORDS, 6, ROUNDS)
    assert PrivateSums(lr=1.05 * named).noise_advice(WEIGHTS, RECORDS, 6, ROUNDS)


def test_a_run_warns_before_its_first_round_and_again_where_it_fell() -> None:
    given = ["--dataset", "digits", "--clients", "6", "--set", "hidden=[64]", "--private", "--rounds", "8", "--set"]
    done = ntkfl("train", *given, "epsilon=2", "--set", "lr=20")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("warning:") and "times their norm" in line]
    header = next(i for i, line in enumerate(lines) if line.startswith("round "))
    assert len(told) == 2
    assert told[0] < header < told[1]
