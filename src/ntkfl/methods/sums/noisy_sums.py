"""Sums with noise under a budget: what methods of differential privacy share, whatever it is that they sum.

A client's contribution is a set of vectors, each of which a record (or, at client level, all of a client) changes by a
norm of at most 1. It leaves as integers with the client's share of discrete Gaussian noise,

    Σ_m round(grains v_m) + N(0, noise_clients · σ²),      σ² = Δ² / (2ρ noise_clients),

where the shares of `noise_clients` clients add up to what ε asks for. Under secure sums the server sees the total
alone. No loss and no statistics: these sums are all that leaves a client. ε, δ and the rounds they are for are the
section `[privacy]`; what happens to a total is post-processing of noisy numbers.

`promises`, `guarantees` and `noise_advice` say what noise is worth in a run, and when it drowns what is learned. They
take any method; one that adds no noise has nothing to say.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.base import Method
from ntkfl.methods.replies import SAMPLES, WEIGHTS, Addend, Addends, Sums
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.randomness import Purpose, Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_accounting import Guarantee, Participation, Release, guarantee
from ntkfl.privacy.sum_noise import COUNT, GRAINS, ROUNDING, SumBudget, integer_change, momentum_sums, to_integers
from ntkfl.progress import plural
from ntkfl.wire.message import Message

VELOCITY = "velocity"
LARGEST = 2.0**30  # of a client's integers: with noise they still fit into 32 bits
DROWNED = 5.0  # measured: runs at a noise of 1.6 and 4.3 still learn, at 23 they do not
_TAILS = 10.0  # standard deviations of a client's noise that fit below a secure sum's limit


class NoisyIntegers(Sums):
    """Vectors [numbers] of integers by name, int32; float64 once they are added up under masks."""

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        """How many numbers each array of every reply has."""
        raise NotImplementedError

    @classmethod
    def blank(cls, method: NoisySums, task: Task, question: Message) -> Self:  # type: ignore[override]
        numbers = cls.numbers(task) | method.asked_once(task, question)
        return cls({name: torch.zeros(count, dtype=torch.int32) for name, count in sorted(numbers.items())})

    def check(self, task: Task) -> None:
        """Every array of its size, and no other."""
        for name, count in self.numbers(task).items():
            self.take(name, (count,))
        if others := self.arrays.keys() - self.numbers(task).keys():
            self.check_others(task, others)

    def check_others(self, task: Task, names: Collection[str]) -> None:
        """`MessageError` unless these are what the first round alone asks for."""
        raise MessageError(f"noisy sums with {', '.join(names)}, which nobody asked for")

    def addends(self, method: NoisySums, task: Task, question: Message) -> Addends:  # type: ignore[override]
        """The integers as they are, with room for noise. Whether some had to be scaled down is never told of noisy
        ones: that would leave without noise.
        """
        numbers = {name: array.numel() for name, array in self.arrays.items()}
        wide, noisy = method.widths(task, numbers), task.privacy.epsilon is not None
        limits = {name: method.limit(task.privacy, name) + _TAILS * wide[name] for name in numbers}
        return {
            name: Addend(array.double().cpu(), limits[name], noisy or name != method.contribution)
            for name, array in self.arrays.items()
        }

    @classmethod
    def from_total(
        cls, method: Method, task: Task, question: Message, total: Mapping[str, Tensor], clients: int
    ) -> Self:
        if clients < (needed := task.privacy.noise_clients):
            raise TooFew(f"a sum of {clients} clients, where ε counts on the noise of {needed}")
        return cls(total)


class NoisySums(Method):
    """Options and steps of private methods. Their names of arrays: `contribution` is sent in every round, arrays whose
    name begins with `first` in the first round only, under the part `once` of the budget; `samples` counts records.

    A method of this kind clips what its `unit` adds to norm 1, hands it to `integers` on a client, adds replies up with
    `total` at the server, and calls `check_round` at both ends: a client does not rely on the server for its promise.
    """

    _privacy: ClassVar[Privacy] = Privacy(epsilon=3.0)
    unit: ClassVar[str] = "record"  # what ε protects: a record, or a client with all its data
    contribution: ClassVar[str]
    first: ClassVar[str] = "moments/"
    grains: ClassVar[int] = GRAINS  # integers that a norm of 1 becomes
    rounding: ClassVar[float] = ROUNDING  # by which norms may be off

    @property
    def first_share(self) -> float:
        """The part of the budget for what the first round alone releases, at most: `once` says whether there is any."""
        return 0.0

    def once(self, task: Task) -> float:
        """The part of the budget for what the first round alone releases of this network."""
        return self.first_share

    @property
    def step_size(self) -> tuple[str, float, float] | None:
        """The option that scales a step, how far a mean of norm 1 moves the weights, and the server's momentum; None
        of a method that takes no steps.
        """
        return None

    def asked_once(self, task: Task, question: Message) -> dict[str, int]:
        """Arrays that this question asks for beside those of every round, and how many numbers each has."""
        return {}

    @abstractmethod
    def limit(self, privacy: Privacy, name: str) -> float:
        """The largest integer that a client contributes to an array: cut there for the fixed point, not for privacy."""

    # -- How wide the noise is, and what it costs --------------------------------------------------------------------

    def releases(self, privacy: Privacy, rounds: int) -> list[Release]:
        """Upper bound on ρ of `rounds` rounds with the noise of `noise_clients` clients; empty without ε.

        Whether the first round releases more is the network's: with credit for sampling either may cost more in all.
        """
        if privacy.epsilon is None:
            return []
        spread, counted = (privacy.epsilon, privacy.delta, privacy.budget_rounds), privacy.noise_clients
        budgets = [SumBudget(*spread, once, counted, privacy.sampling_rate) for once in (self.first_share, 0.0)]
        found = [budget.releases(rounds) for budget in budgets]
        return max(found, key=lambda releases: sum(rho * times for rho, times in releases))

    def budget(self, task: Task) -> SumBudget | None:
        """None without ε."""
        privacy = task.privacy
        if privacy.epsilon is None:
            return None
        shared = (privacy.noise_clients, privacy.sampling_rate)
        return SumBudget(privacy.epsilon, privacy.delta, privacy.budget_rounds, self.once(task), *shared)

    def widths(self, task: Task, numbers: Mapping[str, int]) -> dict[str, float]:
        """σ of the noise that each client adds to arrays with these `numbers` of integers; 0 without ε."""
        if (budget := self.budget(task)) is None:
            return dict.fromkeys(numbers, 0.0)
        wide = dict[str, float]()
        for purpose, width in (("noise", budget.width), ("moments", budget.width_once)):
            names = [name for name in numbers if self._purpose(name) == purpose]
            sizes = [numbers[name] for name in names if name != SAMPLES]
            if sizes:
                change = integer_change(sizes, SAMPLES in names, self.grains, self.rounding)
                wide |= dict.fromkeys(names, width(change))
        return wide

    def spent(self, task: Task, round: int) -> dict[str, float | str]:
        """What the record of this round says of privacy; rounds that failed before it count."""
        privacy, round = task.privacy, round + task.failed_rounds
        if (budget := self.budget(task)) is None:
            return {}
        found: dict[str, float | str] = {"epsilon": budget.spent(round), "delta": privacy.delta, "unit": self.unit}
        return found if privacy.sampling_rate == 1 else found | {"epsilon_always_drawn": budget.spent(round, 1.0)}

    def check_privacy(self, privacy: Privacy) -> None:
        """`ConfigError` for settings under which the noise would not be worth ε."""

    def check_round(self, task: Task, round: int, cohort: Sequence[int] = ()) -> None:
        """`ConfigError` where ε is not for this round, or where more clients are drawn than it counts on."""
        privacy, round = task.privacy, round + task.failed_rounds
        self.check_privacy(privacy)
        if round > privacy.budget_rounds:
            failed = f" with {task.failed_rounds} that failed" if task.failed_rounds else ""
            spent = f"ε was for {privacy.budget_rounds} rounds (budget_rounds), and is spent"
            raise ConfigError(f"round {round}{failed}: {spent}")
        if privacy.sampling_rate < 1 and len(cohort) > privacy.sampling_rate * task.total_clients * (1 + 1e-9):
            drawn = f"{len(cohort)} of {task.total_clients} clients"
            raise ConfigError(f"a round draws {drawn}, more than sampling_rate {privacy.sampling_rate:.3g} says")

    # -- Both ends of a sum ------------------------------------------------------------------------------------------

    def integers(
        self, task: Task, question: Message, client: ClientRound, vectors: Mapping[str, Tensor], counts: bool = False
    ) -> NoisyIntegers:
        """The client's reply: vectors that the `unit` changes by a norm of at most 1 each and, with `counts`, its
        number of samples, as integers with noise that is drawn anew for every other question.
        """
        randomness = client.randomness.for_question(question.encode())
        limited = [(vector, self.limit(task.privacy, name)) for name, vector in vectors.items()]
        whole = dict(zip(vectors, to_integers(limited, randomness, self.grains), strict=True))
        if counts:
            # Before the noise: a noisy count that a secure sum scaled down to its limit would lose noise as well.
            most = self.limit(task.privacy, SAMPLES) if task.privacy.secure_sum else LARGEST
            whole[SAMPLES] = torch.tensor([COUNT * len(client)]).clamp(max=int(most))
        whole = self._noisy(task, whole, randomness)
        kind = self.replies[question.kind]
        assert issubclass(kind, NoisyIntegers)
        return kind({name: array.int() for name, array in sorted(whole.items())})

    def total(self, task: Task, replies: list[NoisyIntegers]) -> dict[str, Tensor]:
        """The replies' sum by name, with all of its noise: float64 on the CPU. A reply is let go once it is added."""
        privacy, total = task.privacy, dict[str, Tensor]()
        if not privacy.secure_sum and len(replies) < privacy.noise_clients:
            raise TooFew(f"the noise of {len(replies)} clients, where ε counts on that of {privacy.noise_clients}")
        while replies:
            arrays = replies.pop(0).arrays
            if total and arrays.keys() != total.keys():
                raise MessageError("sums of different parts do not add up")
            total = {name: array.double().cpu() + total.get(name, 0.0) for name, array in arrays.items()}
        if not total:
            raise TooFew("no client's sums came")
        return total

    def _noisy(self, task: Task, whole: dict[str, Tensor], randomness: Randomness) -> dict[str, Tensor]:
        """Integers by name with noise, if there is an ε. What the first round alone releases has its own stream."""
        if task.privacy.epsilon is None:
            return whole
        wide, noisy = self.widths(task, {name: array.numel() for name, array in whole.items()}), dict(whole)
        purposes: tuple[Purpose, ...] = ("noise", "moments")
        for purpose in purposes:
            names = sorted(name for name in whole if self._purpose(name) == purpose)
            if names:
                sizes = [whole[name].numel() for name in names]
                noise = torch.from_numpy(discrete_gaussians(wide[names[0]], sum(sizes), randomness, purpose))
                noisy |= {name: whole[name] + own for name, own in zip(names, torch.split(noise, sizes), strict=True)}
        return noisy

    def _purpose(self, name: str) -> Purpose:
        return "moments" if name.startswith(self.first) else "noise"


