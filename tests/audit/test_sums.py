"""Sums under attack: of one sample, of few, of a cohort; by each role, and against a sum that a record is not in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ntkfl.audit.capture import Capture, capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.membership import area
from ntkfl.audit.study import study, verdicts
from ntkfl.audit.sums import (
    alignment,
    attack,
    counts_by_public,
    leverage,
    on_sums,
    sums_of,
    total_of,
)
from ntkfl.federation.config import build_model, load_data
from ntkfl.methods import ClientRound
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import flatten, unflatten, with_values
from ntkfl.wire import Message
from tests.audit.fixtures import config

PLAN = config({"name": "fedavg"}, rounds=3)


def planned(method: dict[str, object], round: int = 1, **privacy: object) -> Capture:
    return capture(config(method, rounds=3, privacy=privacy), round)


@pytest.fixture(scope="module")
def heard() -> Capture:
    return planned({"name": "sum-ntk-fl"})


@pytest.fixture(scope="module")
def found(heard: Capture) -> dict[tuple[str, str], Finding]:
    return {(f.attack, f.role): f for f in attack(heard)}


def of_few(heard: Capture, samples: int) -> dict[str, Finding]:
    """Attacks on the sums of a client with this many samples."""
    x, y, raw = (part[:samples] for part in heard.aligned())
    client = ClientRound(0, x, y, Randomness.simulated(0))
    sent = heard.method.answer(heard.task, heard.broadcast, client).message(heard.round).encode()
    reply = heard.reply.parse(Message.decode(sent), heard.task)
    alone = replace(heard, uploads=[reply], cohort=(0,), truth=[(x, y)], raw=[raw])
    return {f.attack: f for f in on_sums(alone, sums_of(alone), "aggregator")}


def test_the_weights_are_those_that_clients_read(heard: Capture) -> None:
    """A broadcast in float16 is scaled: its numbers alone are not the weights."""
    first = flatten(build_model(PLAN, load_data(PLAN)))
    assert float((heard.weights - first).abs().max()) <= 2.0**-11 * float(first.abs().max())


@pytest.mark.parametrize("method", [{"name": "sum-ntk-fl"}, {"name": "fedavg", "local_steps": 1, "batch_size": 2000}])
def test_few_samples_are_given_away(method: dict[str, object]) -> None:
    heard = planned(method)
    one, few = of_few(heard, 1), of_few(heard, 8)
    assert one["analytic inversion, sums"].mean > 0.99
    assert one["analytic inversion, sums"].guess < 0.7
    assert few["membership by alignment, sums"].details["AUC"] > 0.95
    if method["name"] == "sum-ntk-fl":
        assert few["membership by input factor, sums"].details["AUC"] > 0.95
        assert few["class counts, sums"].mean > 0.6


def test_totals_tell_less_of_records(heard: Capture, found: dict[tuple[str, str], Finding]) -> None:
    member = "membership by input factor, sums"
    few = of_few(heard, 8)[member].mean
    assert few > found[member, "aggregator"].mean + 0.3
    assert few > found[member, "secure-sum"].mean + 0.5
    for role in ("aggregator", "secure-sum"):
        assert found["class counts, sums", role].mean > 0.9
    assert {role for _, role in found} == {"aggregator", "secure-sum"}


def chance(finding: Finding) -> float:
    """Three deviations of a difference of two shares, each of half of the members."""
    return 3 * (0.5 / (finding.details["members"] / 2)) ** 0.5


def test_records_that_are_not_in_a_sum_are_not_found_in_it(heard: Capture) -> None:
    """The same attack where the records asked about are another client's: no advantage but what chance leaves."""
    one, other = sums_of(heard)[:2]
    wrong = {f.attack: f for f in on_sums(heard, [replace(one, x=other.x, y=other.y)], "aggregator")}
    for name in ("input factor", "alignment"):
        finding = wrong[f"membership by {name}, sums"]
        assert abs(finding.mean) < chance(finding)


def pooled(heard: Capture) -> Tensor:
    """The gradient [d] of the cohort's summed training loss, by autograd."""
    x, y = heard.members
    w = heard.weights.clone().requires_grad_()
    outputs = with_values(heard.task.model, unflatten(heard.task.model, w))(x)
    (gradient,) = torch.autograd.grad(per_sample(heard.task.loss, outputs, heard.task.training_targets(y)).sum(), w)
    return gradient.double()


def test_averaged_updates_add_up_too_and_rows_do_not() -> None:
    plain = planned({"name": "fedavg", "local_steps": 1, "batch_size": 2000})
    found = {(f.attack, f.role) for f in attack(plain)}
    for role in ("aggregator", "secure-sum"):
        assert ("analytic inversion, sums", role) in found
    for read, whose in zip(sums_of(plain), plain.truth, strict=True):
        exact = pooled(replace(plain, truth=[whose]))
        assert float((read.gradient - exact).norm() / exact.norm()) < 1e-3
    rows = planned({"name": "ntk-fl"}, subsample_rate=0.1)
    assert attack(rows) == []
    assert sums_of(rows) == []


