"""What noise is worth: (ε, δ) for one round and for a run, each beside the assumptions it holds under.

Compositions are by Google's dp-accounting (privacy loss distributions; Rényi divergences where clients are sampled).
Two theorems it lacks are closed forms: amplification by subsampling without replacement (Balle, Barthe, Gaboardi,
Privacy Amplification by Subsampling, NeurIPS 2018, theorem 9) and by shuffling (Feldman, McMillan, Talwar, Hiding
Among the Clones, FOCS 2021, theorem 3.8). Neighbours differ by one record (or client) replaced, never by their number.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from ntkfl.extras import missing

_GRID = 1e-3  # of privacy losses; rounded so that ε is never too small
_LARGE = 40.0  # beyond, ε are added up: no guarantee worth a finer one
_DEPLOYED = "each client's noise in a round comes from 32 bytes of its operating system's randomness, never shown"
SIMULATED = "simulated: the noise follows from the run's seed and hides nothing; ε is what a deployment would have"


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a `unit` (record or client) against those who see what `against` says."""

    epsilon: float
    delta: float
    unit: str
    against: str
    assumptions: tuple[str, ...]
    simulated: bool = False

    def __str__(self) -> str:
        size = "no finite ε" if math.isinf(self.epsilon) else f"ε = {self.epsilon:.3g}"
        of = " (simulated)" if self.simulated else ""
        return f"{size}{of} at δ = {self.delta:.0e} for a {self.unit}, against {self.against}"


def row_epsilon(noise: float, flip: float, classes: int, delta: float, times: int = 1) -> float:
    """ε of a record's noisy copies, one in each of `times` rounds: Gaussian of sensitivity 2·clip under noise·clip,
    composed with randomised response over the classes; infinite where either is missing.
    """
    if noise == 0 or flip == 0:
        return math.inf
    if times == 0:
        return 0.0
    # One Gaussian mechanism `times` over is one with noise smaller by √times.
    inputs = gaussian_epsilon(noise / math.sqrt(times), delta)
    if flip == 1:
        return inputs
    response = math.log((1 - flip) * classes / flip + 1)
    if inputs + times * response > _LARGE:
        return inputs + times * response
    # Composed here, not by the library's accountant: its version 0.6 counts a repeated randomised response once.
    pld = library("pld.privacy_loss_distribution")
    one = pld.from_gaussian_mechanism(noise / math.sqrt(times), sensitivity=2.0, value_discretization_interval=_GRID)
    other = pld.from_randomized_response(flip, classes, value_discretization_interval=_GRID).self_compose(times)
    return float(one.compose(other).get_epsilon_for_delta(delta))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """ε of the Gaussian mechanism, exactly: a vector of norm at most 1 replaced by another, under N(0, noise²)."""
    return float(library("gaussian_mechanism").get_epsilon_gaussian(noise / 2, delta))


def subsampled(epsilon: float, delta: float, rate: float) -> tuple[float, float]:
    """(ε, δ) of a mechanism that sees a uniformly drawn part `rate` of the records, of fixed size, kept secret."""
    return _log_of_one_plus(rate, epsilon), rate * delta


def shuffled(epsilon: float, delta0: float, rows: int, delta: float) -> tuple[float, float] | None:
    """(ε, δ) of `rows` shuffled (ε0, δ0)-private rows, all by one randomiser; None where the theorem does not hold.

    It asks ε0 ≤ ln(n / (16 ln(2/δ))). Approximate randomisers cost (e^ε + 1)(1 + e^(−ε0)/2) n δ0 more in δ.
    """
    if rows < 2 or epsilon > math.log(max(1.0, rows / (16 * math.log(2 / delta)))):
        return None
    e0 = math.exp(epsilon)
    spread = 8 * math.sqrt(e0 * math.log(4 / delta) / rows) + 8 * e0 / rows
    small = math.log1p((e0 - 1) / (e0 + 1) * spread)
    if small >= epsilon:
        return None
    return small, delta + (math.exp(small) + 1) * (1 + math.exp(-epsilon) / 2) * rows * delta0


def composed(epsilon: float, delta: float, times: int, target: float) -> float:
    """ε at δ = `target` of `times` (ε, δ)-private mechanisms, optimally composed."""
    if times <= 1 or math.isinf(epsilon) or epsilon * times > _LARGE:
        return epsilon * times
    pld = library("pld.privacy_loss_distribution")
    common = library("pld.common")
    one = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, delta), _GRID)
    return float(one.self_compose(times).get_epsilon_for_delta(target))


