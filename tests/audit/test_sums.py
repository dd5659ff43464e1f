"""Sums under attack: of one sample, of few, of a cohort; by each role, and against a sum that a record is not in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ntkfl.audit import sums
from ntkfl.audit.analytic import LinearLayer
from ntkfl.audit.capture import Capture, capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.membership import Roc
from ntkfl.audit.page import render
from ntkfl.audit.received import sums_of
from ntkfl.audit.study import judged, study, undefended, verdicts
from ntkfl.audit.sum_attacks import attacks
from ntkfl.audit.sum_membership import alignment
from ntkfl.federation.build import build_model, load_data
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import apply_flat, flatten
from tests.audit.fixtures import config

PLAN = config({"name": "fedavg"}, rounds=3)  # `config` gives methods of rows their steps


def planned(method: dict[str, object], round: int = 1) -> Capture:
    return capture(PLAN.model_copy(update={"method": method}), round)


@pytest.fixture(scope="module")
def heard() -> Capture:
    return planned({"name": "sum-ntk-fl"})


@pytest.fixture(scope="module")
def found(heard: Capture) -> dict[tuple[str, str], Finding]:
    return {(f.attack, f.role): f for f in sums.attack(heard, quick=True)}


def test_the_weights_are_those_that_clients_read(heard: Capture) -> None:
    """A broadcast in float16 is scaled: its numbers alone are not the weights."""
    first = flatten(build_model(PLAN, load_data(PLAN)))
    assert float((heard.weights - first).abs().max()) <= 2.0**-11 * float(first.abs().max())


def test_few_samples_are_given_away(found: dict[tuple[str, str], Finding]) -> None:
    for attack in ("analytic inversion", "unmixing"):
        one = found[f"{attack}, sum of 1 sample", "aggregator"]
        assert one.mean > 0.99
        assert one.guess < 0.7
    assert found["unmixing, sum of 8 samples", "aggregator"].success > 0.3
    assert found["membership by input factor, sum of 8 samples", "aggregator"].mean > 0.9
    for size in ("1 sample", "8 samples"):
        assert found[f"class counts by gradient, sum of {size}", "aggregator"].mean > 0.99


def test_totals_tell_less_of_records_and_all_of_means(found: dict[tuple[str, str], Finding]) -> None:
    member = "membership by input factor, sums"
    few = found["membership by input factor, sum of 8 samples", "aggregator"].mean
    assert few > found[member, "aggregator"].mean + 0.3
    assert few > found[member, "secure-sum"].mean + 0.5
    for role in ("aggregator", "secure-sum", "secure-sum+clients"):
        assert found["mean input, sums", role].mean < 0.01
        assert found["class counts by gradient, sums", role].mean > 0.9
    assert {role for _, role in found} == {"aggregator", "secure-sum", "secure-sum+clients", "outsider"}
    assert ("class counts by gradient, sums", "outsider") not in found


def test_a_minority_leaves_the_sum_of_the_others(heard: Capture) -> None:
    clients = sums._clients(heard)
    left, others = sums._less(sums._added(clients), clients[:1], clients[1:]), sums._added(clients[1:])
    assert left.samples == others.samples == sum(len(y) for _, y in heard.truth[1:])
    for name, array in left.sums.arrays.items():
        torch.testing.assert_close(array, others.sums.arrays[name], rtol=1e-9, atol=1e-6)


def test_records_that_are_not_in_a_sum_are_not_found_in_it(heard: Capture) -> None:
    """The same attack where the records asked about are another client's: no advantage but what chance leaves."""
    one, other = sums._clients(heard)[:2]
    wrong = {f.attack: f for f in attacks(heard, [replace(one, x=other.x, y=other.y)], "aggregator", "sums", 0, True)}
    for name in ("input factor", "hidden factor", "gradient", "alignment"):
        finding = wrong[f"membership by {name}, sums"]
        half = finding.details["members"] / 2
        assert abs(finding.mean) < 3 * (0.5 / half) ** 0.5  # three deviations of a difference of two shares


def test_sums_of_chosen_sizes_are_in_the_table_and_not_in_verdicts(heard: Capture) -> None:
    result = study(heard, quick=True)
    assert any("sum of 1 sample" in f.attack for f in result.findings)
    assert not any("sum of" in f.attack for f in judged(result.findings))
    assert "sum of" not in " ".join(result.verdicts.values())
    assert "one sum of 3 updates" in result.sees["secure-sum"]
    assert "1 of the 3 clients" in result.sees["secure-sum+clients"]
    assert "moved" in result.sees["outsider"]
    assert "totals alone" in render(result, "sums", None).lower()
    assert "of the inputs' mean" in result.verdicts["secure-sum"]


def test_averaged_updates_add_up_too_and_rows_do_not() -> None:
    plain = planned({"name": "fedavg", "local_steps": 1, "batch_size": 2000})
    found = {(f.attack, f.role): f for f in sums.attack(plain, quick=True)}
    assert found["analytic inversion, sum of 1 sample", "aggregator"].mean > 0.99
    assert found["class counts by gradient, sum of 1 sample", "aggregator"].mean > 0.8
    for role in ("aggregator", "secure-sum"):
        assert ("analytic inversion, sums", role) in found
    read = sums_of(plain, plain.uploads[0])
    assert read is not None
    x, y = plain.truth[0]
    model = plain.task.at(plain.weights)
    loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert float((read[0].arrays["gradient"] - exact).norm() / exact.norm()) < 1e-3
    rows = planned({"name": "ntk-fl", "steps": (50.0,), "subsample_rate": 0.1})
    assert sums.attack(rows) == []
    assert sums_of(rows, rows.uploads[0]) is None


