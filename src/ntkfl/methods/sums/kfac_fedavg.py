"""K-FAC FedAvg: local steps in everybody's curvature, for clients with many samples.

A step of `sum-ntk-fl` per round wastes a client that has thousands of samples. Here clients take many steps in a round,
as in FedAvg, and all measure them by one metric P ≈ (C + λ)⁻¹, made of the curvature factors that earlier cohorts have
summed (`tangent/metric.py`). A round, with n_m samples at client m and N in the cohort:

    (1)  v ← v − η P ∇ℓ_B(v)        minibatches B of the client's own, from v = w          `answer`
         η = min(1, √(2 κ / gᵀP g)),  g = ∇ℓ_B(v): no step moves predictions by more than κ nats
    (2)  W ← W + [1/N Σ_m n_m (V_m − W) M_m] [1/N Σ_m n_m M_m]⁻¹        for each layer's W [n, m]    `round`
         M_m = A_m / s + ρ I,  s = tr A / m
    (3)  C ← (C + 1/N Σ_m n_m C_m(w)) / 2    the factors clients took at w, for the next round

In (1) a client's own gradient would go far along directions that its own classes leave flat; the metric knows from the
others that these are steep. In (2) A_m is the input factor of the client's own samples, and A everybody's: a client
counts for a direction by what its data say of it. For one linear layer this is the W whose outputs are nearest to those
of the clients' own W_m on their own inputs, Σ_m Σ_i ‖(W − V_m) a_i‖² with ρ against what nobody's inputs show, where a
plain mean (ρ = ∞) would average what some clients learned with what the others never saw.

In the first round, which has no factors yet, an exchange for them comes before the steps. Everything clients send adds
up, so that secure sums show totals alone.

Related: FedAvg (McMahan et al. 2017), K-FAC (Martens & Grosse 2015); FedPM (Ishii et al. 2026) mixes by curvature too,
after steps in each client's own; RegMean (Jin et al. 2023) merges trained models by the moments of their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import MessageError, ModelError
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import LARGEST_LOSS, LOSS, SAMPLES, WEIGHTS
from ntkfl.methods.robust import weighted_sum
from ntkfl.methods.sums.curvature_reply import CHANGE, FactorSums, total_sums
from ntkfl.methods.task import ClientRound, State, Task, blank_sample, check_finite, statistics
from ntkfl.tangent import Sums, curvature_sums
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.flow import Metric, eigen
from ntkfl.tangent.sums import GRADIENT, SKETCH
from ntkfl.wire.message import Message

MEMORY = 0.5  # part of the earlier rounds' factors in the next metric
_METRIC = "metric/"  # factors' means, in the server's state and in the question


class Factors(FactorSums):
    """A client's curvature factors at w, before the first steps."""

    @classmethod
    def blank(cls, method: KfacFedAvg, task: Task, question: Message) -> Self:  # type: ignore[override]
        x, y = blank_sample(task)
        arrays = method.factors(task, task.like, x, task.training_targets(y), None) | {SAMPLES: torch.tensor(1)}
        arrays |= {name: torch.zeros_like(task.like) for name in cls.vectors}
        return cls.of(task, method.values, arrays | {n: torch.zeros((), dtype=torch.float64) for n in cls.bounded})


class LocalSteps(Factors):
    """The same, with n_m (v_m − w) M_m as `change` [d], and the loss met on the way summed over samples, `loss` []."""

    bounded = {LOSS: LARGEST_LOSS}
    vectors = (CHANGE,)

    def check(self, task: Task) -> None:
        self.vector(CHANGE, task.like.cpu())
        self.take(LOSS, ())
        super().check(task)


