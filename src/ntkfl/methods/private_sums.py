"""Differentially private training from sums: clipped gradients with discrete Gaussian noise, in whitened inputs.

Clients send the sum of their samples' gradients, each clipped to norm `clip` (`tangent/clipping.py`), as integers with
noise. In the first round they also send the second moments A of their inputs, each input at one norm, under a share of
the budget; from then on the first layer's inputs are whitened by P = (A/mean + damping)^(-1/2), so that the noise meets
directions of equal size. The server steps by the noisy mean with momentum, v ← m v + g, w ← w − lr v.

Each client's noise is its share of what `noise_clients` of them add up to, whether replies are summed under masks or
not: with `secure_sum` nobody sees less noise than the total's; without, the server is trusted with replies, and the
models are as private. Sums, counts and moments are all that leaves a client: no loss, no statistics.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.additive import Addend, Summand
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.inspection import Participation
from ntkfl.privacy.accounting import Guarantee
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import budget, concentrated, epsilon_of, guarantee
from ntkfl.tangent.clipping import clipped_gradient, input_moments, whitened
from ntkfl.tangent.sums import Factor, Layer
from ntkfl.wire import Message

GRAINS = 2**14  # integers per clip: what a norm of 1 becomes
COUNT = GRAINS // 10  # what one sample adds to the count, beside its gradient
ROUNDING = 1e-3  # by which norms computed in float32 may be off
_LEAST_WIDTH = 8.0
_TAILS = 10.0  # standard deviations of a client's noise that fit below a sum's limit
_GRADIENT, _SAMPLES, _MOMENTS, _WHITENING, _ASKS = "gradient", "samples", "moments/", "whitening/", "asks"
_VELOCITY = "velocity"


class PrivateSums(Method):
    """w ← w − lr v,  v ← m v + P (Σ_i clip(g_i P) + noise) / (n + noise)."""

    name: ClassVar[str] = "private-sums"
    paper: ClassVar[str] = "after Abadi et al. 2016 and Kairouz et al. 2021"
    shows: ClassVar[str] = "sums"
    additive: ClassVar[bool] = True
    noises: ClassVar[bool] = True

    epsilon: float | None = Field(3.0, gt=0, description="ε of a record over all rounds; none: no noise, no privacy")
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    budget_rounds: int = Field(20, ge=1, description="rounds that ε is for; later ones are refused")
    noise_clients: int = Field(
        1, ge=1, description="clients of each round whose noise ε counts on; rounds of fewer fail"
    )
    clip: float | None = Field(5.0, gt=0, description="bound on the 2-norm of a sample's gradient")
    input_share: float = Field(0.1, ge=0, lt=1, description="part of the budget for moments of inputs; 0: no whitening")
    damping: float = Field(0.05, gt=0, description="added to moments of mean eigenvalue 1 before whitening")
    lr: float = Field(4.0, gt=0, description="step along the mean gradient, in units of clip")
    momentum: float = Field(0.8, ge=0, lt=1, description="of the server")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; 0 with mse")
    sum_limit: float = Field(
        0.1, gt=0, description="largest number of a client's gradient per sample, in units of clip"
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"label_smoothing": 0.0, **values} if values.get("loss", "ce") != "ce" else values

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.noise:
            raise ConfigError("the noise of private-sums follows from epsilon: leave noise out")
        if self.clip is None:
            raise ConfigError("private-sums clips every sample's gradient: give clip, for example 5")

    # The server's side.

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {_VELOCITY: torch.zeros_like(weights)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        self._check_round(round)
        asks = bool(self.input_share) and round == 1
        known = {name: array for name, array in state.items() if name.startswith(_WHITENING)}
        asked = {_ASKS: torch.tensor(1, dtype=torch.uint8)} if asks else {}
        replies = yield Message("weights", round, {"weights": state["weights"]} | known | asked)
        total = self._add_up(task, replies)
        if asks:
            known = {_WHITENING + name: triangle(P) for name, P in self._whitening(total, task.like).items()}
        count = float(total[_SAMPLES]) / COUNT
        if count < 1:
            raise TooFew("the noise is larger than the number of samples: there is nothing to learn from")
        mean = (total[_GRADIENT] / (GRAINS * count)).to(task.like)
        velocity = self.momentum * state[_VELOCITY] + whitened(mean, _read_whitening(known, task.like))
        weights = check_finite(state["weights"] - self.lr * velocity, "the model after the step")
        spent: dict[str, float | str] = (
            {} if self.epsilon is None else {"epsilon": self._spent(round), "delta": self.delta, "unit": "record"}
        )
        return Outcome({"weights": weights, _VELOCITY: velocity} | known, None, None, spent)

    def _add_up(self, task: Task, replies: list[Message]) -> dict[str, Tensor]:
        if not self.secure_sum and len(replies) < self.noise_clients:
            raise TooFew(f"the noise of {len(replies)} clients, where ε counts on that of {self.noise_clients}")
        total: dict[str, Tensor] = {}
        while replies:
            one = self.read(task, replies.pop(0))
            if total and one.keys() != total.keys():
                raise MessageError("sums of different parts do not add up")
            total = {name: array + total[name] if total else array for name, array in one.items()}
        if not total:
            raise TooFew("no client's sums came")
        return total

    def _whitening(self, total: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """P of each layer whose moments came, by its name."""
        found = {}
        for name, triangle_ in total.items():
            if name.startswith(_MOMENTS):
                A = Factor(_unscaled(triangle_).unsqueeze(0), False).square()[0]
                values, vectors = torch.linalg.eigh(A)
                values = values.clamp_min(0)
                values = values / values.mean().clamp_min(1e-30) + self.damping
                found[name.removeprefix(_MOMENTS)] = ((vectors * values.rsqrt()) @ vectors.T).to(like)
        return found

    # The clients' side.

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        self._check_round(message.of_kind("weights").round)
        w = message.take("weights", task.like.shape, task.like)
        sent = {name: message.take(name, (None,), task.like) for name in message.arrays if name.startswith(_WHITENING)}
        whitening, asks = _read_whitening(sent, task.like), _ASKS in message.arrays
        for P in whitening.values():
            self._check_whitening(P)
        if asks and message.round != 1:
            raise MessageError("moments of inputs are given in the first round, once")
        question = message.encode()
        return [self._reply(task, message.round, w, whitening, asks, question, client) for client in clients]

    def _check_whitening(self, P: Tensor) -> None:
        """`MessageError` unless P [m, m] can be (A/mean λ + damping)^(−1/2) of some A ≥ 0: of one that is far worse
        conditioned, rounding would give one sample more than its clip.
        """
        values = torch.linalg.eigvalsh(P.double())
        least, most = (len(P) + self.damping) ** -0.5, self.damping**-0.5
        if not 0.99 * least <= float(values[0]) <= float(values[-1]) <= 1.01 * most:
            raise MessageError(f"whitening has eigenvalues outside {least:.3g} … {most:.3g}, as no moments give")

    def _reply(
        self,
        task: Task,
        round: int,
        w: Tensor,
        whitening: dict[Layer, Tensor],
        asks: bool,
        question: bytes,
        client: ClientRound,
    ) -> Message:
        assert self.clip is not None
        model, Y, plan = task.at(w), task.training_targets(client.y), task.plan(client.x)
        gradient = clipped_gradient(model, client.x, Y, self.loss, plan, self.clip, whitening) / self.clip
        randomness = client.randomness.for_question(question)
        moments = input_moments(model, client.x, plan) if asks else {}
        values = {_GRADIENT: gradient} | {_MOMENTS + layer.name: _scaled(A) for layer, A in moments.items()}
        limits = {name: self._limit(name) for name in values}
        uniforms = randomness.uniforms("rounding", sum(map(Tensor.numel, values.values())))
        whole: dict[str, Tensor] = {_SAMPLES: torch.tensor([COUNT * len(client)])}
        for name, value in values.items():
            few, uniforms = uniforms[: value.numel()], uniforms[value.numel() :]
            scaled = (GRAINS * value.double().cpu()).clamp(-limits[name], limits[name])
            whole[name] = (scaled + torch.from_numpy(few)).floor().long()
        numbers = sum(map(Tensor.numel, whole.values()))
        noise = iter(np.split(self._noise(whole, numbers, randomness), np.cumsum([a.numel() for a in whole.values()])))
        arrays = {name: (array + torch.from_numpy(next(noise))).int() for name, array in whole.items()}
        return Message("update", round, arrays)

    def _noise(self, whole: Mapping[str, Tensor], numbers: int, randomness: Randomness) -> np.ndarray[Any, Any]:
        """A client's share for each number, in the order of `whole`; moments have their own width."""
        if self.epsilon is None:
            return np.zeros(numbers, dtype=np.int64)
        first = sum(array.numel() for name, array in whole.items() if not name.startswith(_MOMENTS))
        each = whole[_GRADIENT].numel()
        own = discrete_gaussians(self.sigma(each), first, randomness)
        if first == numbers:
            return own
        width = self.moment_sigma([len(array) for name, array in whole.items() if name.startswith(_MOMENTS)])
        wide = discrete_gaussians(width, numbers - first, randomness, "moments")
        return np.concatenate([own, wide])

    # How wide the noise is, and what it is worth.

    def sigma(self, numbers: int) -> float:
        """Of a client's noise on a gradient of so many numbers and the count, in integers."""
        return self._width(gradient_change(numbers), (1 - self.input_share) / self.budget_rounds)

    def moment_sigma(self, sizes: Sequence[int]) -> float:
        """Of a client's noise on all moments of inputs, so many numbers of each layer."""
        return self._width(moment_change(sizes), self.input_share)

    def _width(self, change: float, share: float) -> float:
        width = change / math.sqrt(2 * self._rho(share) * self.noise_clients)
        if width < _LEAST_WIDTH:  # sums of narrower discrete Gaussians are not nearly one
            raise ConfigError("so little noise is no privacy: take a smaller epsilon, or none for training without")
        return width

    def _rho(self, share: float) -> float:
        assert self.epsilon is not None
        return share * budget(self.epsilon, self.delta)

    def _spent(self, rounds: int) -> float:
        return epsilon_of(sum(rho * times for rho, times in self._releases(rounds)), self.delta)

    def _releases(self, rounds: int) -> list[tuple[float, int]]:
        """(ρ, how often) of what so many rounds release. How many numbers there are decides Δ and σ alike, not ρ."""
        found = [(concentrated(gradient_change(1), self.sigma(1), self.noise_clients, 1), rounds)]
        if self.input_share:
            found.append((concentrated(moment_change([1]), self.moment_sigma([1]), self.noise_clients, 1), 1))
        return found

    def promise(self, cohort: int, rounds: int) -> list[str]:
        if rounds > self.budget_rounds:
            raise ConfigError(f"ε is for {self.budget_rounds} rounds (budget_rounds), and the run has {rounds}")
        if cohort < self.noise_clients:
            raise ConfigError(
                f"ε counts on {self.noise_clients} clients per round (noise_clients), and there are {cohort}"
            )
        if self.epsilon is None:
            return ["without epsilon nothing is private: gradients are clipped, and no noise is added"]
        against = "the aggregator" if self.secure_sum else "those who see the models; the server sees replies"
        size = f"ε = {self.epsilon:g}, δ = {self.delta:g}"
        return [
            f"private: {size} for a record over {self.budget_rounds} rounds, against {against}",
            f"if {self.noise_clients} of {cohort} clients are honest; simulated: the noise follows from the seed",
        ]

    def guarantees(self, run: Participation) -> list[Guarantee]:
        if self.epsilon is None:
            return []
        seen = "the aggregator" if self.secure_sum else "those who see the models"
        releases = self._releases(run.rounds)
        against = f"{seen}, {run.rounds} rounds"
        honest, secure = self.noise_clients, self.secure_sum
        return [
            guarantee(releases, self.delta, clients=honest, against=against, secure=secure, simulated=run.simulated)
        ]

    def _check_round(self, round: int) -> None:
        if round > self.budget_rounds:
            raise ConfigError(f"round {round}: ε was for {self.budget_rounds} rounds (budget_rounds), and is spent")

    # What is sent.

    def read(self, task: Task, reply: Message) -> dict[str, Tensor]:
        """A client's integers, or the total of many, checked: float64 on the CPU."""
        reply.of_kind("update")
        sizes = {_GRADIENT: task.like.numel(), _SAMPLES: 1}
        if not sizes.keys() <= reply.arrays.keys():
            raise MessageError("an update needs a gradient and a count of samples")
        arrays = {}
        for name in reply.arrays:
            if name not in sizes and not name.startswith(_MOMENTS):
                raise MessageError(f"{name!r} is no part of an update")
            array = reply.take(name, (sizes.get(name),)).double().cpu()
            if name.startswith(_MOMENTS):
                layer, size = Layer.parse(name.removeprefix(_MOMENTS)), Factor(array.unsqueeze(0), False).size
                inputs = size - (layer.bias is not None)
                if inputs < 1 or layer.weight[1] > sizes[_GRADIENT] or (layer.weight[1] - layer.weight[0]) % inputs:
                    raise MessageError(f"{name!r} has no size that this network's inputs have")
            arrays[name] = array
        return arrays

    def check(self, task: Task, reply: Message) -> Tensor | None:
        self.read(task, reply)
        return None

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """Integers as they are. What happens to them from here on is post-processing of noisy numbers."""
        arrays = self.read(task, reply)
        moments = [len(array) for name, array in arrays.items() if name.startswith(_MOMENTS)]
        summand = {}
        for name, array in arrays.items():
            wide = 0.0
            if self.epsilon is not None:
                of_moments = name.startswith(_MOMENTS)
                wide = self.moment_sigma(moments) if of_moments else self.sigma(arrays[_GRADIENT].numel())
            summand[name] = Addend(array, self._limit(name) + _TAILS * wide)
        return summand

    def _limit(self, name: str) -> float:
        per_sample = {_GRADIENT: GRAINS * self.sum_limit, _SAMPLES: COUNT}.get(name, GRAINS)
        return min(float(per_sample * self.sum_samples), 2.0**30)  # and noise fits into 32 bits besides

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        if clients < self.noise_clients:
            raise TooFew(f"a sum of {clients} clients, where ε counts on the noise of {self.noise_clients}")
        return Message("update", message.round, dict(total))


