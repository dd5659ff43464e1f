"""Differentially private training from sums: clipped gradients with discrete Gaussian noise, in whitened inputs,
after Abadi et al. 2016 and Kairouz et al. 2021.

With g_i the gradient of record i, n records in the cohort, and clip(v) = v / max(‖v‖, C) of norm at most 1:

    (1)  G = Σ_i clip(P g_i) + noise           clients, `noisy_sums.py`; clipped per record, `tangent/clipping.py`
    (2)  v ← m v + P G / (n + noise)           server
    (3)  w ← w − lr v

In the first round clients also send the second moments A of their inputs, each input at one norm, under a share of the
budget. From then on the first layer's inputs are whitened by P = (A/mean λ + damping)^(−1/2), so that the noise meets
directions of equal size.

P keeps the strongest eigenvectors U of A; of the other directions only the mean eigenvalue counts. With
s = (λ/mean λ + damping)^(−1/2), and r that of the others,

    P = r (I − U Uᵀ) + U diag(s) Uᵀ = r I − V Vᵀ,   V = U diag(√(r − s)),

so that V [m, rank] and r say all: 0.16 MB for 784 inputs and 50 directions, where P has 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError, TooFew
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import SAMPLES, WEIGHTS
from ntkfl.methods.sums.noisy_sums import LARGEST, MOMENTS, NoisyIntegers, NoisySums, scaled_triangle, unscaled
from ntkfl.methods.task import ClientRound, State, Task, blank_sample, check_finite
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import COUNT, GRAINS
from ntkfl.tangent.clipping import clipped_gradient, input_moments, whitened
from ntkfl.tangent.curvature import LARGEST as LARGEST_INPUTS
from ntkfl.tangent.sums import GRADIENT, Factor, Layer
from ntkfl.wire.message import Message

ASKS, VELOCITY = "asks", "velocity"
WHITENING, REST = "whitening/", "rest/"
_RANK = 50  # directions that are whitened one by one; all others are alike
_GRADIENT_LIMIT = 0.1  # secure sums: the largest number of one record's gradient, in units of clip


class GradientSums(NoisyIntegers):
    """`gradient` [d], `samples` [1], and `moments/<columns>`, scaled triangles, when asked for."""

    vectors = (GRADIENT,)
    first = (MOMENTS,)

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        """d and 1."""
        return {GRADIENT: task.like.numel(), SAMPLES: 1}

    def check(self, task: Task) -> None:
        """Moments are of layers that the network may have."""
        super().check(task)
        for name in self.arrays.keys() - self.numbers(task).keys():
            layer = Layer.parse(name.removeprefix(MOMENTS))
            check_layer(layer, Factor(self.take(name, (None,)).unsqueeze(0)).size, task.like)


class PrivateSums(NoisySums):
    """w ← w − lr v,  v ← m v + P (Σ_i clip(P g_i) + noise) / (n + noise)."""

    name = "private-sums"
    replies = {"weights": GradientSums}

    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; none with mse")
    clip: float = Field(8.0, gt=0, description="C, bound on the 2-norm of a record's gradient")
    lr: float = Field(6.0, gt=0, description="step along the mean gradient, in units of clip")
    momentum: float = Field(0.8, ge=0, lt=1, description="m, of the server")
    input_share: float = Field(0.1, ge=0, lt=1, description="part of the budget for moments of inputs; 0: no whitening")
    damping: float = Field(0.05, gt=0, description="added to moments of mean eigenvalue 1 before whitening")

    def once(self, task: Task | None) -> float:
        """`input_share`, or nothing where no layer can be whitened: then all of the budget goes to the gradients."""
        return self.input_share if task is None or task.example is None or whitened_layers(task) else 0.0

    def asked_once(self, task: Task, question: Message) -> dict[str, int]:
        """Moments, which the first question alone asks for."""
        return whitened_layers(task) if ASKS in question.arrays else {}

    def limit(self, privacy: Privacy, name: str) -> float:
        """Per record at most GRAINS; of the gradient, one of whose numbers is far below its clip, a tenth of that."""
        per_record = {GRADIENT: GRAINS * _GRADIENT_LIMIT, SAMPLES: COUNT}.get(name, GRAINS)
        return min(float(per_record * privacy.sum_samples), LARGEST)

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        """With the velocity v [d], zero."""
        self.check_round(task, 1)
        if self.input_share and not self.once(task):
            task.notes.append(
                f"inputs are not whitened: no layer that sees them as they are has at most {LARGEST_INPUTS:,} of them; "
                "all of the budget goes to the gradients (input_share = 0)"
            )
        return super().start(task, weights) | {VELOCITY: torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """(2) and (3). The first round also fixes the whitening, which all later questions carry."""
        self.check_round(task, round, cohort)
        asks = self.once(task) > 0 and round == 1
        known = {name: array for name, array in state.items() if is_whitening(name)}
        asked = {ASKS: torch.tensor(1, dtype=torch.uint8)} if asks else {}
        replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]} | known | asked)
        total = self.total(task, replies)
        for name, triangle in total.items() if asks else ():
            if name.startswith(MOMENTS):
                V, rest = directions(triangle, self.damping, _RANK)
                known |= whitening_arrays(name.removeprefix(MOMENTS), V.to(task.like), rest.to(task.like))
        if (count := float(total[SAMPLES]) / COUNT) < 1:
            raise TooFew("the noise is larger than the number of samples: there is nothing to learn from")
        mean = (total[GRADIENT] / (GRAINS * count)).to(task.like)  # in units of clip
        velocity = self.momentum * state[VELOCITY] + whitened(mean, read_whitening(known, task.like, self.damping))
        weights = check_finite(state[WEIGHTS] - self.lr * velocity, "the model after the step")
        return Outcome(known | {WEIGHTS: weights, VELOCITY: velocity}, None, None, self.spent(task, round))

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> NoisyIntegers:
        """(1) as integers, with the client's share of noise. A client checks all that its promise rests on: the round,
        the whitening; and it gives moments in the first round alone.
        """
        self.check_round(task, question.of_kind("weights").round)
        asks = ASKS in question.arrays
        if asks and question.round != 1:
            raise MessageError("moments of inputs are given in the first round, once")
        w = question.vector(WEIGHTS, task.like)
        sent = {name: question.take(name, None, task.like) for name in question.arrays if is_whitening(name)}
        whitening = read_whitening(sent, task.like, self.damping)

        plan = task.plan(_invented(client.x))  # before the weights: what they and the records are may not show in it
        model, Y, alone = task.at(w), task.training_targets(client.y), task.one_by_one
        vectors = {GRADIENT: clipped_gradient(model, client.x, Y, self.loss, plan, self.clip, whitening, alone)}
        vectors[GRADIENT] /= self.clip
        if asks and self.once(task):
            moments = input_moments(model, client.x, plan, alone=alone)
            vectors |= {MOMENTS + layer.name: scaled_triangle(A) for layer, A in moments.items()}
        return self.integers(task, question, client, vectors, counts=True)


_LAYERS: WeakKeyDictionary[Task, dict[str, int]] = WeakKeyDictionary()


def whitened_layers(task: Task) -> dict[str, int]:
    """The moments of inputs that a client sends, by name, and how many numbers each has; worked out once for a task."""
    if task not in _LAYERS:
        x = blank_sample(task)[0]
        moments = input_moments(task.model, x, task.plan(_invented(x)))
        _LAYERS[task] = {MOMENTS + layer.name: scaled_triangle(A).numel() for layer, A in moments.items()}
    return _LAYERS[task]


def _invented(x: Tensor) -> Tensor:
    """Two samples of the shape and type of those of x, and nothing else of them."""
    shape = (2, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
    return torch.arange(2, device=x.device).view(-1, *[1] * (x.ndim - 1)).expand(shape).to(x.dtype)


def noise_advice(method: Method, task: Task, samples: float, cohort: int, rounds: int) -> list[str]:
    """A warning where noise drowns what `samples` records of a round's cohort give: where by itself it moves the
    weights by more than their norm, lr k √Σ_j a_j² > ‖w‖, with k the norm of a round's noise in units of clip and
    a_j = (1 − m^j)/(1 − m) what momentum makes of it in j rounds.
    """
    if not isinstance(method, PrivateSums) or task.privacy.epsilon is None:
        return []
    d, m = task.like.numel(), method.momentum
    k = method.widths(task, {GRADIENT: d, SAMPLES: 1})[GRADIENT] * math.sqrt(d * cohort) / (GRAINS * samples)
    drift = method.lr * k * math.hypot(*((1 - m**j) / (1 - m) for j in range(1, rounds + 1)))
    if not (size := float(task.like.norm())) or (times := drift / size) <= 1:  # a head may begin at zero
        return []
    return [
        f"the noise alone moves the weights by {times:.2g} times their norm: take more records, fewer rounds, a larger "
        f"epsilon or lr = {method.lr / times:.2g}"
    ]


# -- The whitening, and how it travels ---------------------------------------------------------------------------------


def directions(summed: Tensor, damping: float, rank: int) -> tuple[Tensor, Tensor]:
    """V [m, at most rank] and r [1] of a (noisy) sum of scaled triangles."""
    A = unscaled(summed)
    m = len(A)
    values, vectors = torch.linalg.eigh(A)
    values = values.clamp_min(0)  # noise may have made some negative
    values = values / values.mean().clamp_min(1e-30)
    kept = min(rank, m - 1)
    rest = (values[: m - kept].mean() + damping).rsqrt()
    strong = (values[m - kept :] + damping).rsqrt()
    return (vectors[:, m - kept :] * (rest - strong).clamp_min(0).sqrt()).contiguous(), rest.view(1)


def whitening_arrays(name: str, V: Tensor, rest: Tensor) -> dict[str, Tensor]:
    """V [m, rank] and r [1] of the layer of this name, as they travel."""
    return {WHITENING + name: V, REST + name: rest}


def is_whitening(name: str) -> bool:
    """Whether an array of this name is a part of one."""
    return name.startswith((WHITENING, REST))


def read_whitening(arrays: Mapping[str, Tensor], like: Tensor, damping: float) -> dict[Layer, Tensor]:
    """P [m, m] of each layer that the arrays name. `MessageError` for arrays that no moments give: of a P that is far
    worse conditioned, rounding would give one sample more than its clip.
    """
    found = {}
    for name in (name for name in arrays if name.startswith(WHITENING)):
        layer, V = Layer.parse(name.removeprefix(WHITENING)), arrays[name]
        rest = arrays.get(REST + layer.name)
        if rest is None or rest.shape != (1,) or V.ndim != 2:
            raise MessageError(
                f"whitening of the layer at columns {layer.name} is not [inputs, directions] and a number"
            )
        check_layer(layer, len(V), like)
        V, r = V.double(), float(rest)
        least, most = (len(V) + damping) ** -0.5, damping**-0.5
        squares = torch.linalg.svdvals(V).square()  # eigenvalues of V Vᵀ, beside zeros
        highest = r if V.shape[1] < len(V) else r - float(squares[-1])
        lowest = r - float(squares[0]) if len(squares) else r
        if not 0.99 * least <= lowest <= highest <= 1.01 * most:
            raise MessageError(f"whitening has eigenvalues outside {least:.3g} … {most:.3g}, as no moments give")
        found[layer] = (r * torch.eye(len(V), dtype=V.dtype, device=V.device) - V @ V.T).to(like)
    return found


def check_layer(layer: Layer, width: int, like: Tensor) -> None:
    """`MessageError` unless weights [d] as `like` may have this layer: `width` inputs, its bias's 1 among them."""
    inputs = width - (layer.bias is not None)
    span = layer.weight[1] - layer.weight[0]
    if inputs < 1 or layer.transposed or span % inputs or layer.weight[1] > like.numel():
        raise MessageError(f"{width} inputs fit no layer at columns {layer.name}")
    if layer.bias is not None and (layer.bias[1] - layer.bias[0] != span // inputs or layer.bias[1] > like.numel()):
        raise MessageError(f"the layer at columns {layer.name} has no such bias")
