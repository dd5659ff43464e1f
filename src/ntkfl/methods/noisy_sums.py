"""Sums with noise under a budget: what differentially private methods share, whatever it is that they sum.

A client's contribution is a vector that a record (or, at client level, all of the client) changes by a norm of at most
`clip`. It leaves as integers with the client's share of discrete Gaussian noise, that of `noise_clients` clients adding
up to what ε asks for; or, with `noise_by = "server"`, without, and a trusted server adds the noise once. With
`secure_sum` the server sees the total alone. No loss, no statistics: sums are all that leaves a client.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew, unknown
from ntkfl.methods.additive import Addend, Summand
from ntkfl.methods.base import ClientRound, State, Task, check_finite
from ntkfl.methods.inspection import Participation
from ntkfl.methods.noise_shares import LARGEST, NoiseShares
from ntkfl.privacy.accounting import Guarantee
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.randomness import Purpose, Randomness
from ntkfl.privacy.sum_accounting import Release, guarantee
from ntkfl.privacy.sum_noise import COUNT, GRAINS, SumBudget, moment_change, momentum_sums, to_integers, vector_change
from ntkfl.tangent.sums import Factor, Layer
from ntkfl.wire import Message

SAMPLES, MOMENTS = "samples", "moments/"
NOISE_BY = ("clients", "server")
DROWNED = 5.0  # docs/private-sums.md: runs at a noise of 1.6 and 4.3 still learn, at 23 they do not
_VELOCITY = "velocity"


class NoisySums(NoiseShares):
    """Σ_m round(contribution_m) + noise, of ε and δ over `budget_rounds` rounds. Its mean g moves the server's weights
    with momentum: v ← m v + g, w ← w + lr v.
    """

    units: ClassVar[tuple[str, ...]] = ("record", "client")
    vector: ClassVar[str] = "gradient"
    sum_limit: ClassVar[float] = 0.1  # largest number of a gradient per sample, in units of clip; of a record's ε

    epsilon: float | None = Field(3.0, gt=0, description="ε of a `unit` over all rounds; none: no noise, no privacy")
    unit: str = Field("record", description="what ε protects: a record, or a client with all its data")
    budget_rounds: int = Field(20, ge=1, description="rounds that ε is for; later ones are refused")
    noise_by: str = Field("clients", description="clients, each its share, or server: once, by one that is trusted")
    sampling_rate: float = Field(
        1.0, gt=0, le=1, description="chance that a round draws a given client, if ε is to count on it; 1: no credit"
    )
    clip: float = Field(1.0, gt=0, description="bound on the 2-norm of what a `unit` contributes to the sum")
    momentum: float = Field(0.8, ge=0, lt=1, description="of the server")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.unit not in self.units:
            raise unknown("unit", self.unit, self.units)
        if self.noise_by not in NOISE_BY:
            raise unknown("source of noise", self.noise_by, NOISE_BY)
        if self.noise_by == "server" and self.noise_clients > 1:
            raise ConfigError("the server adds all of the noise, and ε counts on no client's: leave noise_clients out")

    # The server's side.

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {_VELOCITY: torch.zeros_like(weights)}

    def moved(self, state: State, mean: Tensor, lr: float) -> State:
        """Weights and velocity after a step along the mean [d]."""
        velocity = self.momentum * state[_VELOCITY] + mean
        return {
            "weights": check_finite(state["weights"] + lr * velocity, "the model after the step"),
            _VELOCITY: velocity,
        }

    def total(self, task: Task, round: int, replies: list[Message]) -> dict[str, Tensor]:
        """The replies' sum by name, with all of its noise: float64 on the CPU."""
        total = self.add_up(task, replies)
        if self.noise_by == "server":
            noise = self._noise({name: array.numel() for name, array in total.items()}, task.randomness(round))
            total = {name: array + noise[name] if noise else array for name, array in total.items()}
        return total

    def mean(self, task: Task, total: Mapping[str, Tensor], cohort: Sequence[int]) -> Tensor:
        """The mean contribution [d], in units of clip: over the noisy count of records, or the clients asked."""
        count = float(total[SAMPLES]) / COUNT if self.unit == "record" else float(len(cohort))
        if count < 1:
            raise TooFew("the noise is larger than the number of samples: there is nothing to learn from")
        return (total[self.vector] / (GRAINS * count)).to(task.like)

    def spent(self, round: int) -> dict[str, float | str]:
        """What a record of the run says of privacy after this round."""
        if (budget := self._budget()) is None:
            return {}
        told: dict[str, float | str] = {"epsilon": budget.spent(round), "delta": self.delta, "unit": self.unit}
        return told if self.sampling_rate == 1 else told | {"epsilon_always_drawn": budget.spent(round, 1.0)}

    def check_round(self, round: int) -> None:
        if round > self.budget_rounds:
            raise ConfigError(f"round {round}: ε was for {self.budget_rounds} rounds (budget_rounds), and is spent")

    def check_cohort(self, task: Task, cohort: Sequence[int]) -> None:
        if len(cohort) > self.sampling_rate * task.total_clients * (1 + 1e-9) and self.sampling_rate < 1:
            each = f"{len(cohort)} of {task.total_clients} clients"
            raise ConfigError(f"a round draws {each}, more than sampling_rate {self.sampling_rate:.3g} says")

    # The clients' side.

    def reply(
        self, client: ClientRound, round: int, question: bytes, vector: Tensor, moments: Mapping[str, Tensor]
    ) -> Message:
        """Integers with noise of its own for every question: of a vector [d] that the `unit` changes by at most 1, the
        number of samples, where a record is protected, and moments, of which the same holds for each.
        """
        values = {self.vector: vector} | {MOMENTS + name: array for name, array in moments.items()}
        randomness = client.randomness.for_question(question)
        integers = to_integers([(value, self.limit(name)) for name, value in values.items()], randomness)
        whole = dict(zip(values, integers, strict=True))
        if self.unit == "record":
            whole[SAMPLES] = torch.tensor([COUNT * len(client)])
        if self.noise_by == "clients":
            noise = self._noise({name: array.numel() for name, array in whole.items()}, randomness)
            whole = {name: array + noise[name] if noise else array for name, array in whole.items()}
        return Message("update", round, {name: array.int() for name, array in whole.items()})

    def _noise(self, sizes: Mapping[str, int], randomness: Randomness) -> dict[str, Tensor]:
        """Of so many numbers by name; none without ε. Moments have a width of their own."""
        if self.epsilon is None:
            return {}
        wide = self.widths(sizes)
        drawn: dict[str, Tensor] = {}
        for moments in (False, True):
            names = [name for name in sorted(sizes) if name.startswith(MOMENTS) == moments]
            if names:
                purpose: Purpose = "moments" if moments else "noise"
                count = sum(sizes[name] for name in names)
                own = torch.from_numpy(discrete_gaussians(wide[names[0]], count, randomness, purpose))
                drawn |= dict(zip(names, torch.split(own, [sizes[name] for name in names]), strict=True))
        return drawn

    # How wide the noise is, and what it is worth.

    @property
    def once(self) -> float:
        """The part of the budget that goes to moments, which the first round releases."""
        return 0.0

    def _budget(self) -> SumBudget | None:
        if self.epsilon is None:
            return None
        return SumBudget(
            self.epsilon, self.delta, self.budget_rounds, self.once, self.noise_clients, self.sampling_rate
        )

    def widths(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """σ of the noise that each client (or the server) adds to arrays of so many numbers, in integers."""
        if (budget := self._budget()) is None:
            return dict.fromkeys(sizes, 0.0)
        moments = [size for name, size in sizes.items() if name.startswith(MOMENTS)]
        usual = budget.width(vector_change(sizes[self.vector], self.unit == "record"))
        once = budget.width_once(moment_change(moments)) if moments else 0.0
        return {name: once if name.startswith(MOMENTS) else usual for name in sizes}

    def releases(self, rounds: int) -> list[Release]:
        return [] if (budget := self._budget()) is None else budget.releases(rounds)

    @property
    @abstractmethod
    def step(self) -> tuple[str, float]:
        """The option that sets how far a mean of norm 1 moves the weights, and how far that is."""

    def noise_advice(self, weights: Tensor, samples: float, cohort: int, rounds: int) -> list[str]:
        """Where noise alone moves the weights `DROWNED` times as far as all clipped contributions can, or else by more
        than their own norm: η k √Σ a² against η Σ a and ‖w‖, with k the norm of a round's noise over its mean's bound.
        """
        if self.epsilon is None:
            return []
        size, count = weights.numel(), samples if self.unit == "record" else cohort
        width = self.widths({self.vector: size})[self.vector]
        k = width * math.sqrt(size * (cohort if self.noise_by == "clients" else 1)) / (GRAINS * count)
        most, walk = momentum_sums(self.momentum, rounds)
        option, step = self.step
        norm, what = float(weights.norm()), f"{count:,.0f} {self.unit}s in each of {rounds} rounds"
        if k * walk > DROWNED * most:
            return [
                f"the noise is {k * walk / most:.2g} times all that {what} can add up to, and the model will hardly "
                f"learn at any step size: it takes more {self.unit}s, a larger epsilon or a smaller network"
            ]
        if (drift := step * k * walk) > norm:
            return [
                f"with {what} the noise alone moves the weights by {drift / norm:.2g} times their norm, and a good "
                f"model may be lost again: take fewer rounds, more {self.unit}s or a smaller step ({option} = "
                f"{getattr(self, option) * norm / drift:.2g} keeps it at their norm)"
            ]
        return []

    def promise(self, cohort: int, rounds: int) -> list[str]:
        if rounds > self.budget_rounds:
            raise ConfigError(f"ε is for {self.budget_rounds} rounds (budget_rounds), and the run has {rounds}")
        self.check_honest(cohort)
        if self.epsilon is None:
            return ["without epsilon nothing is private: contributions are clipped, and no noise is added"]
        honest = self.conditions(cohort)
        if self.noise_by == "server":
            honest = "if the server, which adds the noise, is trusted"
        drawn = "" if self.sampling_rate == 1 else ", and cohorts are drawn at random"
        seen = "the sums or the models" if self._hides_replies else "the models; the server sees replies"
        size = f"ε = {self.epsilon:g}, δ = {self.delta:g}"
        return [
            f"private: {size} for a {self.unit} over {self.budget_rounds} rounds, against whoever sees {seen}",
            f"{honest}{drawn}; simulated: the noise is the seed's",
        ]

    @property
    def _hides_replies(self) -> bool:
        """Whether the server sees nothing without noise."""
        return self.secure_sum and self.noise_by == "clients"

    @property
    def most_samples(self) -> int | None:
        return super().most_samples if self.unit == "record" else None

    def guarantees(self, run: Participation) -> list[Guarantee]:
        """With credit for sampling, where ε counts on it, and without."""
        if self.epsilon is None:
            return []
        seen = "the aggregator" if self._hides_replies else "those who see the models"
        return [
            guarantee(
                self.releases(run.rounds),
                self.delta,
                clients=self.noise_clients,
                against=f"{seen}, {run.rounds} rounds",
                secure=self.secure_sum,
                simulated=run.simulated,
                unit=self.unit,
                noise_by=self.noise_by,
                rate=rate,
            )
            for rate in sorted({self.sampling_rate, 1.0})
        ]

    # What is sent.

    def read(self, task: Task, reply: Message) -> dict[str, Tensor]:
        reply.of_kind("update")
        sizes = {self.vector: task.like.numel()} | ({SAMPLES: 1} if self.unit == "record" else {})
        if not sizes.keys() <= reply.arrays.keys():
            raise MessageError(f"an update needs {' and '.join(sizes)}")
        arrays = {}
        for name in reply.arrays:
            if name not in sizes and not (name.startswith(MOMENTS) and self.once):
                raise MessageError(f"{name!r} is no part of an update")
            array = reply.take(name, (sizes.get(name),)).double().cpu()
            if name.startswith(MOMENTS):
                layer, size = Layer.parse(name.removeprefix(MOMENTS)), Factor(array.unsqueeze(0)).size
                inputs = size - (layer.bias is not None)
                if inputs < 1 or layer.weight[1] > task.like.numel() or (layer.weight[1] - layer.weight[0]) % inputs:
                    raise MessageError(f"{name!r} has no size that this network's inputs have")
            arrays[name] = array
        return arrays

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """Integers as they are, with room for noise where clients add it."""
        if self.noise_by == "clients":
            return super().summand(task, message, reply)
        arrays = self.read(task, reply)
        return {name: Addend(array, self.limit(name), name != self.vector) for name, array in arrays.items()}

    def limit(self, name: str) -> float:
        if self.unit == "client":
            return float(GRAINS)
        per_sample = {self.vector: GRAINS * self.sum_limit, SAMPLES: COUNT}.get(name, GRAINS)
        return min(float(per_sample * self.sum_samples), LARGEST)