def test_floats_and_later_rounds_are_read_as_well() -> None:
    assert sums_of(planned({"name": "sum-ntk-fl", "values": "float32"}))[0].resolution < 2.0**-20
    found = {f.attack for f in attack(planned({"name": "sum-ntk-fl"}, 3))}
    assert "membership by input factor, sums" not in found  # nobody sends the inputs' factor any more
    assert "membership by alignment, sums" in found


# -- Runs with secure sums ---------------------------------------------------------------------------------------------

PRIVATE = {"name": "private-sums", "clip": 5.0}
MASKED = {"secure_sum": True, "budget_rounds": 3, "noise_clients": 3}


def test_of_a_secure_sum_the_total_alone_is_attacked(found: dict[tuple[str, str], Finding]) -> None:
    """The same round, masked: nobody has a client's sums, and what the total tells is what it tells unmasked."""
    result = study(planned({"name": "sum-ntk-fl"}, secure_sum=True))
    assert {f.role for f in result.findings} == {"secure-sum"}
    wanted = "membership by input factor, sums"
    assert [f.values for f in result.findings if f.attack == wanted] == [found[wanted, "secure-sum"].values]
    said = result.dump()["verdicts"]
    assert said["aggregator"] == "has the total alone."
    together = "opens every client's reply, by name: masks hide nothing from the two together."
    assert said["aggregator+shuffler"] == together
    private = verdicts(planned(PRIVATE, **MASKED), [])["aggregator+shuffler"]
    assert private == f"{together} ε counts on the two not colluding and does not hold against them."


def test_what_losses_alone_do_not_tell_is_no_proof(found: dict[tuple[str, str], Finding], heard: Capture) -> None:
    """Where the first layer is not linear, attacks on sums do not apply, and a verdict says so."""
    assert "losses alone" not in verdicts(heard, [*found.values()])["aggregator"]
    by_loss = replace(
        next(iter(found.values())), recovers="who was trained on", attack="membership by loss", role="aggregator"
    )
    assert verdicts(heard, [by_loss])["aggregator"].endswith("attacks on sums need a linear first layer.")


@pytest.mark.parametrize("round", [1, 2])
def test_a_private_sum_is_read_as_a_gradient(round: int) -> None:
    """With next to no noise and a clip that binds nobody it is the cohort's gradient, with the whitening taken back."""
    heard = planned(PRIVATE | {"clip": 1e3}, round, **MASKED, epsilon=1e5)
    total, gradient = total_of(sums_of(heard)), pooled(heard)
    assert abs(total.samples - sum(len(y) for _, y in heard.truth)) <= 2
    assert float((total.gradient - gradient).norm() / gradient.norm()) < 0.1


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.9, 1.0), (300.0, 0.3, 0.7)])
def test_a_record_is_found_in_a_sum_unless_there_is_noise(noise: float, least: float, most: float) -> None:
    """100 gradients δ vᵀ of 20 × 40 numbers added up, correlated as real ones are. A member adds √800 where the other
    99 add numbers of size √99: 2.8 deviations, an area of 0.98. Under noise of 300 deviations nothing is left.
    """
    draws = torch.Generator().manual_seed(0)
    mixes = [torch.randn(n, n, generator=draws, dtype=torch.float64) for n in (40, 20)]

    def records(count: int) -> tuple[Tensor, Tensor]:
        v, delta = (torch.randn(count, len(M), generator=draws, dtype=torch.float64) @ M for M in mixes)
        return v, delta

    members, others, public = (records(count) for count in (100, 400, 2000))
    G = members[1].T @ members[0]
    G = G + noise * G.std() * torch.randn(G.shape, generator=draws, dtype=torch.float64)
    assert least <= area(alignment(G, members, public), alignment(G, others, public)) <= most


def test_noise_hides_who_was_in_a_private_sum() -> None:
    for finding in attack(planned(PRIVATE, **MASKED, epsilon=1.0)):
        if "alignment" in finding.attack:
            assert abs(finding.mean) < chance(finding)


# -- Sums made by hand -------------------------------------------------------------------------------------------------

IN = 20
FINE = 2.0**-45  # float64 that was added up


def inputs(count: int) -> Tensor:
    """v = [x, 1] of a layer [n, m], float64."""
    return torch.cat([torch.rand(count, IN), torch.ones(count, 1)], 1).double()


def test_leverages_of_the_samples_are_at_most_one_and_add_up_to_the_rank() -> None:
    torch.manual_seed(0)
    for samples in (5, 60):
        v = inputs(samples)
        A = v.T @ v
        own = leverage(A, v, FINE)
        assert float(own.max()) <= 1 + 1e-9
        assert float(own.sum()) == pytest.approx(min(samples, IN + 1), rel=1e-3)
        assert float(leverage(A, inputs(500), FINE).mean()) > float(own.mean()) * (1e6 if samples == 5 else 1.2)


def test_counts_are_those_of_the_public_mix_that_fits() -> None:
    typical = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).double()
    truth = torch.tensor([3.0, 0.0, 5.0, 2.0]).double()
    torch.testing.assert_close(counts_by_public(truth @ typical, typical, 10), truth, atol=1e-8, rtol=0)
    # Nothing but their number told: whatever comes, it adds up.
    assert float(counts_by_public(torch.zeros(6).double(), typical * 0 + 1e-9, 10).sum()) == pytest.approx(10, rel=0.01)
