"""Ridge regression of the last layer from sums with differential privacy, in one round.

With a = (φ, 1) for features φ [F] and targets t [d2] of norm at most 1, every sample scaled down to ‖a‖ ≤ clip, the
clients' sums G = Σ a aᵀ / clip² and C = Σ a tᵀ / clip change by at most 1 each with a record. They travel as integers
with discrete Gaussian noise, as in `private_sums.py`: each client's is its share of what `noise_clients` add up to.

Noise of standard deviation σ on G is a random symmetric matrix whose eigenvalues fill [−2s, 2s], s = σ √(p/2): far more
than most of G's own. So the eigenvectors u of noisy G are kept, and its eigenvalues e are replaced by what uᵀ G u is on
average (Bun, Bouchaud, Potters, Cleaning large correlation matrices, 2017), which the noisy eigenvalues alone tell:

    ξ_i = e_i − 2 s² Re g(e_i − iη),     g(z) = 1/p Σ_j 1/(z − e_j),     η = 2s/√p

and W = U (ξ + λ)⁻¹ Uᵀ C with λ in units of 2s. Features that all have one norm lose nothing to clipping: end the
backbone with `nn.LayerNorm(F, elementwise_affine=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError, ModelError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.inspection import Participation
from ntkfl.methods.last_layer import last_layer
from ntkfl.methods.noise_shares import LARGEST, NoiseShares
from ntkfl.methods.whitening import scaled_triangle, unscaled
from ntkfl.privacy.accounting import Guarantee
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.sum_accounting import Release, concentrated, guarantee
from ntkfl.privacy.sum_noise import SumBudget, to_integers
from ntkfl.tangent.parameters import evaluating
from ntkfl.wire import Message

GRAINS = 2**16  # integers per clip: rounding must not count beside the millions of numbers of G
ROUNDING = 1e-6  # by which norms computed in float64 may be off, generously
_GRAM, _CROSS = "gram", "cross"
_ROWS = 4096  # samples whose features are held at once
_SMALL = 1e-6  # of G's mean eigenvalue, added to all: sums without noise may be singular


class PrivateRidge(NoiseShares):
    """W = U (ξ + λ)⁻¹ Uᵀ (C + noise) from G + noise = U e Uᵀ."""

    name: ClassVar[str] = "private-ridge"
    paper: ClassVar[str] = "after He et al. 2025, with distributed noise (Kairouz et al. 2021)"
    budget_rounds: ClassVar[int] = 1

    epsilon: float | None = Field(3.0, gt=0, description="ε of a record, for one round; none: no noise, no privacy")
    clip: float | None = Field(
        None, gt=0, description="bound on the 2-norm of a sample's features with the bias's 1; none: √(features + 1)"
    )
    gram_share: float = Field(0.5, gt=0, lt=1, description="part of the budget for G; the rest is for C")
    penalty: float = Field(0.3, ge=0, description="λ, in units of the largest eigenvalue of G's noise")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        self._check_round(round)
        replies = yield Message("weights", round, {"weights": state["weights"]})
        total = self.add_up(task, replies)
        layer = last_layer(task.model, task.outputs)
        p = layer.module.in_features + 1
        noise = math.sqrt(self.noise_clients) * self.widths(_sizes(p, task.outputs))[_GRAM]
        solved = self.solve(total[_GRAM] / GRAINS, total[_CROSS].view(p, -1) / GRAINS, noise / GRAINS)
        solved = solved / self._clip(p)
        new = check_finite(layer.write(state["weights"], solved), "the solution")
        spent: dict[str, float | str] = (
            {} if self.epsilon is None else {"epsilon": self.epsilon, "delta": self.delta, "unit": "record"}
        )
        return Outcome({"weights": new}, None, None, spent)

    def solve(self, scaled: Tensor, cross: Tensor, noise: float) -> Tensor:
        """The weights [p, d2] from a scaled triangle of G with noise of this deviation, and C [p, d2], in float64."""
        values, vectors = torch.linalg.eigh(unscaled(scaled))
        edge = 2 * noise * math.sqrt(len(cross) / 2)
        clean = cleaned(values, edge)
        floor = self.penalty * edge + _SMALL * clean.mean()
        solved: Tensor = vectors @ ((vectors.mT @ cross) / (clean + floor).unsqueeze(1))
        return solved

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        self._check_round(message.of_kind("weights").round)
        model = task.at(message.take("weights", tuple(task.like.shape), task.like))
        question = message.encode()
        return [self._reply(task, model, message.round, question, client) for client in clients]

    def _reply(self, task: Task, model: nn.Module, round: int, question: bytes, client: ClientRound) -> Message:
        randomness = client.randomness.for_question(question)
        p = last_layer(model, task.outputs).module.in_features + 1
        targets = task.training_targets(client.y).double()
        gram, cross = targets.new_zeros(p, p), targets.new_zeros(p, targets.shape[1])
        for few, features in _last_inputs(model, task.outputs, client.x):
            a = torch.cat([features.double(), targets.new_ones(len(features), 1)], dim=1)
            a, t = _at_most(a / self._clip(p)), _at_most(targets[few])
            gram += a.mT @ a
            cross += a.mT @ t
        values = {_GRAM: scaled_triangle(gram), _CROSS: cross.reshape(-1)}
        integers = to_integers([(value, self.limit(name)) for name, value in values.items()], randomness, GRAINS)
        arrays = dict(zip(values, integers, strict=True))
        if self.epsilon is not None:
            sigmas = self.widths(_sizes(p, targets.shape[1]))
            for name, purpose in ((_GRAM, "moments"), (_CROSS, "noise")):
                own = discrete_gaussians(sigmas[name], arrays[name].numel(), randomness, purpose)  # type: ignore[arg-type]
                arrays[name] += torch.from_numpy(own)
        return Message("update", round, {name: array.int() for name, array in arrays.items()})

    def _clip(self, p: int) -> float:
        return math.sqrt(p) if self.clip is None else self.clip

    # How wide the noise is, and what it is worth.

    def widths(self, sizes: Mapping[str, int]) -> dict[str, float]:
        if self.epsilon is None:
            return dict.fromkeys(sizes, 0.0)
        budget = SumBudget(self.epsilon, self.delta, 1, once=self.gram_share, clients=self.noise_clients)
        return {_GRAM: budget.width_once(change(sizes[_GRAM])), _CROSS: budget.width(change(sizes[_CROSS]))}

    def releases(self, rounds: int) -> list[Release]:
        if self.epsilon is None:
            return []
        # How many numbers there are decides the change and the width alike, not ρ.
        widths = self.widths({_GRAM: 1, _CROSS: 1}).values()
        return [(concentrated(change(1), width, self.noise_clients, 1), rounds) for width in widths]

    def promise(self, cohort: int, rounds: int) -> list[str]:
        self.check_honest(cohort)
        if self.epsilon is None:
            return ["without epsilon nothing is private: features are clipped, and no noise is added"]
        if rounds > 1:
            raise ConfigError(f"{self.name} spends ε in one round, and the run has {rounds}")
        seen = "the sums or the model" if self.secure_sum else "the model; the server sees replies"
        return [
            f"private: ε = {self.epsilon:g}, δ = {self.delta:g} for a record, against whoever sees {seen}",
            f"{self.conditions(cohort)}; simulated: the noise is the seed's",
        ]

    def guarantees(self, run: Participation) -> list[Guarantee]:
        if self.epsilon is None:
            return []
        seen = "the aggregator" if self.secure_sum else "those who see the models"
        return [
            guarantee(
                self.releases(1),
                self.delta,
                clients=self.noise_clients,
                against=f"{seen}, one round",
                secure=self.secure_sum,
                simulated=run.simulated,
            )
        ]

    def _check_round(self, round: int) -> None:
        if round > 1 and self.epsilon is not None:
            raise ConfigError(f"round {round}: ε was for one round, and is spent")

    # What is sent.

    def read(self, task: Task, reply: Message) -> dict[str, Tensor]:
        sizes = _sizes(last_layer(task.model, task.outputs).module.in_features + 1, task.outputs)
        if reply.of_kind("update").arrays.keys() != sizes.keys():
            raise MessageError("an update is G and C, and nothing else")
        return {name: reply.take(name, (size,)).double().cpu() for name, size in sizes.items()}

    def limit(self, name: str) -> float:
        """One sample's number is at most 1, √2 beside the diagonal of G."""
        return min(math.sqrt(2) * GRAINS * self.sum_samples, LARGEST)


