"""What noise is worth in a run, and when it drowns what is learned: said before the first round.

All functions are for any method; one that adds no noise has nothing to say.
"""

from __future__ import annotations

import math

from ntkfl.errors import ConfigError
from ntkfl.methods.base import Method
from ntkfl.methods.replies import SAMPLES
from ntkfl.methods.sums.noisy_sums import NoisySums
from ntkfl.methods.task import Task
from ntkfl.privacy.accounting import Guarantee, Participation
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_accounting import guarantee
from ntkfl.privacy.sum_noise import GRAINS, momentum_sums
from ntkfl.progress import plural

DROWNED = 5.0  # measured: runs at a noise of 1.6 and 4.3 still learn, at 23 they do not


def promises(method: Method, task: Task, cohort: int, rounds: int) -> list[str]:
    """What a run of so many rounds, with so many clients each, promises, and under which conditions.

    `ConfigError` where ε is for fewer rounds, or counts on more clients.
    """
    if not isinstance(method, NoisySums):
        return []
    privacy = task.privacy
    method.check_round(task, rounds)
    if cohort < privacy.noise_clients:
        raise ConfigError(
            f"ε counts on {privacy.noise_clients} clients per round (noise_clients), and there are {cohort}"
        )
    if privacy.epsilon is None:
        return ["without epsilon nothing is private: contributions are clipped, and no noise is added"]
    seen = "the sums or the models" if _hides_replies(privacy) else "the models; the server sees replies"
    drawn = "" if privacy.sampling_rate == 1 else ", and cohorts are drawn at random"
    return [
        f"private: ε = {privacy.epsilon:g}, δ = {privacy.delta:g} for a {privacy.unit} over "
        f"{plural(privacy.budget_rounds, 'round')}, against whoever sees {seen}",
        f"{_conditions(privacy, cohort)}{drawn}",
    ]


def guarantees(method: Method, task: Task, run: Participation) -> list[Guarantee]:
    """(ε, δ) of a run, each with its assumptions: with credit for sampling, where ε counts on it, and without."""
    if not isinstance(method, NoisySums) or (budget := method.budget(task)) is None:
        return []
    privacy = task.privacy
    seen = "the aggregator" if _hides_replies(privacy) else "those who see the models"
    return [
        guarantee(
            budget.releases(run.rounds),
            privacy.delta,
            clients=privacy.noise_clients,
            against=f"{seen}, {plural(run.rounds, 'round')}",
            secure=privacy.secure_sum,
            simulated=run.simulated,
            unit=privacy.unit,
            noise_by=privacy.noise_by,
            rate=rate,
        )
        for rate in sorted({privacy.sampling_rate, 1.0})
    ]


def noise_advice(method: Method, task: Task, samples: float, cohort: int, rounds: int) -> list[str]:
    """A warning where noise drowns what `samples` records of a round's cohort give.

    That is where noise alone moves the weights `DROWNED` times as far as all clipped contributions can, or else by more
    than their own norm: η k √Σ a² against η Σ a and ‖w‖, with k the norm of a round's noise over its mean's bound, and
    a from `momentum_sums`.
    """
    privacy = task.privacy
    if not isinstance(method, NoisySums) or method.step_size is None or privacy.epsilon is None:
        return []
    option, step, momentum = method.step_size
    size, count = task.like.numel(), samples if privacy.unit == "record" else cohort
    numbers = {method.contribution: size} | ({SAMPLES: 1} if privacy.unit == "record" else {})
    width = method.widths(task, numbers)[method.contribution]
    k = width * math.sqrt(size * (cohort if privacy.noise_by == "clients" else 1)) / (GRAINS * count)
    most, walk = momentum_sums(momentum, rounds)
    norm, what = float(task.like.norm()), f"{count:,.0f} {privacy.unit}s in each of {rounds} rounds"
    if k * walk > DROWNED * most:
        return [
            f"the noise is {k * walk / most:.2g} times all that {what} can add up to, and the model will hardly learn "
            f"at any step size: it takes more {privacy.unit}s, a larger epsilon or a smaller network"
        ]
    if (drift := step * k * walk) > norm:
        return [
            f"with {what} the noise alone moves the weights by {drift / norm:.2g} times their norm, and a good model "
            f"may be lost again: take fewer rounds, more {privacy.unit}s or a smaller step ({option} = "
            f"{getattr(method, option) * norm / drift:.2g} keeps it at their norm)"
        ]
    return []


def _hides_replies(privacy: Privacy) -> bool:
    """Whether the server sees nothing without noise."""
    return privacy.secure_sum and privacy.noise_by == "clients"


def _conditions(privacy: Privacy, cohort: int) -> str:
    """What ε counts on."""
    if privacy.noise_by == "server":
        return "if the server, which adds the noise, is trusted"
    spare = cohort - privacy.noise_clients
    others = f"{spare} may not be" if spare else "one that is not voids it: set noise_clients below that"
    apart = " and server and shuffler do not collude" if privacy.secure_sum else ""
    return f"if at least {privacy.noise_clients} of {cohort} clients are honest ({others}){apart}"
