"""NTK-FL from sums: the evolution of NTK-FL without any per-sample Jacobian leaving a client.

Seen from the weights, the linearised flow needs sums over samples alone: the gradient g and, for each layer, the
Kronecker factors of the Gauss–Newton matrix C ≈ Ĉ = A ⊗ G (K-FAC, Martens & Grosse 2015; `tangent/curvature.py`).
Clients send theirs; the server adds them and evolves the weights in closed form. A round is five equations, with N
samples in the cohort:

    (1)  g = 1/N Σ ∇ℓ,  Ĉ = A ⊗ G        sums at the proposed weights w                         `curvature`
    (2)  L(w) ≤ L(w₀) + ½ min(L(w₀), s)   does w stand, against the last accepted weights w₀?    `round`
    (3)  Δ = −φ(t(μΛ + δ)) ∘ g            in the factors' eigenbasis, Λ = λ_G ⊗ λ_A,             `step`
                                          φ(x) = t (1 − e^{−x}) / x
    (4)  μ ← Δᵀ C Δ / Δᵀ Ĉ Δ              where the factors are rough, in a second exchange      `measured`
    (5)  w ← w₀ + Δ,  μ ΔᵀĈΔ ≤ 2 min(L, s)                                                       `bounded_step`

L is the cohort's mean training loss, with smoothed labels; w is what clients read, rounded as `values` says. Where
single clients are seen, g is the mean of their parts with none beyond `step_limit`, and L leaves outliers out.

**How far a step goes.** Ĉ has less curvature along Δ than C: about 12 times less for a perceptron, 30 for a small
convolutional network, up to 20,000 where training would diverge. So μ makes up for it; it is measured (4) where layers
share weights between positions or factors are sketches. Δ is shortened (5) until its quadratic model promises no loss
below zero: a step to the model's minimum gains ½ Δᵀ(μĈ)Δ, which is at most L. s is the loss's own scale: 1 for
cross-entropy, which bounds how far predictions move (½ ΔᵀCΔ is their Kullback–Leibler divergence), none for squared
error. Losses of one cohort are compared (2), as those of different cohorts differ too much.

A step that does not stand is taken back: the round repeats it from the sums at w₀, with μ and δ `BACK` times as large
(δ too, as without curvature no μ shortens a step) and a bound (5) as much smaller: "caution" is the product of these
factors. Steps that stand relax all three.
The weights proposed last count in the running average once a cohort has accepted them, and are reported until then as
if they would be.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import NumericalError, TooFew
from ntkfl.methods.base import Method, Outcome, Outgoing, Replies, Round
from ntkfl.methods.replies import SAMPLES, WEIGHTS
from ntkfl.methods.robust import clip_factors, fair_counts
from ntkfl.methods.sums.curvature_reply import (
    ASKS,
    CHANGE,
    CURVATURE,
    FRESH,
    LOSSES,
    CurvatureSums,
    StepCurvature,
    accepted_weights,
    stacked_losses,
    total_sums,
    trimmed_losses,
    weights_question,
)
from ntkfl.methods.sums.last_layer import trains_alone
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.curvature import LARGEST, step_curvature
from ntkfl.tangent.flow import Eigen, eigen
from ntkfl.tangent.losses import find_loss, per_sample
from ntkfl.tangent.sums import GRADIENT, Factor, Layer, is_constant
from ntkfl.wire.message import Message

TOLERANCE, BACK, RELAX = 0.5, 4.0, 2.0
LARGEST_MU = 1e6  # that is measured, in units of the option's
_OVERFLOW = 1e300  # the loss sum of weights that overflow
_MOST_COHORTS = 2  # that are asked for constant factors
_SENT = "constant_factors_sent"  # a client's memory: the round in which it sent them
# For a linear head on frozen features Ĉ of all clients is nearly C: μ is small, the flow runs
# to its end, and nothing is averaged, smoothed or rounded. From zero the first step is the ridge solution.
_HEAD: dict[str, Any] = {
    "average": 0.0,
    "label_smoothing": 0.0,
    "values": "float32",
    "time": None,
    "mu": 2.0,
    "delta": 1e-4,
    "largest": 4096,
    "fisher": "exact",
}
# The server's state: the last weights that a cohort accepted and the sums taken there; μ as measured there; by how much
# μ and δ are raised, and the bound lowered.
_ACCEPTED, _LAST, _MU, _CAUTION = "accepted", "last/", "mu", "caution"
# While constant factors are asked for, their total, its samples and the number of cohorts; then their spectra.
TOTAL, COUNT = "total/", "constant_samples"
_VALUES, _VECTORS, _COHORTS = "values/", "vectors/", "constant_cohorts"


class SumNTKFL(Method):
    """w ← w₀ − φ(t(μΛ + δ)) ∘ g in the eigenbasis of the summed factors. One exchange per round, two where μ is
    measured.

    Where single clients are seen, the step that a client's own gradient drives, and its samples, count for at most
    `step_limit` times the median client's (a subclass may set it, 0 for no limit; secure sums show no client). On
    heterogeneous data one gradient could otherwise decide a round, and some networks would not begin to learn.

    Where only a last linear layer trains, and every round asks all clients, options that nobody gave are `_HEAD`'s, and
    there is no limit: the solution is nearly exact. Where rounds ask only some clients, the usual options stay.

    `curvature` and `step` are meant to be overridden: examples/own_curvature.py.
    """

    name = "sum-ntk-fl"
    replies = {"weights": CurvatureSums, "candidates": StepCurvature}
    step_limit: ClassVar[float] = 1.5  # of a client's step and samples, in units of the median client's

    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0: none")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; none with mse")
    values: Literal["float16", "float32"] = Field("float16", description="how sums and weights travel")
    time: float | None = Field(200.0, ge=0, description="t, how long the weights flow; none: to the end")
    mu: float = Field(
        12.0,
        gt=0,
        description="μ, what curvature is multiplied by, for what blocks and small cohorts leave out; where it is "
        "measured, or a step was taken back, the least",
    )
    delta: float = Field(0.003, ge=0, description="δ, added to all curvature")
    largest: int = Field(
        LARGEST, ge=1, description="rows of the largest factor that is sent whole; others are sketched"
    )
    fisher: Literal["mc", "exact"] = Field(
        "mc", description="output factors from one random vector per sample, or from all classes"
    )

    # -- What is meant to be overridden ------------------------------------------------------------------------------

    def curvature(
        self,
        task: Task,
        w: Tensor,
        x: Tensor,
        Y: Tensor,
        constant: bool = True,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """(1) One client's N g and N Ĉ: sums over the rows of x, with targets Y [N, d2], at the weights w [d].

        Arrays by name, all additive, as `tangent/sums.py` has them: `gradient` [d]; `<columns>/inputs` and
        `<columns>/outputs`, the triangles of A and G for the layer whose weights are these columns; of a block without
        G, A alone is the block; `rest`, the diagonal of C at columns of no layer. `constant=False` leaves out factors
        whose inputs do not depend on any trained weight; `generator` draws for fisher "mc". Cost: about three
        gradient passes with "mc", whatever the number of classes; a chunk at a time.
        """
        plan = task.plan(x)
        sums = curvature_sums(task.at(w), x, Y, self.loss, plan, constant, self.largest, self.fisher, generator)
        return {name: array for name, array in sums.arrays.items() if name != SAMPLES}

    def step(self, flow: Flow, mu: float, delta: float) -> tuple[Tensor, float]:
        """(3) Δ = −φ(t(μΛ + δ)) ∘ g, [d], and ΔᵀĈΔ. `flow` has the cohort's g, and Ĉ's eigenvalues and eigenvectors."""
        return flow.change_and_curvature(self.time, mu, delta)

    def _fitted(self, model: nn.Module, outputs: int, everyone: bool) -> Self:
        if not (everyone and trains_alone(model, outputs)):
            return self
        fields, defaults = type(self).model_fields, SumNTKFL.model_fields
        free = fields.keys() - self.model_fields_set
        return self.model_copy(
            update={n: v for n, v in _HEAD.items() if n in free and fields[n].default == defaults[n].default}
        )

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        """With μ, a caution of 1, and no constant factors yet; what the network decides goes to `task.notes`."""
        task.notes += self._notes(task)
        numbers = {_MU: torch.tensor(self.mu, dtype=torch.float64), _CAUTION: torch.tensor(1.0, dtype=torch.float64)}
        return super().start(task, weights) | numbers | {COUNT: weights.new_zeros(()), _COHORTS: torch.tensor(0)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """Sums at w and losses at w and w₀ (1); whether w stands (2); μ (4); and the next step (3, 5)."""
        w, w0, mu, caution = state[WEIGHTS], state.get(_ACCEPTED), float(state[_MU]), float(state[_CAUTION])
        # A head of which all clients are asked is solved exactly: no step is limited, and inputs are asked for once.
        exact = len(cohort) >= task.total_clients and trains_alone(task.model, task.outputs)
        limit = 0.0 if task.privacy.secure_sum or exact else self.step_limit
        diagnostics: dict[str, float | str] = {}

        # (1) The cohort's sums at w, and its losses there and at w₀.
        replies = yield weights_question(round, w, w0, _COHORTS in state, self.values == "float16")
        total, losses = total_sums(replies, w), stacked_losses(replies, 1 if w0 is None else 2).to(w.device)
        samples = torch.stack([reply.take(SAMPLES, (), w) for reply in replies])
        fresh = sum(reply.fresh for reply in replies)
        kept, spectra = constant_factors(state, total, fresh, 1 if exact else _MOST_COHORTS)
        if limit and w0 is not None:
            L, *L0 = trimmed_losses(losses, samples.double())
        else:
            L, *L0 = sum(losses, losses.new_zeros(())) / total.arrays[SAMPLES].double()  # added in order, as the rest

        if w0 is None or bool(L0[0] + TOLERANCE * self._unit(L0[0]) >= L):
            # (2) w stands: the next step begins there, with what these sums say.
            passed, loss, w0, sums = None if w0 is None else w, L, w, total
            caution = max(1.0, caution / RELAX)
            flow = Flow(sums, spectra)
            # Some factors lose so much of the curvature that no μ chosen beforehand fits.
            if any(layer.shared or max(layer.shape[1:]) > self.largest for layer in sums.layers()):
                mu = yield from self.measured(flow, w, round, mu, caution, loss)  # (4), along the plain mean's step
            if limit:
                gradients = [reply.vector(GRADIENT, w) for reply in replies]
                how = (limit, self.time, mu * caution, self.delta * caution)
                gradient, clipped = bounded_gradient(flow, gradients, samples, *how)
                if clipped:
                    flow, diagnostics["clipped_clients"] = flow.driven_by(gradient), clipped
                    sums = Sums({**sums.arrays, GRADIENT: gradient * total.arrays[SAMPLES]})
        else:
            # It raised the loss: the step from w₀ is repeated, shorter, with the sums that were taken there.
            passed, loss = None, L0[0]
            sums = Sums({n.removeprefix(_LAST): t for n, t in state.items() if n.startswith(_LAST)})
            flow, caution, diagnostics["taken_back"] = Flow(sums, spectra), BACK * caution, 1

        change, _ = self.bounded_step(flow, mu, caution, loss)  # (3), (5)
        kept |= {
            WEIGHTS: check_finite(w0 + change, "the model after the flow"),
            _ACCEPTED: w0,
            _MU: state[_MU].new_tensor(mu),
            _CAUTION: state[_CAUTION].new_tensor(caution),
        }
        # Spectra stand for the constant factors.
        kept |= {_LAST + name: array for name, array in sums.arrays.items() if not is_constant(name)}
        diagnostics |= {"samples": int(total.arrays[SAMPLES]), "mu": mu * caution}
        return Outcome(kept, float(loss), self.time, diagnostics, passed=passed, tentative=True)

    def bounded_step(self, flow: Flow, mu: float, caution: float, loss: Tensor) -> tuple[Tensor, float]:
        """(5) The step with κμ and κδ, κ = `caution`, shortened to κ (κμ) ΔᵀĈΔ ≤ 2 min(L, s); and its ΔᵀĈΔ."""
        raised = caution * mu
        change, curvature = self.step(flow, raised, caution * self.delta)
        short = min(1.0, math.sqrt(2 * self._unit(loss) / (caution * raised * curvature))) if curvature > 0 else 1.0
        return short * change, short**2 * curvature

    def measured(
        self, flow: Flow, w: Tensor, round: int, mu: float, caution: float, loss: Tensor
    ) -> Generator[Outgoing, Replies, float]:
        """(4) μ with which Ĉ has the curvature that its step meets on the cohort: Δᵀ C Δ / Δᵀ Ĉ Δ, or the option."""
        change, factored = self.bounded_step(flow, mu, caution, loss)
        halves = (WEIGHTS, CHANGE) if self.values == "float16" else ()
        replies = yield Message("candidates", round, {WEIGHTS: w, CHANGE: change}, halves)
        met, samples = sum(reply.curvature for reply in replies), sum(reply.samples for reply in replies)
        most = LARGEST_MU * self.mu
        return min(most, max(self.mu, met / samples / factored)) if factored > 0 else self.mu

    def _unit(self, loss: Tensor) -> float:
        """min(L, s)."""
        return min(float(loss), find_loss(self.loss).scale)

    def _notes(self, task: Task) -> list[str]:
        """What the network decides, as lines for a log."""
        large, notes = [], []
        for name, module in task.model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.weight.requires_grad:
                rows = max(module.weight[0].numel() + (module.bias is not None), len(module.weight))
                large += [f"{name!r} ({rows} rows)"] if rows > self.largest else []
        if large:
            notes.append(f"curvature factors above largest = {self.largest} are sent as sketches: {', '.join(large)}")
        if trains_alone(task.model, task.outputs):
            chosen = [f"{name} = {_shown(v)}" for name, v in _HEAD.items() if v == getattr(self, name)]
            how = ", ".join(chosen) or "rounds of all clients would solve it nearly at once"
            notes.append(f"only a last linear layer trains: {how}")
        return notes

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> CurvatureSums | StepCurvature:
        """The client's sums at w, and its losses there and at w₀; or the curvature that a step meets on its samples.

        Where w is too far off to compute with, all sums are 0 and the loss says that the step does not stand.
        """
        w = question.vector(WEIGHTS, task.like)
        n, Y = len(client), task.training_targets(client.y)
        if question.kind == "candidates":
            change = question.vector(CHANGE, w)
            met = step_curvature(task.at(w), client.x, Y, change, self.loss, task.plan(client.x)).double()
            return StepCurvature({SAMPLES: torch.tensor(n), CURVATURE: met.nan_to_num(_OVERFLOW, _OVERFLOW)})
        w0, asks = accepted_weights(question.of_kind("weights"), w), ASKS in question.arrays
        at = [w] if w0 is None else [w, w0]
        losses = torch.stack([per_sample(self.loss, task.predict(v, client.x), Y).sum().double() for v in at])

        def finite_curvature(v: Tensor) -> dict[str, Tensor] | None:
            """`curvature`, or None where it is not finite. Draws are of the client's randomness of the round."""
            generator = torch.Generator(w.device).manual_seed(client.randomness.seed("labels"))
            with suppress(NumericalError):
                arrays = self.curvature(task, v, client.x, Y, asks, generator)
                if all(bool(array.isfinite().all()) for array in arrays.values()):
                    return arrays
            return None

        arrays = finite_curvature(w)
        lost = arrays is None
        if arrays is None:
            shapes = None if w0 is None else finite_curvature(w0)
            if shapes is None:
                raise NumericalError("the network's derivatives are not finite: look at inputs and initialisation")
            arrays, losses[0] = {name: torch.zeros_like(array) for name, array in shapes.items()}, math.inf
        if asks:
            # A client sends constant factors once, and zeros afterwards, so that all replies look the same. A round may
            # be repeated.
            again = lost or (_SENT in client.memory and int(client.memory[_SENT]) != question.round)
            arrays |= {name: torch.zeros_like(a) for name, a in arrays.items() if again and is_constant(name)}
            arrays[FRESH] = torch.tensor(0 if again else n)
            client.memory |= {} if again else {_SENT: torch.tensor(question.round)}
        arrays |= {SAMPLES: torch.tensor(n), LOSSES: losses.nan_to_num(_OVERFLOW, _OVERFLOW)}
        return CurvatureSums.of(task, self.values, arrays)


