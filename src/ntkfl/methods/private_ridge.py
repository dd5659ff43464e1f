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

from ntkfl.errors import ConfigError, MessageError, ModelError, TooFew
from ntkfl.methods.additive import Addend, Summand
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.inspection import Participation
from ntkfl.methods.last_layer import last_layer
from ntkfl.methods.whitening import scaled_triangle, unscaled
from ntkfl.privacy.accounting import Guarantee
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.sum_accounting import budget, concentrated, guarantee
from ntkfl.tangent.parameters import evaluating
from ntkfl.wire import Message

GRAINS = 2**16  # integers per clip: rounding must not count beside the millions of numbers of G
ROUNDING = 1e-6  # by which norms computed in float64 may be off, generously
_GRAM, _CROSS = "gram", "cross"
_ROWS = 4096  # samples whose features are held at once
_LEAST_WIDTH, _TAILS = 8.0, 10.0  # of a client's noise, and how many of its deviations fit below a sum's limit
_SMALL = 1e-6  # of G's mean eigenvalue, added to all: sums without noise may be singular


class PrivateRidge(Method):
    """W = U (ξ + λ)⁻¹ Uᵀ (C + noise) from G + noise = U e Uᵀ."""

    name: ClassVar[str] = "private-ridge"
    paper: ClassVar[str] = "after He et al. 2025, with distributed noise (Kairouz et al. 2021)"
    shows: ClassVar[str] = "sums"
    additive: ClassVar[bool] = True
    noises: ClassVar[bool] = True

    epsilon: float | None = Field(3.0, gt=0, description="ε of a record, for one round; none: no noise, no privacy")
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    noise_clients: int = Field(1, ge=1, description="clients whose noise ε counts on; a round of fewer fails")
    clip: float | None = Field(
        None, gt=0, description="bound on the 2-norm of a sample's features with the bias's 1; none: √(features + 1)"
    )
    gram_share: float = Field(0.5, gt=0, lt=1, description="part of the budget for G; the rest is for C")
    penalty: float = Field(0.3, ge=0, description="λ, in units of the largest eigenvalue of G's noise")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.noise:
            raise ConfigError("the noise of private-ridge follows from epsilon: leave noise out")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        self._check_round(round)
        replies = yield Message("weights", round, {"weights": state["weights"]})
        if not self.secure_sum and len(replies) < self.noise_clients:
            raise TooFew(f"the noise of {len(replies)} clients, where ε counts on that of {self.noise_clients}")
        total: dict[str, Tensor] = {}
        while replies:
            one = self.read(task, replies.pop(0))
            total = {name: array + total[name] if total else array for name, array in one.items()}
        if not total:
            raise TooFew("no client's sums came")
        layer = last_layer(task.model, task.outputs)
        p = layer.module.in_features + 1
        noise = 0.0 if self.epsilon is None else math.sqrt(self.noise_clients) * self._sigmas(p, task.outputs)[_GRAM]
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
        uniforms = randomness.uniforms("rounding", sum(map(Tensor.numel, values.values())))
        arrays = {}
        for name, value in values.items():
            few_uniforms, uniforms = uniforms[: value.numel()], uniforms[value.numel() :]
            bounded = (GRAINS * value.cpu()).clamp(-self._limit, self._limit)
            arrays[name] = (bounded + torch.from_numpy(few_uniforms)).floor().long()
        if self.epsilon is not None:
            sigmas = self._sigmas(p, targets.shape[1])
            for name, purpose in ((_GRAM, "moments"), (_CROSS, "noise")):
                own = discrete_gaussians(sigmas[name], arrays[name].numel(), randomness, purpose)  # type: ignore[arg-type]
                arrays[name] += torch.from_numpy(own)
        return Message("update", round, {name: array.int() for name, array in arrays.items()})

    def _clip(self, p: int) -> float:
        return math.sqrt(p) if self.clip is None else self.clip

    # How wide the noise is, and what it is worth.

    def _sigmas(self, p: int, outputs: int) -> dict[str, float]:
        """Of a client's noise, in integers."""
        assert self.epsilon is not None
        rho = budget(self.epsilon, self.delta)
        parts = {_GRAM: (p * (p + 1) // 2, self.gram_share), _CROSS: (p * outputs, 1 - self.gram_share)}
        found = {
            name: change(numbers) / math.sqrt(2 * share * rho * self.noise_clients)
            for name, (numbers, share) in parts.items()
        }
        if min(found.values()) < _LEAST_WIDTH:  # sums of narrower discrete Gaussians are not nearly one
            raise ConfigError("so little noise is no privacy: take a smaller epsilon, or none for training without")
        return found

    def promise(self, cohort: int, rounds: int) -> list[str]:
        if cohort < self.noise_clients:
            raise ConfigError(
                f"ε counts on {self.noise_clients} clients per round (noise_clients), and there are {cohort}"
            )
        if self.epsilon is None:
            return ["without epsilon nothing is private: features are clipped, and no noise is added"]
        if rounds > 1:
            raise ConfigError(f"{self.name} spends ε in one round, and the run has {rounds}")
        against = "the aggregator" if self.secure_sum else "those who see the model; the server sees replies"
        return [
            f"private: ε = {self.epsilon:g}, δ = {self.delta:g} for a record, against {against}",
            f"if at least {self.noise_clients} of {cohort} clients are honest; simulated: the noise is the seed's",
        ]

    def guarantees(self, run: Participation) -> list[Guarantee]:
        if self.epsilon is None:
            return []
        seen = "the aggregator" if self.secure_sum else "those who see the models"
        # How many numbers there are decides the change and the width alike, not ρ.
        widths = self._sigmas(1, 1)
        releases = [(concentrated(change(1), width, self.noise_clients, 1), 1) for width in widths.values()]
        return [
            guarantee(
                releases,
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
        """A client's integers, or the total of many, checked: float64 on the CPU."""
        p = last_layer(task.model, task.outputs).module.in_features + 1
        sizes = {_GRAM: p * (p + 1) // 2, _CROSS: p * task.outputs}
        if reply.of_kind("update").arrays.keys() != sizes.keys():
            raise MessageError("an update is G and C, and nothing else")
        return {name: reply.take(name, (size,)).double().cpu() for name, size in sizes.items()}

    def check(self, task: Task, reply: Message) -> Tensor | None:
        self.read(task, reply)
        return None

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """Integers as they are. What happens to them from here on is post-processing of noisy numbers."""
        arrays, p = self.read(task, reply), last_layer(task.model, task.outputs).module.in_features + 1
        wide = dict.fromkeys(arrays, 0.0) if self.epsilon is None else self._sigmas(p, task.outputs)
        return {name: Addend(array, self._limit + _TAILS * wide[name]) for name, array in arrays.items()}

    @property
    def _limit(self) -> float:
        """Of a client's number: one sample's is at most 1, √2 beside the diagonal of G."""
        return min(math.sqrt(2) * GRAINS * self.sum_samples, 2.0**30)  # and noise fits into 32 bits besides

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        if clients < self.noise_clients:
            raise TooFew(f"a sum of {clients} clients, where ε counts on the noise of {self.noise_clients}")
        return Message("update", message.round, dict(total))


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
