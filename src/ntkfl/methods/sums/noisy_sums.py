"""Sums with noise under a budget: what the methods of differential privacy share.

A client's contribution is a set of vectors, each of which a record changes by a norm of at most 1. It leaves as
integers with the client's share of discrete Gaussian noise,

    Σ_m round(grains v_m) + N(0, noise_clients · σ²),      σ² = Δ² / (2ρ noise_clients),

where the shares of `noise_clients` clients add up to what ε asks for. Under secure sums the server sees the total
alone. No loss and no statistics: these sums are all that leaves a client. ε, δ and the rounds they are for are the
section `[privacy]`; what happens to a total is post-processing of noisy numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.base import Method
from ntkfl.methods.replies import SAMPLES, Addend, Addends, Sums
from ntkfl.methods.task import ClientRound, Task
from ntkfl.privacy.randomness import Purpose, Randomness, discrete_gaussians
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import (
    COUNT,
    GRAINS,
    ROUNDING,
    Release,
    SumBudget,
    guarantee,
    integer_change,
    to_integers,
)
from ntkfl.progress import plural
from ntkfl.tangent.sums import Factor
from ntkfl.wire.message import Message

MOMENTS = "moments/"
LARGEST = 2.0**30  # of a client's integers: with noise they still fit into 32 bits
_TAILS = 10.0  # standard deviations of a client's noise that fit below a secure sum's limit


class NoisyIntegers(Sums):
    """Vectors [numbers] of integers by name, int32; float64 once they are added up under masks."""

    first: ClassVar[tuple[str, ...]] = ()  # what names begin with of arrays that the first round alone asks for

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        """How many numbers each array of every reply has."""
        raise NotImplementedError

    @classmethod
    def blank(cls, method: NoisySums, task: Task, question: Message) -> Self:  # type: ignore[override]
        """Zeros of the sizes that the question asks for."""
        numbers = cls.numbers(task) | method.asked_once(task, question)
        return cls({name: torch.zeros(count, dtype=torch.int32) for name, count in sorted(numbers.items())})

    def check(self, task: Task) -> None:
        """Every array of its size, and no other but those that the first round alone asks for."""
        expected = self.numbers(task)
        for name, count in expected.items():
            self.take(name, (count,))
        if others := [name for name in self.arrays if name not in expected and not name.startswith(self.first)]:
            raise MessageError(f"noisy sums with {others[0]!r}, which nobody asked for")

    def addends(self, method: NoisySums, task: Task, question: Message) -> Addends:  # type: ignore[override]
        """The integers as they are, with room for noise. Whether some had to be scaled down is never told of noisy
        ones: that would leave without noise.
        """
        wide = method.widths(task, {name: array.numel() for name, array in self.arrays.items()})
        noisy = task.privacy.epsilon is not None
        return {
            name: Addend(
                array.double().cpu(), method.limit(task.privacy, name) + _TAILS * wide[name], noisy or name == SAMPLES
            )
            for name, array in self.arrays.items()
        }

    @classmethod
    def from_total(
        cls, method: Method, task: Task, question: Message, total: Mapping[str, Tensor], clients: int
    ) -> Self:
        """The total as it is; `TooFew` where fewer clients than ε counts on have added their noise."""
        if clients < (needed := task.privacy.noise_clients):
            raise TooFew(f"only a sum of {clients} clients came, where ε counts on the noise of {needed}")
        return cls(total)


class NoisySums(Method):
    """What private methods share. Arrays named `moments/…` are sent in the first round only, under the part `once` of
    the budget, all others in every round; `samples` counts records.

    A method of this kind clips what a record adds to norm 1, hands it to `integers` on a client, adds replies up with
    `total` at the server, and calls `check_round` at both ends: a client does not rely on the server for its promise.
    """

    _privacy: ClassVar[Privacy] = Privacy(epsilon=3.0)
    grains: ClassVar[int] = GRAINS  # integers that a norm of 1 becomes
    rounding: ClassVar[float] = ROUNDING  # by which norms may be off

    def once(self, task: Task | None) -> float:
        """The part of the budget for what the first round alone releases of this network, or at most of any."""
        return 0.0

    def asked_once(self, task: Task, question: Message) -> dict[str, int]:
        """Arrays that this question asks for beside those of every round, and how many numbers each has."""
        return {}

    @abstractmethod
    def limit(self, privacy: Privacy, name: str) -> float:
        """The largest integer that a client contributes to an array: cut there for the fixed point, not for privacy."""

    # -- How wide the noise is, and what it costs --------------------------------------------------------------------

    def budget(self, task: Task) -> SumBudget | None:
        """(ε, δ) and the rounds they are for; None without ε."""
        return self._budget(task.privacy, self.once(task))

    def _budget(self, privacy: Privacy, once: float) -> SumBudget | None:
        if privacy.epsilon is None:
            return None
        counted, rate = privacy.noise_clients, privacy.sampling_rate
        return SumBudget(privacy.epsilon, privacy.delta, privacy.budget_rounds, once, counted, rate)

    def releases(self, privacy: Privacy, rounds: int) -> list[Release]:
        """Upper bound on ρ of `rounds` rounds with the noise of `noise_clients` clients; empty without ε.

        Whether the first round releases more is the network's: with credit for sampling either may cost more in all.
        """
        budgets = [self._budget(privacy, once) for once in (self.once(None), 0.0)]
        found = [budget.releases(rounds) for budget in budgets if budget]
        return max(found, key=lambda releases: sum(rho * times for rho, times in releases), default=[])

    def widths(self, task: Task, numbers: Mapping[str, int]) -> dict[str, float]:
        """σ of the noise that each client adds to arrays with these `numbers` of integers; 0 without ε."""
        if (budget := self.budget(task)) is None:
            return dict.fromkeys(numbers, 0.0)
        wide = dict[str, float]()
        for purpose, width in (("noise", budget.width), ("moments", budget.width_once)):
            names = [name for name in numbers if _purpose(name) == purpose]
            if sizes := [numbers[name] for name in names if name != SAMPLES]:
                change = integer_change(sizes, SAMPLES in names, self.grains, self.rounding)
                wide |= dict.fromkeys(names, width(change))
        return wide

    def spent(self, task: Task, round: int) -> dict[str, float | str]:
        """What the record of this round says of privacy; rounds that failed before it count."""
        privacy, round = task.privacy, round + task.failed_rounds
        if (budget := self.budget(task)) is None:
            return {}
        found: dict[str, float | str] = {"epsilon": budget.spent(round), "delta": privacy.delta, "unit": "record"}
        return found if privacy.sampling_rate == 1 else found | {"epsilon_always_drawn": budget.spent(round, 1.0)}

    def check_round(self, task: Task, round: int, cohort: Sequence[int] = ()) -> None:
        """`ConfigError` where ε is not for this round, or where more clients are drawn than it counts on."""
        privacy, round = task.privacy, round + task.failed_rounds
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
        """The client's reply: vectors that a record changes by a norm of at most 1 each and, with `counts`, its number
        of samples, as integers with noise that is drawn anew for every other question.
        """
        randomness = client.randomness.for_question(question.encode())
        limited = [(vector, self.limit(task.privacy, name)) for name, vector in vectors.items()]
        whole = dict(zip(vectors, to_integers(limited, randomness, self.grains), strict=True))
        if counts:
            # Before the noise: a noisy count that a secure sum scaled down to its limit would lose noise as well.
            most = self.limit(task.privacy, SAMPLES) if task.privacy.secure_sum else LARGEST
            whole[SAMPLES] = torch.tensor([COUNT * len(client)]).clamp(max=int(most))
        if task.privacy.epsilon is not None:
            whole = self._with_noise(task, whole, randomness)
        kind = self.replies[question.kind]
        assert issubclass(kind, NoisyIntegers)
        return kind({name: array.int() for name, array in sorted(whole.items())})

    def total(self, task: Task, replies: list[NoisyIntegers]) -> dict[str, Tensor]:
        """The replies' sum by name, with all of its noise: float64 on the CPU."""
        privacy, total = task.privacy, dict[str, Tensor]()
        if not replies or (not privacy.secure_sum and len(replies) < privacy.noise_clients):
            raise TooFew(
                f"only the noise of {len(replies)} clients came, where ε counts on that of {privacy.noise_clients}"
            )
        for reply in replies:
            if total and reply.arrays.keys() != total.keys():
                raise MessageError("sums of different parts do not add up")
            total = {name: array.double().cpu() + total.get(name, 0.0) for name, array in reply.arrays.items()}
        return total

    def _with_noise(self, task: Task, whole: Mapping[str, Tensor], randomness: Randomness) -> dict[str, Tensor]:
        """Integers by name with noise. What the first round alone releases has its own stream."""
        wide, noisy = self.widths(task, {name: array.numel() for name, array in whole.items()}), dict(whole)
        purposes: tuple[Purpose, ...] = ("noise", "moments")
        for purpose in purposes:
            if names := sorted(name for name in whole if _purpose(name) == purpose):
                sizes = [whole[name].numel() for name in names]
                noise = torch.from_numpy(discrete_gaussians(wide[names[0]], sum(sizes), randomness, purpose))
                noisy |= {name: whole[name] + own for name, own in zip(names, torch.split(noise, sizes), strict=True)}
        return noisy