def _sizes(p: int, outputs: int) -> dict[str, int]:
    """Numbers of G's triangle and of C."""
    return {_GRAM: p * (p + 1) // 2, _CROSS: p * outputs}


def change(numbers: int) -> float:
    """Δ: by how much a sample changes a client's rounded sum of so many numbers, in integers.

    Two real vectors a distance apart, rounded by the same draws, are at most √numbers further apart.
    """
    return GRAINS * (1 + ROUNDING) + math.sqrt(numbers)


def cleaned(values: Tensor, edge: float) -> Tensor:
    """ξ [p]: what the matrix without noise has, on average, along the eigenvectors of the noisy one with these
    `values` [p], where the eigenvalues of the noise fill [−edge, edge]; not below 0.
    """
    if edge == 0:
        return values.clamp(min=0)
    apart = values.unsqueeze(1) - values.unsqueeze(0)
    eta = edge / math.sqrt(len(values))
    return (values - edge**2 / 2 * (apart / (apart.square() + eta**2)).mean(1)).clamp(min=0)


def _last_inputs(model: nn.Module, outputs: int, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """What the last layer gets of some rows of x at a time: (which, [n, F])."""
    layer, seen = last_layer(model, outputs), list[tuple[Tensor, Tensor]]()
    hook = layer.module.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    try:
        with evaluating(model), torch.no_grad():
            for at in range(0, len(x), _ROWS):
                out = model(x[at : at + _ROWS])
                # A sample that is not finite must not show by an error.
                same = len(seen) == 1 and torch.allclose(seen[0][1], out, rtol=0, atol=0, equal_nan=True)
                if not same or seen[0][0].ndim != 2:
                    raise ModelError(f"{PrivateRidge.name} needs a network whose outputs are its last linear layer's")
                yield slice(at, at + _ROWS), seen.pop()[0]
    finally:
        hook.remove()


def _at_most(rows: Tensor) -> Tensor:
    """Rows [n, m] scaled down to norm 1; those that are not finite become zero."""
    norms = rows.norm(dim=1, keepdim=True)
    return torch.where(norms.isfinite(), rows / norms.clamp(min=1), torch.zeros_like(rows))