def record_guarantees(
    noise: float,
    flip: float,
    classes: int,
    *,
    times: int,
    rate: float,
    rows: int,
    shuffle: bool,
    delta: float = 1e-5,
    simulated: bool = False,
) -> list[Guarantee]:
    """Of NTK-FL with noise: a record against the aggregator, in one round it is drawn in, then over a run.

    `times` is how many rounds the record's client takes part in, `rate` the part β of its samples drawn in each,
    `rows` the least number of rows that a round's shuffler mixes. A `simulated` run's noise follows from its seed.
    """
    if noise == 0:
        return []
    whole = (
        SIMULATED if simulated else _DEPLOYED,
        "inputs, outputs, Jacobian, label and candidate losses all come from one noisy copy a round",
    )
    if flip == 0:
        why = "labels are sent as they are, and with them part of every record: set label_flip"
        return [Guarantee(math.inf, delta, "record", "the aggregator", (why,), simulated)]
    one = row_epsilon(noise, flip, classes, delta)
    many = row_epsilon(noise, flip, classes, delta, times)
    drawn = "the record is drawn in every round its client takes part in" if rate < 1 else "every sample is used"
    found = [
        Guarantee(one, delta, "record", "the aggregator, one round", whole),
        Guarantee(many, delta, "record", f"the aggregator, {times} rounds", (*whole, drawn)),
    ]
    secret = "which samples are drawn is secret, uniform and of fixed size; no credit for the cohort, which is known"
    if rate < 1:
        small, d = subsampled(row_epsilon(noise, flip, classes, delta / (2 * times)), delta / (2 * times), rate)
        epsilon = composed(small, d, times, delta)
        found.append(Guarantee(epsilon, delta, "record", f"the aggregator, {times} rounds, sampled", (*whole, secret)))
    if shuffle:
        found += _behind_shuffler(noise, flip, classes, times, rate, rows, delta, whole)
    return [replace(guarantee, simulated=simulated) for guarantee in found]


def client_guarantees(
    noise: float, *, cohort: int, clients: int, rounds: int, times: int, delta: float = 1e-5, simulated: bool = False
) -> list[Guarantee]:
    """Of an averaging method with noise on updates: a client against the aggregator, and against who sees models alone.

    No credit for shuffling: a round's rows are as few as its clients, below what the theorem needs.
    """
    if noise == 0:
        return []
    one, many = (gaussian_epsilon(noise / math.sqrt(n), delta) for n in (1, max(1, times)))
    accounting = library("")
    accountant = library("rdp").RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    total = accounting.GaussianDpEvent(noise * math.sqrt(cohort) / 2)  # of the sum: √M as much noise, sensitivity 2 C
    event: Any = accounting.SampledWithoutReplacementDpEvent(clients, cohort, total)
    accountant.compose(event, rounds)
    outside = float(accountant.get_epsilon(delta))
    whole = SIMULATED if simulated else _DEPLOYED
    sampled = "cohorts are drawn uniformly without replacement and kept from the adversary, as is the server's seed"
    honest = "all of a cohort add their noise, and the aggregator shows averages alone"
    return [
        Guarantee(one, delta, "client", "the aggregator, one round", (whole,), simulated),
        Guarantee(many, delta, "client", f"the aggregator, {times} rounds", (whole,), simulated),
        Guarantee(outside, delta, "client", f"who sees all {rounds} models", (whole, honest, sampled), simulated),
    ]


def _behind_shuffler(
    noise: float, flip: float, classes: int, times: int, rate: float, rows: int, delta: float, whole: tuple[str, ...]
) -> list[Guarantee]:
    """One round, and a run, with the rows of a round mixed: a quarter of δ for the theorem, one for its rows' δ0."""
    assumed = (
        *whole,
        f"the shuffler is honest and mixes at least {rows} rows of clients that do not collude",
        "every row is made by the same randomiser; timing and order say nothing",
    )
    found: list[Guarantee] = []
    for rounds, text in ((1, "one round"), (times, f"{times} rounds")):
        each = delta / (4 * rounds)
        delta0 = each / (16 * rows)
        epsilon = row_epsilon(noise, flip, classes, delta0)
        mixed = shuffled(epsilon, delta0, rows, each)
        if mixed is None or mixed[1] > 2 * each:
            return found
        small, d = mixed
        if rounds > 1 and rate < 1:
            small, d = subsampled(small, d, rate)
        total = small if rounds == 1 else composed(small, d, rounds, delta)
        found.append(Guarantee(total, delta, "record", f"the aggregator behind the shuffler, {text}", assumed))
    return found


def _log_of_one_plus(rate: float, epsilon: float) -> float:
    """ln(1 + rate (e^ε − 1)), also where e^ε overflows."""
    return epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon)) if math.isfinite(epsilon) else epsilon


def library(name: str) -> ModuleType:
    """A module of dp-accounting, which the extra `audit` brings."""
    try:
        return importlib.import_module(f"dp_accounting.{name}" if name else "dp_accounting")
    except ImportError:
        raise missing("(ε, δ)", "audit") from None