def gradient_change(numbers: int) -> float:
    """Δ: by how much a sample changes a client's rounded gradient of so many numbers, and its count, in integers.

    Two real vectors a distance apart, rounded by the same draws, are at most √numbers further apart.
    """
    return math.hypot(GRAINS * (1 + ROUNDING) + math.sqrt(numbers), COUNT)


def moment_change(sizes: Sequence[int]) -> float:
    """Δ of all moments of inputs, so many numbers of each layer: a sample adds a matrix of norm 1 to each."""
    return GRAINS * (1 + ROUNDING) * math.sqrt(len(sizes)) + math.sqrt(sum(sizes))


def triangle(square: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix [m, m] row by row, [m (m + 1) / 2]."""
    rows, columns = torch.triu_indices(*square.shape, device=square.device)
    return square[rows, columns]


def _scaled(A: Tensor) -> Tensor:
    """A triangle of the same 2-norm as the whole matrix: numbers beside the diagonal times √2."""
    return triangle(A) * _beside(len(A), A)


def _unscaled(values: Tensor) -> Tensor:
    return values / _beside(Factor(values.unsqueeze(0), False).size, values)


def _beside(m: int, like: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(m, m, device=like.device)
    return torch.where(rows == columns, 1.0, math.sqrt(2)).to(like)


def _read_whitening(arrays: Mapping[str, Tensor], like: Tensor) -> dict[Layer, Tensor]:
    found = {}
    for name, values in arrays.items():
        layer, factor = Layer.parse(name.removeprefix(_WHITENING)), Factor(values.unsqueeze(0), False)
        inputs = factor.size - (layer.bias is not None)
        span = layer.weight[1] - layer.weight[0]
        if inputs < 1 or layer.transposed or span % inputs or layer.weight[1] > like.numel():
            raise MessageError(f"whitening of {values.numel()} numbers fits no layer at columns {layer.name}")
        if layer.bias is not None and (layer.bias[1] - layer.bias[0] != span // inputs or layer.bias[1] > like.numel()):
            raise MessageError(f"whitening names a bias that the layer at columns {layer.name} has not")
        found[layer] = factor.square()[0].to(like)
    return found