def _purpose(name: str) -> Purpose:
    """Which stream of a client's randomness an array's noise is from."""
    return "moments" if name.startswith(MOMENTS) else "noise"


# -- What noise is worth in a run: of any method; one that adds no noise has nothing to say ----------------------------


def promises(method: Method, task: Task, cohort: int, rounds: int) -> list[str]:
    """What a simulation with `rounds` rounds of `cohort` clients says of its noise before it begins.

    `ConfigError` where ε is for fewer rounds, or counts on more clients.
    """
    if not isinstance(method, NoisySums):
        return []
    privacy, counted = task.privacy, task.privacy.noise_clients
    method.check_round(task, rounds)
    if cohort < counted:
        raise ConfigError(f"ε counts on {counted} clients per round (noise_clients), and there are {cohort}")
    if privacy.epsilon is None:
        return ["without epsilon nothing is private: contributions are clipped, and no noise is added"]
    seen = "the sums or the models" if privacy.secure_sum else "the models; the server sees replies"
    apart = " and server and shuffler do not collude" if privacy.secure_sum else ""
    drawn = "" if privacy.sampling_rate == 1 else ", and cohorts are drawn at random"
    return [
        f"private (simulated): ε = {privacy.epsilon:g}, δ = {privacy.delta:g} for a record over "
        f"{plural(privacy.budget_rounds, 'round')}, against whoever sees {seen}",
        f"if at least {counted} of {cohort} clients are honest{apart}{drawn}",
    ]