class KfacFedAvg(Method):
    """v ← v − min(1, √(2κ / gᵀP g)) P g on minibatches; then the mean of all clients' changes, weighted by the
    curvature that each of them met.

    Where rounds ask only some of the clients, the rounds' weights are averaged (`average`), as cohorts differ.
    """

    name = "kfac-fedavg"
    replies = {"curvature": Factors, "weights": LocalSteps}

    average: float = Field(
        0.8, ge=0, lt=1, description="running average of the rounds' weights; 0 where every round asks all clients"
    )
    kl: float = Field(0.0015, gt=0, description="κ, nats by which one local step may move predictions")
    damping: float = Field(0.01, gt=0, description="λ, added to the curvature of all clients")
    mixing: float = Field(0.1, gt=0, description="ρ, added to input factors, of mean eigenvalue 1, that weigh changes")
    local_epochs: int = Field(3, ge=1, description="passes over a client's samples in a round")
    batch_size: int = Field(50, ge=1, description="samples in a local step; a smaller client uses all it has")
    values: Literal["float16", "float32"] = Field("float16", description="how weights, changes and factors travel")
    largest: int = Field(
        LARGEST, ge=1, description="rows of the largest factor that is sent whole; others are sketched"
    )

    def _fitted(self, model: nn.Module, outputs: int, everyone: bool) -> Self:
        plain = everyone and "average" not in self.model_fields_set
        return self.model_copy(update={"average": 0.0}) if plain else self

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        if statistics(task.model):
            raise ModelError(f"{self.name} keeps no statistics of batch normalisation: use nn.GroupNorm")
        return super().start(task, weights)

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange; two in the first round."""
        w = state[WEIGHTS]
        known = {name: array for name, array in state.items() if name.startswith(_METRIC)}
        if not known:
            replies = yield self.question("curvature", round, {WEIGHTS: w})
            known = _means(total_sums(replies, w))
        replies = yield self.question("weights", round, {WEIGHTS: w, **known})
        total, samples = total_sums(replies, w), sum(reply.samples for reply in replies)
        change = weighted_sum([reply.vector(CHANGE, w) for reply in replies], w.new_ones(len(replies))) / samples
        fresh = _means(total)
        change = weighed(change, _sums(fresh), _sums(known), self.mixing, inverse=True)
        new = {WEIGHTS: check_finite(w + change, "the new model")}  # (2)
        new |= {name: MEMORY * known[name] + (1 - MEMORY) * fresh[name] for name in fresh}  # (3)
        loss = sum(float(reply.take(LOSS)) for reply in replies) / samples
        return Outcome(new, loss, diagnostics={"samples": samples})

    def question(self, kind: str, round: int, arrays: Mapping[str, Tensor]) -> Message:
        return Message(kind, round, arrays, tuple(arrays) if self.values == "float16" else ())

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> Factors:
        """Its factors at w and, with a metric, where its own steps from w end."""
        w = question.vector(WEIGHTS, task.like)
        generator = torch.Generator(w.device).manual_seed(client.randomness.seed("labels"))
        arrays = self.factors(task, w, client.x, task.training_targets(client.y), generator)
        arrays[SAMPLES] = torch.tensor(len(client))
        if question.kind == "curvature":
            return Factors.of(task, self.values, arrays)
        known = _sums({name: question.take(name, None, w) for name in question.arrays}, w)
        metric = Metric(known, self.damping)
        own = _means(Sums(arrays))
        if own.keys() != {name for name in question.arrays if name.startswith(_METRIC)}:
            raise MessageError("the metric is of other layers than this network's")

        def step(gradient: Tensor, v: Tensor) -> Tensor:
            direction = metric(gradient)
            length = torch.dot(gradient, direction).clamp(min=torch.finfo(w.dtype).tiny)
            return direction * (2 * self.kl / length).sqrt().clamp(max=1)

        steps = self.local_epochs * math.ceil(len(client) / self.batch_size)
        trained = train_locally(task, w, client, steps, 1.0, self.batch_size, step)
        check_finite(trained.weights, f"the local model of client {client.id}")
        arrays[CHANGE] = len(client) * weighed(trained.weights - w, _sums(own), known, self.mixing)
        arrays[LOSS] = len(client) * check_finite(trained.loss, f"the local loss of client {client.id}").double()
        return LocalSteps.of(task, self.values, arrays)

    def factors(
        self, task: Task, w: Tensor, x: Tensor, Y: Tensor, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The curvature's factors over the rows of x, by Monte Carlo. Cost: about three gradient passes."""
        plan = task.plan(x)
        sums = curvature_sums(task.at(w), x, Y, self.loss, plan, True, self.largest, "mc", generator)
        return {name: array for name, array in sums.arrays.items() if name not in (GRADIENT, SAMPLES)}


def weighed(vector: Tensor, means: Sums, metric: Sums, rho: float, inverse: bool = False) -> Tensor:
    """Each layer's part D [n, m] of a vector [d] as D M, M = A / s + ρ I, or as D M⁻¹. A is the layer's input factor in
    `means`, s its mean eigenvalue in `metric`, which is of the same layers.

    No eigenvalue of A counts as below zero in M⁻¹, whatever was sent: its largest is 1/ρ. Columns of no layer, or of a
    layer whose factor is a sketch, stay as they are: they are averaged. Cost: a product with a matrix [m, m] for each
    layer, or its decomposition.
    """
    out = vector.clone()
    for own, known in zip(means.layers(), metric.layers(), strict=True):
        if own.inputs is None or known.inputs is None or own.inputs.form == SKETCH:
            continue
        groups, n, _ = own.shape
        D, diagonal = own.layer.matrices(vector, groups, n), known.inputs.values  # [groups, n, m], [groups, m]
        if not known.inputs.form:
            diagonal = known.inputs.square().diagonal(dim1=1, dim2=2)
        s = diagonal.mean(1, keepdim=True).clamp(min=torch.finfo(vector.dtype).tiny)
        if inverse:
            A = eigen(own.inputs, s.new_ones(()))
            D = A.rows(A.coordinates(D) / (A.spectrum / s + rho).unsqueeze(1))
        elif own.inputs.form:
            D = D * (own.inputs.values / s + rho).unsqueeze(1)
        else:
            D = D @ own.inputs.square() / s.unsqueeze(2) + rho * D
        own.layer.write(out, D)
    return out


def _means(total: Sums) -> State:
    """The factors' means over the samples, as the next state has them."""
    samples = total.arrays[SAMPLES]
    return {_METRIC + name: array / samples for name, array in total.arrays.items() if name != SAMPLES}


def _sums(means: Mapping[str, Tensor], w: Tensor | None = None) -> Sums:
    """Means as sums over one sample; with weights [d], factors are checked against these."""
    arrays = {n.removeprefix(_METRIC): array for n, array in means.items() if n.startswith(_METRIC)}
    one = next(iter(arrays.values())).new_ones(()) if arrays else torch.ones(())
    gradient = {} if w is None else {GRADIENT: w.new_zeros(()).expand_as(w)}
    return Sums(arrays | {SAMPLES: one} | gradient)