def _shown(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# -- Constant factors --------------------------------------------------------------------------------------------------
# Their inputs do not depend on any trained weight, so they are the same in every round, and asked for in a few only.


def constant_factors(state: State, sums: Sums, fresh: int, most: int) -> tuple[State, dict[Layer, Eigen]]:
    """What the next state holds of them, and their spectra by layer. `fresh` samples of this round are behind them.

    They are asked for in the first `most` rounds, and added up.
    """
    if _COHORTS not in state:
        known = {name: t for name, t in state.items() if name.startswith((_VALUES, _VECTORS))}
        layers = [name.removeprefix(_VALUES) for name in known if name.startswith(_VALUES)]
        return known, {Layer.parse(n): Eigen(known[_VALUES + n], known.get(_VECTORS + n)) for n in layers}
    count, cohorts, spectra = state[COUNT] + fresh, state[_COHORTS] + 1, dict[Layer, Eigen]()
    kept = {COUNT: count, _COHORTS: cohorts}
    for shaped in sums.layers():
        if not shaped.constant or shaped.inputs is None:
            continue
        if float(count) < 1:
            raise TooFew("no client sent the factor of its inputs: it was sent before, and lost; begin a new run")
        name = TOTAL + shaped.layer.name
        kept[name] = shaped.inputs.values + state.get(name, 0.0)
        spectra[shaped.layer] = eigen(Factor(kept[name], shaped.inputs.form), count)
    if spectra and int(cohorts) < most:
        return kept, spectra
    kept = {_VALUES + layer.name: own.values for layer, own in spectra.items()}
    vectors = {_VECTORS + layer.name: own.vectors for layer, own in spectra.items() if own.vectors is not None}
    return kept | vectors, spectra


# -- Byzantine clients -------------------------------------------------------------------------------------------------


def bounded_gradient(
    flow: Flow, gradients: Sequence[Tensor], samples: Tensor, limit: float, time: float | None, mu: float, delta: float
) -> tuple[Tensor, int]:
    """The mean gradient Σ_m c_m s_m g_m / Σ_m s_m n_m, [d], of clients' sums g_m [d] over n_m `samples` [M], and how
    many clients have c_m s_m < 1.

    s_m ≤ 1 makes a client's samples n_m count for at most `limit` times the median client's; c_m ≤ 1 makes its own step
    P g_m / n_m at most `limit` times as long as the median one. The step Δ = Σ_m P g_m / N is linear in the gradients,
    so a minority of Byzantine clients moves it by a bounded length. P g_m is what is bounded, as a gradient along
    directions of little curvature is short and still moves the weights far.
    """
    steps = flow.step_lengths([g / n for g, n in zip(gradients, samples, strict=True)], time, mu, delta)
    shares = fair_counts(samples, limit) / samples
    factors = clip_factors(steps, limit) * shares
    total = torch.stack([factor * g for factor, g in zip(factors, gradients, strict=True)]).sum(0)
    return total / (shares * samples).sum(), int((factors < 1).sum())