def test_floats_and_later_rounds_are_read_as_well() -> None:
    floats = planned({"name": "sum-ntk-fl", "values": "float32"})
    read = sums_of(floats, floats.uploads[0])
    assert read is not None
    assert read[1] < 2.0**-20
    later = planned({"name": "sum-ntk-fl", "input_cohorts": 1}, 3)
    found = {f.attack: f for f in sums.attack(later, quick=True)}
    assert found["analytic inversion, sum of 1 sample"].mean > 0.99
    assert "unmixing, sum of 1 sample" not in found  # nobody sends the inputs' factor any more
    assert "membership by input factor, sums" not in found
    assert found["membership by hidden factor, sum of 8 samples"].mean > 0.5
    assert "deep leakage, sum of 8 samples" in found
    assert later.after is not None
    assert any(f.role == "outsider" for f in found.values())


# -- Runs with secure sums ---------------------------------------------------------------------------------------------

PRIVATE = {"name": "private-sums", "secure_sum": True, "budget_rounds": 3, "noise_clients": 3, "clip": 5.0}


def test_of_a_secure_sum_the_total_alone_is_attacked() -> None:
    """The same round, masked: nobody has a client's sums, and what the total tells is what it tells unmasked."""
    plain, masked = planned({"name": "sum-ntk-fl"}), planned({"name": "sum-ntk-fl", "secure_sum": True})
    result = study(masked, quick=True)
    assert masked.masked
    assert {f.role for f in result.findings} == {"secure-sum", "secure-sum+clients", "outsider"}
    wanted = "membership by input factor, sums"
    (one,) = [f for f in sums.attack(plain, quick=True) if (f.attack, f.role) == (wanted, "secure-sum")]
    (two,) = [f for f in result.findings if (f.attack, f.role) == (wanted, "secure-sum")]
    assert one.values == two.values
    assert result.verdicts["aggregator"] == "has the total alone."
    assert "every client's reply" in result.sees["aggregator+shuffler"]
    assert result.sees["aggregator"].startswith("one sum of 3 replies")
    together = result.verdicts["aggregator+shuffler"]
    assert together == "opens every client's reply, by name: masks hide nothing from the two together."
    assert '<div class="role bad"><b>Aggregator and shuffler together' in render(result, "an audit", None)


def test_a_promise_does_not_hold_against_two_that_collude() -> None:
    pair = verdicts(planned(PRIVATE), [])
    assert "ε counts on the two not colluding and does not hold against them" in pair["aggregator+shuffler"]
    assert pair["aggregator+key-server"] == "has the total alone."


@pytest.mark.parametrize("options", [{"name": "fedavg"}, {"name": "sum-ntk-fl"}])
def test_without_defences_nothing_is_reduced(options: dict[str, object]) -> None:
    """A larger cohort alone makes an attack harder: that is no defence of the run's."""
    plan = PLAN.model_copy(update={"method": options})
    found = study(capture(plan, 1), capture(undefended(plan), 1), quick=True).findings
    assert found
    assert all(f.verdict is None for f in found)


@pytest.mark.parametrize("round", [1, 2])
def test_a_private_sum_is_read_as_a_gradient(round: int) -> None:
    """With next to no noise and a clip that binds nobody it is the cohort's gradient, with the whitening taken back."""
    heard = planned(PRIVATE | {"epsilon": 1e5, "clip": 1e3}, round)
    total = sums._added(sums._clients(heard))
    assert abs(total.samples - sum(len(y) for _, y in heard.truth)) <= 2
    x, y, _ = heard.rows_truth()
    w = heard.weights.clone().requires_grad_()
    losses = per_sample(heard.task.loss, apply_flat(heard.task.model, w, x), heard.task.training_targets(y))
    (gradient,) = torch.autograd.grad(losses.sum(), w)
    assert float((total.gradient - gradient.double()).norm() / gradient.norm()) < 0.1


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.9, 1.0), (300.0, 0.3, 0.7)])
def test_a_record_is_found_in_a_sum_unless_there_is_noise(noise: float, least: float, most: float) -> None:
    """100 gradients δ vᵀ of 20 × 40 numbers added up, correlated as real ones are. A member adds √800 where the other
    99 add numbers of size √99: 2.8 deviations, an area of 0.98. Under noise of 300 deviations nothing is left.
    """
    draws = torch.Generator().manual_seed(0)
    mixes = [torch.randn(n, n, generator=draws, dtype=torch.float64) for n in (40, 20)]

    def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        v, delta = (torch.randn(count, len(M), generator=draws, dtype=torch.float64) @ M for M in mixes)
        return v, delta

    members, others, public = (records(count) for count in (100, 400, 2000))
    G = members[1].T @ members[0]
    G = G + noise * G.std() * torch.randn(G.shape, generator=draws, dtype=torch.float64)
    layer = LinearLayer(torch.nn.Linear(39, 20), slice(0, 780), slice(780, 800))
    flat = torch.cat([G[:, :-1].reshape(-1), G[:, -1]])
    a, b = alignment(layer, flat, (members, others), public)
    found = Roc.of(a, b).area()
    assert least <= found <= most


def test_noise_hides_who_was_in_a_private_sum() -> None:
    found = {f.role: f for f in sums.attack(planned(PRIVATE | {"epsilon": 1.0}), quick=True) if "alignment" in f.attack}
    for finding in found.values():
        assert abs(finding.mean) < 3 * (0.5 / (finding.details["members"] / 2)) ** 0.5