def guarantees(method: Method, task: Task, rounds: int) -> list[dict[str, Any]]:
    """(ε, δ) after `rounds` rounds, with their assumptions: with credit for sampling, if ε uses it, and without it."""
    privacy = task.privacy
    if not isinstance(method, NoisySums) or (budget := method.budget(task)) is None:
        return []
    seen = "the aggregator" if privacy.secure_sum else "those who see the models"
    return [
        guarantee(
            budget.releases(rounds),
            privacy.delta,
            clients=privacy.noise_clients,
            against=f"{seen}, {plural(rounds, 'round')}",
            secure=privacy.secure_sum,
            rate=rate,
        )
        for rate in sorted({privacy.sampling_rate, 1.0})
    ]


# -- Symmetric matrices as vectors of the same norm --------------------------------------------------------------------


def scaled_triangle(A: Tensor) -> Tensor:
    """The upper triangle of A [m, m] row by row, of the same 2-norm as all of A: beside the diagonal times √2."""
    rows, columns = torch.triu_indices(*A.shape, device=A.device)
    return (A * _scale(A))[rows, columns]


def unscaled(triangle: Tensor) -> Tensor:
    """A [m, m] of its scaled triangle [m (m + 1) / 2]."""
    A = Factor(triangle.unsqueeze(0)).square()[0]
    return A / _scale(A)


def _scale(A: Tensor) -> Tensor:
    """1 on the diagonal and √2 beside it, [m, m]."""
    return torch.full(A.shape, math.sqrt(2)).fill_diagonal_(1).to(A)
