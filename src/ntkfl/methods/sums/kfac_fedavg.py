"""K-FAC FedAvg: local steps in everybody's curvature, for clients with many samples.

A step of `sum-ntk-fl` per round wastes a client that has thousands of samples. Here clients take many steps in a round,
as in FedAvg, and all measure them by one metric P ≈ (C + λ)⁻¹, made of the curvature factors that earlier cohorts have
summed (`tangent/metric.py`). A round, with n_m samples at client m and N in the cohort:

    (1)  v ← v − η P ∇ℓ_B(v)        minibatches B of the client's own, from v = w          `answer`
         η = min(1, √(2 κ / gᵀP g)),  g = ∇ℓ_B(v): no step moves predictions by more than κ nats
    (2)  w ← w + 1/N Σ_m n_m (v_m − w)                                                     `round`
    (3)  C ← (C + 1/N Σ_m n_m C_m(w)) / 2    the factors clients took at w, for the next round

Each client's own gradient would go far along directions that its own classes leave flat; the metric knows from the
others that these are steep. In the first round, which has no factors yet, an exchange for them comes before the steps.
Everything clients send adds up, so that secure sums show totals alone.

Related: FedAvg (McMahan et al. 2017), K-FAC (Martens & Grosse 2015); FedPM (Ishii et al. 2026) has steps in each
client's own curvature instead, and mixes by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ModelError
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import LARGEST_LOSS, LOSS, SAMPLES, WEIGHTS
from ntkfl.methods.robust import weighted_sum
from ntkfl.methods.sums.curvature_reply import CHANGE, FactorSums, total_sums
from ntkfl.methods.task import ClientRound, State, Task, blank_sample, check_finite, statistics
from ntkfl.tangent import Sums, curvature_sums
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.flow import Metric
from ntkfl.tangent.sums import GRADIENT
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
    """The same, with n_m (v_m − w) as `change` [d], and the loss met on the way as a sum over samples, `loss` []."""

    bounded = {LOSS: LARGEST_LOSS}
    vectors = (CHANGE,)

    def check(self, task: Task) -> None:
        self.vector(CHANGE, task.like.cpu())
        self.take(LOSS, ())
        super().check(task)


class KfacFedAvg(Method):
    """v ← v − min(1, √(2κ / gᵀP g)) P g on minibatches, then the mean of all clients' changes."""

    name = "kfac-fedavg"
    paper = "after McMahan et al. 2017 and Martens & Grosse 2015"
    replies = {"curvature": Factors, "weights": LocalSteps}

    kl: float = Field(0.005, gt=0, description="κ, nats by which one local step may move predictions")
    damping: float = Field(0.01, gt=0, description="λ, added to the curvature of all clients")
    local_epochs: int = Field(2, ge=1, description="passes over a client's samples in a round")
    batch_size: int = Field(50, ge=1, description="samples in a local step; a smaller client uses all it has")
    values: Literal["float16", "float32"] = Field("float16", description="how weights, changes and factors travel")
    largest: int = Field(
        LARGEST, ge=1, description="rows of the largest factor that is sent whole; others are sketched"
    )

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
        change = weighted_sum([reply.vector(CHANGE, w) for reply in replies], w.new_ones(len(replies)))
        new = {WEIGHTS: check_finite(w + change / samples, "the new model")}  # (2)
        new |= {name: MEMORY * known[name] + (1 - MEMORY) * fresh for name, fresh in _means(total).items()}  # (3)
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
        own = {n.removeprefix(_METRIC): question.take(n, None, w) for n in question.arrays if n.startswith(_METRIC)}
        whole = {SAMPLES: w.new_ones(()), GRADIENT: w.new_zeros(()).expand_as(w)}  # checks the factors against w
        metric = Metric(Sums(own | whole), self.damping)

        def step(gradient: Tensor, v: Tensor) -> Tensor:
            direction = metric(gradient)
            length = torch.dot(gradient, direction).clamp(min=torch.finfo(w.dtype).tiny)
            return direction * (2 * self.kl / length).sqrt().clamp(max=1)

        steps = self.local_epochs * math.ceil(len(client) / self.batch_size)
        trained = train_locally(task, w, client, steps, 1.0, self.batch_size, step)
        check_finite(trained.weights, f"the local model of client {client.id}")
        arrays[CHANGE] = len(client) * (trained.weights - w)
        arrays[LOSS] = len(client) * check_finite(trained.loss, f"the local loss of client {client.id}").double()
        return LocalSteps.of(task, self.values, arrays)

    def factors(
        self, task: Task, w: Tensor, x: Tensor, Y: Tensor, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The curvature's factors over the rows of x, by Monte Carlo. Cost: about three gradient passes."""
        plan = task.plan(x)
        sums = curvature_sums(task.at(w), x, Y, self.loss, plan, True, self.largest, "mc", generator)
        return {name: array for name, array in sums.arrays.items() if name not in (GRADIENT, SAMPLES)}


def _means(total: Sums) -> State:
    """The factors' means over the samples, as the next state has them."""
    samples = total.arrays[SAMPLES]
    return {_METRIC + name: array / samples for name, array in total.arrays.items() if name != SAMPLES}