def momentum_step(state: State, mean: Tensor, lr: float, momentum: float) -> State:
    """v ← m v + g, w ← w + lr v, for weights w and velocity v [d]."""
    velocity = momentum * state[VELOCITY] + mean
    return {
        WEIGHTS: check_finite(state[WEIGHTS] + lr * velocity, "the model after the step"),
        VELOCITY: velocity,
    }


def unit_of(method: Method) -> str:
    """What the method's ε protects: a record, or a client with all its data."""
    return method.unit if isinstance(method, NoisySums) else "record"


def releases_of(method: Method, privacy: Privacy, rounds: int) -> list[Release]:
    """ρ of what `rounds` rounds release; empty for a method without noise."""
    return method.releases(privacy, rounds) if isinstance(method, NoisySums) else []


def promises(method: Method, task: Task, cohort: int, rounds: int) -> list[str]:
    """The guarantee of a simulation with `rounds` rounds of `cohort` clients, and its conditions.

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
    seen = "the sums or the models" if privacy.secure_sum else "the models; the server sees replies"
    drawn = "" if privacy.sampling_rate == 1 else ", and cohorts are drawn at random"
    spare = cohort - privacy.noise_clients
    others = f"{spare} may not be" if spare else "one that is not voids it: set noise_clients below that"
    apart = " and server and shuffler do not collude" if privacy.secure_sum else ""
    return [
        f"private (simulated): ε = {privacy.epsilon:g}, δ = {privacy.delta:g} for a {method.unit} over "
        f"{plural(privacy.budget_rounds, 'round')}, against whoever sees {seen}",
        f"if at least {privacy.noise_clients} of {cohort} clients are honest ({others}){apart}{drawn}",
    ]


def guarantees(method: Method, task: Task, run: Participation) -> list[Guarantee]:
    """(ε, δ) of a run, each with its assumptions: with credit for sampling, where ε counts on it, and without."""
    if not isinstance(method, NoisySums) or (budget := method.budget(task)) is None:
        return []
    privacy = task.privacy
    seen = "the aggregator" if privacy.secure_sum else "those who see the models"
    return [
        guarantee(
            budget.releases(run.rounds),
            privacy.delta,
            clients=privacy.noise_clients,
            against=f"{seen}, {plural(run.rounds, 'round')}",
            secure=privacy.secure_sum,
            simulated=run.simulated,
            unit=method.unit,
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
    size, count = task.like.numel(), samples if method.unit == "record" else cohort
    numbers = {method.contribution: size} | ({SAMPLES: 1} if method.unit == "record" else {})
    width = method.widths(task, numbers)[method.contribution]
    k = width * math.sqrt(size * cohort) / (GRAINS * count)
    most, walk = momentum_sums(momentum, rounds)
    norm, what = float(task.like.norm()), f"{count:,.0f} {method.unit}s in each of {rounds} rounds"
    if k * walk > DROWNED * most:
        return [
            f"the noise is {k * walk / most:.2g} times all that {what} can add up to, and the model will hardly learn "
            f"at any step size: it takes more {method.unit}s, a larger epsilon or a smaller network"
        ]
    if (drift := step * k * walk) > norm:
        return [
            f"with {what} the noise alone moves the weights by {drift / norm:.2g} times their norm, and a good model "
            f"may be lost again: take fewer rounds, more {method.unit}s or a smaller step ({option} = "
            f"{getattr(method, option) * norm / drift:.2g} keeps it at their norm)"
        ]
    return []
