"""NTK-FL from sums: the evolution of NTK-FL without any row leaving a client.

The linearised flow seen from the weights needs sums over samples alone: the gradient g and the Kronecker factors of the
Gauss–Newton matrix C (`tangent/curvature.py`). Clients send theirs; the server adds them and evolves the weights in
closed form, with C ≈ Ĉ = A ⊗ G for each layer:

    Δ = −φ(t(μΛ + δ)) ∘ g   in the eigenbasis of the factors,   φ(x) = (1 − e^{−x})/x · t,   Λ = λ_G ⊗ λ_A

**How far a step goes.** Ĉ has less curvature than C along Δ: about 12 times less for a perceptron, 30 for a small
convolutional network, up to 20,000 where training would diverge. Four things keep the step in bounds on any network:

- μ is measured where factors are rough, as Δᵀ C Δ / Δᵀ Ĉ Δ on the cohort itself: a sum over samples, in a second
  exchange. Elsewhere it is the option's.
- Δ is shortened until its quadratic model promises no loss below zero: a step to the model's minimum gains ½ Δᵀ(μĈ)Δ,
  which is at most L. So μ ΔᵀĈΔ ≤ 2 min(L, s), with s the loss's own scale: of cross-entropy 1, which bounds how far
  predictions move (½ ΔᵀCΔ is their Kullback–Leibler divergence); of squared error there is none.
- The next cohort reports its loss L' at the proposed weights and L at the last accepted ones. The step stands if
  L' ≤ L + `TOLERANCE` min(L, s). Losses of one cohort are compared: those of different ones differ too much.
- Else the round goes back to the accepted weights and repeats the step from the sums that were taken there, with μ and
  δ `BACK` times as large (δ too: where there is no curvature no μ shortens a step) and a bound as much smaller (or the
  step would stay as long where that decides). Steps that stand relax all three.

The weights proposed last count in the running average once a cohort has accepted them; until then they are reported as
if they would be. Everything in a reply adds up, so replies may be added before the server sees them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError, NumericalError, TooFew
from ntkfl.methods.additive import LARGEST_LOSS, Addend, Summand
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.constant_factors import constant_factors, no_factors_yet, still_asked
from ntkfl.methods.corruption import change_of
from ntkfl.methods.inspection import Corruption
from ntkfl.methods.last_layer import trains_alone
from ntkfl.methods.robust_sums import ClientSums, bounded, trimmed_losses
from ntkfl.methods.sum_messages import FRESH, LOSSES, Reply, read_sums, sizes, take_accepted, weights_to_judge
from ntkfl.methods.sum_options import SumOptions
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.curvature import step_curvature
from ntkfl.tangent.losses import find_loss, per_sample
from ntkfl.tangent.sums import CONSTANT, GRADIENT, INPUTS, SAMPLES, is_constant, sketch_rank
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves

TOLERANCE, BACK, RELAX = 0.5, 4.0, 2.0
LARGEST_MU, LARGEST_CURVATURE = 1e6, 1e4  # μ that is measured, in units of the option's; of one sample, in secure sums
INPUT_LIMIT = 100.0  # secure sums: how much larger than other numbers those of an input factor may be
_ASKS = "asks"  # in the server's message where it asks for constant factors
_CHANGE, _CURVATURE = "change", "curvature"  # Δ, and N Δᵀ C Δ
_OVERFLOW = 1e300  # the loss sum of weights that overflow
_SENT = "constant_factors_sent"  # a client's memory: the round in which it sent them
# The server's state: the last weights that a cohort accepted and the sums taken there; μ as measured there; by how much
# μ and δ are raised, and the bound lowered.
_ACCEPTED, _LAST, _MU, _CAUTION = "accepted", "last/", "mu", "caution"


class SumNTKFL(SumOptions):
    """w ← w − φ(t(μΛ + δ)) ∘ g in the eigenbasis of the summed factors.

    One exchange per round, two where μ is measured.
    """

    name: ClassVar[str] = "sum-ntk-fl"
    paper: ClassVar[str] = "after Yue et al. 2022 and Martens & Grosse 2015"
    shows: ClassVar[str] = "sums"
    additive: ClassVar[bool] = True

    def start(self, task: Task, weights: Tensor) -> State:
        if self.linear_head and not trains_alone(task.model, task.outputs):
            raise ConfigError("linear_head is for networks of which a last linear layer alone trains: leave it out")
        numbers = {_MU: torch.tensor(self.mu, dtype=torch.float64), _CAUTION: torch.tensor(1.0, dtype=torch.float64)}
        return super().start(task, weights) | no_factors_yet(weights) | numbers

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w, accepted = state["weights"], state.get(_ACCEPTED)
        asks = {_ASKS: torch.tensor(1, dtype=torch.uint8)} if still_asked(state) else {}
        real, others = weights_to_judge(w, accepted)
        replies = yield Message("weights", round, self._pack(real) | asks | others)
        reply, clients = self._add_up(task, replies, 1 if accepted is None else 2)
        kept, spectra = constant_factors(state, reply.sums, reply.fresh, 1 if self.linear_head else 2)

        mu, caution = float(state[_MU]), float(state[_CAUTION])
        losses, diagnostics = self._compared(reply, clients), dict[str, float | str]()
        if accepted is None or bool(losses[0] <= losses[1] + TOLERANCE * self._unit(losses[1])):
            passed, loss = None if accepted is None else w, losses[0]
            accepted, sums, caution = w, reply.sums, max(1.0, caution / RELAX)
            flow = Flow(sums, spectra)
            if self._rough(sums):
                mu = yield from self._measured(flow, w, round, mu * caution, caution, losses[0])
            if self.step_limit:
                rates = (self.time, mu * caution, self.delta * caution)
                gradient, clipped = bounded(flow, clients, self.step_limit, *rates)
                if clipped:
                    flow, diagnostics["clipped_clients"] = flow.driven_by(gradient), clipped
                    sums = Sums({**sums.arrays, GRADIENT: gradient * sums.arrays[SAMPLES]})
        else:
            passed, loss = None, losses[1]
            sums = Sums({n.removeprefix(_LAST): t for n, t in state.items() if n.startswith(_LAST)})
            flow, caution, diagnostics["taken_back"] = Flow(sums, spectra), BACK * caution, 1
        change, _ = self.step(flow, mu * caution, caution, loss)
        kept |= {
            "weights": check_finite(accepted + change, "the model after the flow"),
            _ACCEPTED: accepted,
            _MU: state[_MU].new_tensor(mu),
            _CAUTION: state[_CAUTION].new_tensor(caution),
        } | {_LAST + name: array for name, array in sums.arrays.items() if not is_constant(name)}  # their mean is kept
        diagnostics |= {"samples": int(reply.sums.arrays[SAMPLES]), "mu": mu * caution}
        return Outcome(kept, float(loss), self.time, diagnostics, passed=passed, tentative=True)

    def step(self, flow: Flow, mu: float, caution: float, loss: Tensor) -> tuple[Tensor, float]:
        """(Δ with μ ΔᵀĈΔ ≤ 2 min(L, s), or less by as much as μ and δ are raised, ΔᵀĈΔ)."""
        change, curvature = flow.change_and_curvature(self.time, mu, self.delta * caution)
        short = min(1.0, math.sqrt(2 * self._unit(loss) / (caution * mu * curvature))) if curvature > 0 else 1.0
        return short * change, short**2 * curvature

    def _unit(self, loss: Tensor) -> float:
        """min(L, s)."""
        return min(float(loss), find_loss(self.loss).scale)

    def _measured(
        self, flow: Flow, w: Tensor, round: int, mu: float, caution: float, loss: Tensor
    ) -> Generator[Outgoing, list[Message], float]:
        """μ with which Ĉ has the curvature that its own step Δ meets on the cohort: Δᵀ C Δ / Δᵀ Ĉ Δ; at least `mu`."""
        change, factored = self.step(flow, mu, caution, loss)
        replies = yield Message("candidates", round, self._pack({"weights": w, _CHANGE: change}))
        met = sum(float(reply.take(_CURVATURE, ())) for reply in replies)
        samples = sum(int(reply.take(SAMPLES, ())) for reply in replies)
        most = LARGEST_MU * self.mu
        return min(most, max(self.mu, met / samples / factored)) if factored > 0 else self.mu

    def _rough(self, sums: Sums) -> bool:
        """Whether some factors lose so much of the curvature that no μ chosen beforehand fits."""
        layers = sums.layers()
        return any(shaped.shared or max(shaped.shape[1:]) > self.largest for shaped in layers)

    def for_network(self, task: Task, x: Tensor) -> tuple[Method, list[str]]:
        """Says which layers have factors that are sent as sketches."""
        lines = []
        for name, module in task.model.named_modules():
            if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or not module.weight.requires_grad:
                continue
            inputs, outputs = module.weight[0].numel() + (module.bias is not None), len(module.weight)
            sketched = [str(size) for size in (inputs, outputs) if size > self.largest]
            if sketched:
                lines.append(
                    f"layer {name!r}: curvature factors of {' and '.join(sketched)} rows are above largest = "
                    f"{self.largest}; their {sketch_rank(max(inputs, outputs))} leading directions are kept, the "
                    "others count by their mean"
                )
        return self, lines

    # The clients' side.

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        d = tuple(task.like.shape)
        if message.kind == "candidates":
            w, change = message.take("weights", d, task.like), message.take(_CHANGE, d, task.like)
            return [self._meet(task, message.round, w, change, client) for client in clients]
        w = message.of_kind("weights").take("weights", d, task.like)
        accepted, asks = take_accepted(message, w), _ASKS in message.arrays
        return [self._reply(task, message.round, w, accepted, asks, client) for client in clients]

    def _reply(
        self, task: Task, round: int, w: Tensor, accepted: Tensor | None, asks: bool, client: ClientRound
    ) -> Message:
        """The client's sums at w, and its loss there and at the last accepted weights. Where w is too far to compute
        with, all sums are 0 and the loss says that the step does not stand.
        """
        n, Y = len(client), task.training_targets(client.y)
        at = [w] if accepted is None else [w, accepted]
        losses = torch.stack([per_sample(self.loss, task.predict(v, client.x), Y).sum().double() for v in at])
        arrays = self._sums(task, w, client.x, Y, asks)
        lost = arrays is None
        if arrays is None:
            other = None if accepted is None else self._sums(task, accepted, client.x, Y, asks)
            if other is None:
                raise NumericalError("the network's derivatives are not finite: look at inputs and initialisation")
            arrays = {name: torch.zeros_like(array) for name, array in other.items()}
            losses[0] = math.inf
        losses = losses.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW).cpu()
        told = {SAMPLES: torch.tensor(n, dtype=torch.int64), LOSSES: losses}
        if asks:
            # Of a client once: afterwards it sends zeros, so that all replies look the same. A round may be repeated.
            again = lost or (_SENT in client.memory and int(client.memory[_SENT]) != round)
            arrays |= {name: torch.zeros_like(a) for name, a in arrays.items() if again and is_constant(name)}
            told[FRESH] = torch.tensor(0 if again else n, dtype=torch.int64)
            client.memory |= {} if again else {_SENT: torch.tensor(round)}
        return Message("update", round, (arrays if self.secure_sum else self._pack(arrays)) | told)

    def _sums(self, task: Task, w: Tensor, x: Tensor, Y: Tensor, asks: bool) -> dict[str, Tensor] | None:
        """The sums at w by name, without the number of samples; None where they are not finite."""
        try:
            sums = curvature_sums(task.at(w), x, Y, self.loss, task.plan(x), asks, self.largest)
        except NumericalError:
            return None
        arrays = {name: array for name, array in sums.arrays.items() if name != SAMPLES}
        return arrays if all(bool(array.isfinite().all()) for array in arrays.values()) else None

    def _meet(self, task: Task, round: int, w: Tensor, change: Tensor, client: ClientRound) -> Message:
        """What curvature the step meets on the client's samples."""
        Y = task.training_targets(client.y)
        met = step_curvature(task.at(w), client.x, Y, change, self.loss, task.plan(client.x))
        samples = torch.tensor(len(client), dtype=torch.int64)
        return Message("losses", round, {SAMPLES: samples, _CURVATURE: met.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW)})

    # Replies: read, checked and added.

    def _add_up(self, task: Task, replies: list[Message], losses: int) -> tuple[Reply, list[ClientSums]]:
        """The sum of all replies, and with `step_limit` each one's gradient and losses. One at a time, so that but for
        gradients nothing here grows with their number.
        """
        total: Reply | None = None
        clients = list[ClientSums]()
        while replies:
            one = self.read(task, replies.pop(0), task.like)
            if len(one.losses) != losses:
                raise MessageError(f"{len(one.losses)} losses where {losses} were asked for")
            clients += [ClientSums.of(one)] if self.step_limit else []
            total = one if total is None else total.plus(one)
        if total is None:
            raise TooFew("no client's sums came")
        return total, clients

    def _compared(self, reply: Reply, clients: Sequence[ClientSums]) -> Tensor:
        """Mean losses of the cohort, [1] or [2]; where single clients are seen, without those that stand out."""
        if clients and len(reply.losses) == 2:
            return trimmed_losses(clients)
        return reply.losses / reply.sums.arrays[SAMPLES].double()

    def read(self, task: Task, reply: Message, like: Tensor) -> Reply:
        """A client's sums, everything checked; in the type and on the device of `like`."""
        return read_sums(reply, task.like, like, self.secure_sum)

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """All of it, as if of `sum_samples` samples where there are more."""
        most = self.sum_samples
        share = min(1.0, most / float(reply.take(SAMPLES, ())))
        counts = {SAMPLES: reply.take(SAMPLES, ())}
        if reply.kind == "losses":
            met = share * reply.take(_CURVATURE, ()).double().clamp(max=most * LARGEST_CURVATURE)
            summand = {_CURVATURE: Addend(met, most * LARGEST_CURVATURE)}
        else:
            sums, losses, fresh = self.read(task, reply, task.like.new_empty(0, device="cpu", dtype=torch.float64))
            arrays = {name: array for name, array in sums.arrays.items() if name != SAMPLES}
            summand = {name: Addend(share * array, most * self._limit(name)) for name, array in arrays.items()}
            counts |= {FRESH: fresh} if FRESH in reply.arrays else {}
            limit = most * LARGEST_LOSS
            summand |= {LOSSES: Addend((share * losses).clamp(max=limit), limit)}
        return summand | {name: Addend(n.double().clamp(max=most), float(most)) for name, n in counts.items()}

    def _limit(self, name: str) -> float:
        """Of one sample's numbers: squares of a layer's inputs, summed over positions, are larger than all else."""
        role = name.partition("/")[2]
        return INPUT_LIMIT * self.sum_limit if role.startswith((INPUTS, CONSTANT)) else self.sum_limit

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        counts = {name: total[name].round().long() for name in (SAMPLES, FRESH) if name in total}
        doubles = {name: total[name].clamp(min=0) for name in (LOSSES, _CURVATURE) if name in total}
        arrays = {n: array.to(task.like.dtype) for n, array in total.items() if n not in (*counts, *doubles)}
        kind = "losses" if message.kind == "candidates" else "update"
        return Message(kind, message.round, arrays | counts | doubles)

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """Two sizes: its samples; the largest norm of its means, or that of the first weights where it is larger.

        Of a reply about a step, one: the mean curvature that the step meets.
        """
        if reply.kind == "losses":
            samples, met = reply.take(SAMPLES, ()), reply.take(_CURVATURE, ())
            if not 1 <= int(samples) < 2**31 or float(met) < 0:
                raise MessageError(f"a curvature of {float(met):g} over {int(samples)} samples")
            return (met / samples).double().reshape(1, 1)
        return sizes(self.read(task, reply, task.like.new_empty(0, device="cpu")), task.like.cpu())

    @property
    def attacks(self) -> frozenset[str]:
        return frozenset({"flood", "random", "sign-flip"})

    def corrupt(
        self, corruption: Corruption, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        """With another gradient; the curvature stays as it is, as more of it would shorten the step."""
        if corruption.kind not in ("random", "sign-flip") or reply.kind != "update":
            return reply
        arrays = {name: a for name, a in self.read(task, reply, task.like).sums.arrays.items() if name != SAMPLES}
        arrays[GRADIENT] = change_of(corruption)(arrays[GRADIENT].unsqueeze(0))[0]
        told = {name: array for name, array in reply.arrays.items() if name not in arrays and name != EXPONENTS}
        return replace(reply, arrays=(arrays if self.secure_sum else self._pack(arrays)) | told)

    def _pack(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        return pack_halves(arrays) if self.values == "float16" else arrays
