"""Sums with noise under a budget: what methods of differential privacy share, whatever it is that they sum.

A client's contribution is a set of vectors, each of which a record (or, at client level, all of a client) changes by a
norm of at most 1. It leaves as integers with the client's share of discrete Gaussian noise,

    Σ_m round(grains v_m) + N(0, noise_clients · σ²),      σ² = Δ² / (2ρ noise_clients),

where the shares of `noise_clients` clients add up to what ε asks for; or without noise, and a trusted server adds it
once (`noise_by = "server"`). Under secure sums the server sees the total alone. No loss and no statistics: these sums
are all that leaves a client. ε, δ, the rounds they are for and who adds the noise are the section `[privacy]`; what
happens to a total is post-processing of noisy numbers.
"""

from __future__ import annotations

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
from ntkfl.privacy.sum_accounting import Release
from ntkfl.privacy.sum_noise import COUNT, GRAINS, ROUNDING, SumBudget, integer_change, to_integers
from ntkfl.wire.message import Message

VELOCITY = "velocity"
LARGEST = 2.0**30  # of a client's integers: with noise they still fit into 32 bits
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
        """The integers as they are, with room for noise where clients add it. Whether some had to be scaled down is
        never told of noisy ones: that would leave without noise.
        """
        numbers = {name: array.numel() for name, array in self.arrays.items()}
        by_clients, noisy = task.privacy.noise_by == "clients", task.privacy.epsilon is not None
        wide = method.widths(task, numbers) if by_clients else dict.fromkeys(numbers, 0.0)
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
    """

    _privacy: ClassVar[Privacy] = Privacy(epsilon=3.0)
    units: ClassVar[tuple[str, ...]] = ("record",)  # what ε can protect
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
        """ρ of so many rounds, at most, by the noise of `noise_clients` clients; none without ε.

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
        """σ of the noise that each client, or the server, adds to arrays of so many integers; 0 without ε."""
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
        """What the record of this round says of privacy."""
        privacy = task.privacy
        if (budget := self.budget(task)) is None:
            return {}
        found: dict[str, float | str] = {"epsilon": budget.spent(round), "delta": privacy.delta, "unit": privacy.unit}
        return found if privacy.sampling_rate == 1 else found | {"epsilon_always_drawn": budget.spent(round, 1.0)}

    def check_privacy(self, privacy: Privacy) -> None:
        """`ConfigError` for settings under which the noise would not be worth ε."""
        if privacy.unit not in self.units:
            raise ConfigError(f"{self.name} protects a {' or a '.join(self.units)}, not a {privacy.unit}: set unit")

    def check_round(self, task: Task, round: int, cohort: Sequence[int] = ()) -> None:
        """`ConfigError` where ε is not for this round or unit, or where more clients are drawn than it counts on."""
        privacy = task.privacy
        self.check_privacy(privacy)
        if round > privacy.budget_rounds:
            raise ConfigError(f"round {round}: ε was for {privacy.budget_rounds} rounds (budget_rounds), and is spent")
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
        if task.privacy.noise_by == "clients":
            whole = self._noisy(task, whole, randomness)
        kind = self.replies[question.kind]
        assert issubclass(kind, NoisyIntegers)
        return kind({name: array.int() for name, array in sorted(whole.items())})

    def total(self, task: Task, round: int, replies: list[NoisyIntegers]) -> dict[str, Tensor]:
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
        return self._noisy(task, total, task.randomness(round)) if privacy.noise_by == "server" else total

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


def mean_contribution(task: Task, total: Mapping[str, Tensor], name: str, cohort: Sequence[int]) -> Tensor:
    """The mean of a sum [d], in units of clip: over the noisy count of records, or the clients asked."""
    count = float(total[SAMPLES]) / COUNT if SAMPLES in total else float(len(cohort))
    if count < 1:
        raise TooFew("the noise is larger than the number of samples: there is nothing to learn from")
    return (total[name] / (GRAINS * count)).to(task.like)


def momentum_step(state: State, mean: Tensor, lr: float, momentum: float) -> State:
    """v ← m v + g, w ← w + lr v."""
    velocity = momentum * state[VELOCITY] + mean
    return {
        WEIGHTS: check_finite(state[WEIGHTS] + lr * velocity, "the model after the step"),
        VELOCITY: velocity,
    }
