"""NTK-FL from sums: the evolution of NTK-FL without any row leaving a client.

The linearised flow seen from the weights needs sums over samples alone: the gradient and the Kronecker factors of the
Gauss–Newton matrix (`tangent/curvature.py`). Clients send theirs; the server adds them and evolves the weights in
closed form. Everything in a reply is additive, so that replies may be added up before the server sees them.

The factored form Ĉ has less curvature than C along the step Δ that it proposes: about 13 times less for a perceptron,
30 for a small convolutional network, 300 for a residual one. μ makes up for it, and can be measured, as Δᵀ C Δ is a sum
over samples too.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.additive import LARGEST_LOSS, Addend, Summand
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.batching import alike, batched, in_order, joined
from ntkfl.methods.constant_factors import (
    constant_factors,
    no_factors_yet,
    still_asked,
)
from ntkfl.methods.corruption import change_of
from ntkfl.methods.inspection import Corruption
from ntkfl.methods.last_layer import trains_alone
from ntkfl.methods.robust_sums import ClientGradient, bounded
from ntkfl.methods.step_selection import argmin
from ntkfl.methods.sum_messages import (
    FRESH,
    LOSSES,
    Reply,
    added_up,
    gradients_apart,
    pack_steps,
    read_sums,
    read_together,
    sizes,
    take_arrays,
    take_steps,
)
from ntkfl.methods.sum_options import SumOptions
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.curvature import sets_at_once, step_curvature, sums_by_set
from ntkfl.tangent.sums import CONSTANT, GRADIENT, INPUTS, SAMPLES, is_constant
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves, pack_halves_together

INPUT_LIMIT = 100.0  # secure sums: how much larger than other numbers those of an input factor may be
_ASKS = "asks"  # in the server's message where it asks for constant factors
_STEP, _CURVATURE = "step", "curvature"  # Δ, and N Δᵀ C Δ
_OVERFLOW = 1e300  # the loss sum of weights that overflow
_ON_DEVICE = 2**28  # bytes of all replies up to which they stay where they were computed, until they are encoded
_SENT = "constant_factors_sent"  # a client's memory: the round in which it sent them


class SumNTKFL(SumOptions):
    """w ← w − φ(t(μΛ + δ)) ∘ g in the eigenbasis of the summed factors.

    One exchange per round, two where μ is measured.
    """

    name: ClassVar[str] = "sum-ntk-fl"
    paper: ClassVar[str] = "after Yue et al. 2022 and Martens & Grosse 2015"
    shows: ClassVar[str] = "sums"
    additive: ClassVar[bool] = True

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w, alternatives = state["weights"], state.get("alternatives")
        asks = still_asked(state)
        arrays = self._pack({"weights": w}) | ({_ASKS: torch.tensor(1, dtype=torch.uint8)} if asks else {})
        replies = yield Message("weights", round, arrays | pack_steps(alternatives))
        count = 1 + (0 if alternatives is None else len(alternatives))
        (sums, losses, fresh), own = self._add_up(task, replies, count)
        kept, spectra = constant_factors(state, sums, fresh, self.input_tolerance, self.input_cohorts)
        flow = Flow(sums, spectra)

        mu = self.mu
        if self.control == "judge":
            mu = float(state["mu"][argmin(losses)])
        elif self._measures(sums):
            mu = yield from self._measured(flow, w, round, float(state["mu"][0]) if "mu" in state else mu)
            kept["mu"] = torch.tensor([mu], dtype=torch.float64, device=w.device)
        clipped = 0
        if self.step_limit:
            flow, clipped = bounded(flow, own, self.step_limit, self.time, mu, self.delta)
        change = flow.change(self.time, mu, self.delta)
        new = check_finite(w + change, "the model after the flow")
        kept["weights"] = new
        if self.control == "judge":
            others = [other for other in (mu / 2, 2 * mu) if self.mu_range[0] <= other <= self.mu_range[1]]
            kept["mu"] = torch.tensor([mu, *others], dtype=torch.float64, device=w.device)
            if others:
                kept["alternatives"] = torch.stack([flow.change(self.time, o, self.delta) - change for o in others])
        samples = float(sums.arrays[SAMPLES])
        diagnostics: dict[str, float | str] = {"samples": int(samples), "mu": mu}
        if clipped:
            diagnostics["clipped_clients"] = clipped
        if self.control != "judge" and "mu" not in kept and (why := self._rough(sums)):
            diagnostics["warning"] = f"μ is fixed at {mu:g} and {why}: it may diverge where measured μ would not"
        return Outcome(kept, float(losses[0]) / samples, self.time, diagnostics)

    def start(self, task: Task, weights: Tensor) -> State:
        if self.linear_head and not trains_alone(task.model, task.outputs):
            raise ConfigError("linear_head is for networks of which a last linear layer alone trains: leave it out")
        state = super().start(task, weights) | no_factors_yet(weights)
        return state | ({"mu": torch.tensor([self.mu], dtype=torch.float64)} if self.control == "judge" else {})

    def _measures(self, sums: Sums) -> bool:
        """Whether a second exchange measures μ; of a secure sum there is one per round."""
        rough = self.control == "auto" and bool(self._rough(sums))
        return self.control == "measured" or (rough and not self.secure_sum)

    def _rough(self, sums: Sums) -> str:
        """Why some factors lose much of the curvature, so that no μ chosen beforehand fits; empty where none does."""
        layers = sums.layers()
        if any(shaped.shared for shaped in layers):
            return "positions share weights"
        return "a factor is a diagonal" if any(max(shaped.shape[1:]) > self.largest for shaped in layers) else ""

    def _measured(self, flow: Flow, w: Tensor, round: int, mu: float) -> Generator[Outgoing, list[Message], float]:
        """μ with which Ĉ has the curvature that its own step Δ meets on the cohort: Δᵀ C Δ / Δᵀ Ĉ Δ; at least `mu`."""
        change, factored = flow.change_and_curvature(self.time, mu, self.delta)
        replies = yield Message("candidates", round, self._pack({"weights": w, _STEP: change}))
        met = sum(float(reply.take(_CURVATURE, ())) for reply in replies)
        samples = sum(int(reply.take(SAMPLES, ())) for reply in replies)
        return max(self.mu, met / samples / factored) if factored > 0 else mu

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        if message.kind == "candidates":
            w, step = self._weights(task, message, "weights", _STEP)
            return [self._meet(task, message.round, w, step, client) for client in clients]
        (w,) = self._weights(task, message.of_kind("weights"), "weights")
        asks = _ASKS in message.arrays
        candidates = torch.cat([w.unsqueeze(0), w + take_steps(message, w)])
        ask = partial(self._replies, task, message.round, w, candidates, asks)
        if not batched(task):
            return [reply for client in clients for reply in ask([client])]
        few = partial(sets_at_once, task.plan(clients[0].x), largest=self.largest)
        groups = alike(clients, lambda client: few(client.x))
        made = []
        for some in groups:
            replies = ask(some)
            stay = len(clients) * replies[0].nbytes <= _ON_DEVICE
            made.append((some, replies if stay else [reply.here() for reply in replies]))
        return in_order(clients, made)

    def _replies(
        self, task: Task, round: int, w: Tensor, candidates: Tensor, asks: bool, clients: Sequence[ClientRound]
    ) -> list[Message]:
        """Of clients with as many samples each, in one computation."""
        x, y = joined([client.x for client in clients]), joined([client.y for client in clients])
        Y, plan, n = task.training_targets(y), task.plan(x), len(clients[0])
        if len(clients) == 1:
            own = curvature_sums(task.at(w), x, Y, self.loss, plan, asks, self.largest).arrays
            arrays = {name: array.unsqueeze(0) for name, array in own.items() if name != SAMPLES}
        else:
            arrays = sums_by_set(task.at(w), x, Y, self.loss, plan, len(clients), asks, self.largest)
        losses = task.candidate_losses(candidates, x, y).reshape(len(candidates), len(clients), n).sum(2).double().T
        losses = losses.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW)
        told = [{SAMPLES: torch.tensor(n, dtype=torch.int64), LOSSES: own} for own in losses.cpu().contiguous()]
        if asks:
            # Of a client once: afterwards it sends zeros, so that all replies look the same. A round may be repeated.
            again = [_SENT in c.memory and int(c.memory[_SENT]) != round for c in clients]
            for name in filter(is_constant, arrays) if any(again) else ():
                arrays[name] = arrays[name].clone()
                arrays[name][again] = 0
            for client, before, own in zip(clients, again, told, strict=True):
                own[FRESH] = torch.tensor(0 if before else n, dtype=torch.int64)
                client.memory[_SENT] = torch.tensor(int(client.memory[_SENT]) if before else round)
        packed = self._pack_together(arrays)
        return [Message("update", round, own | more) for own, more in zip(packed, told, strict=True)]

    def _pack_together(self, arrays: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Each client's own of arrays [clients, …], as they travel."""
        count = len(arrays[GRADIENT])
        if count == 1 and not self.secure_sum:
            return [self._pack({name: array[0] for name, array in arrays.items()})]
        if self.values == "float16" and not self.secure_sum:
            return pack_halves_together(arrays)
        return [{name: array[i] for name, array in arrays.items()} for i in range(count)]

    def _meet(self, task: Task, round: int, w: Tensor, step: Tensor, client: ClientRound) -> Message:
        """What curvature the step meets on the client's samples."""
        Y = task.training_targets(client.y)
        met = step_curvature(task.at(w), client.x, Y, step, self.loss, task.plan(client.x))
        samples = torch.tensor(len(client), dtype=torch.int64)
        return Message("losses", round, {SAMPLES: samples, _CURVATURE: met.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW)})

    def _weights(self, task: Task, message: Message, *names: str) -> list[Tensor]:
        """Vectors [d] of a server's message."""
        vectors = list(take_arrays(message, names, task.like).values())
        for vector in vectors:
            if vector.shape != task.like.shape:
                raise MessageError(f"weights of shape {list(vector.shape)}, and this model has {task.like.numel()}")
        return vectors

    def _add_up(self, task: Task, replies: list[Message], candidates: int) -> tuple[Reply, list[ClientGradient]]:
        """The sum of all replies, and with `step_limit` each one's gradient: at once where `check_together` read them
        so, else one at a time, so that but for gradients nothing here grows with their number.
        """
        total, own = added_up(replies), list[ClientGradient]()
        if total is not None:
            own = [ClientGradient.of(sums) for sums in gradients_apart(replies)] if self.step_limit else []
            replies.clear()
            self._check_losses(total, candidates)
        while replies:
            one = self._check_losses(self.read(task, replies.pop(0), task.like), candidates)
            own += [ClientGradient.of(one.sums)] if self.step_limit else []
            total = one if total is None else total.plus(one)
        if total is None:
            raise TooFew("no client's sums came")
        return total, own

    def _check_losses(self, reply: Reply, candidates: int) -> Reply:
        if len(reply.losses) != candidates:
            raise MessageError(f"{len(reply.losses)} losses where {candidates} were asked for")
        return reply

    def read(self, task: Task, reply: Message, like: Tensor) -> Reply:
        """A client's sums, everything checked; in the type and on the device of `like`."""
        return read_sums(reply, task.like, like, self.secure_sum)

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """All of it, as if of `sum_samples` samples where there are more."""
        sums, losses, fresh = self.read(task, reply, task.like.new_empty(0, device="cpu", dtype=torch.float64))
        most, own = self.sum_samples, float(sums.arrays[SAMPLES])
        share = min(1.0, most / own)
        arrays = {name: array for name, array in sums.arrays.items() if name != SAMPLES}
        summand = {name: Addend(share * array, most * self._limit(name)) for name, array in arrays.items()}
        counts = {SAMPLES: sums.arrays[SAMPLES]} | ({FRESH: fresh} if FRESH in reply.arrays else {})
        summand |= {name: Addend(count.clamp(max=most), float(most)) for name, count in counts.items()}
        return summand | {LOSSES: Addend((share * losses).clamp(max=most * LARGEST_LOSS), most * LARGEST_LOSS)}

    def _limit(self, name: str) -> float:
        """Of one sample's numbers: squares of a layer's inputs, summed over positions, are larger than all else."""
        role = name.partition("/")[2]
        return INPUT_LIMIT * self.sum_limit if role.startswith((INPUTS, CONSTANT)) else self.sum_limit

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        counts = {name: total[name].round().long() for name in (SAMPLES, FRESH) if name in total}
        arrays = {name: array.to(task.like.dtype) for name, array in total.items() if name not in (*counts, LOSSES)}
        return Message("update", message.round, arrays | counts | {LOSSES: total[LOSSES]})

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """Two sizes: its samples; the largest norm of its means, or that of the first weights where it is larger.

        Of a reply about a step, one: the mean curvature that the step meets.
        """
        if reply.kind == "losses":
            samples, met = reply.take(SAMPLES, ()), reply.take(_CURVATURE, ())
            if not 1 <= int(samples) < 2**31 or float(met) < 0:
                raise MessageError(f"a curvature of {float(met):g} over {int(samples)} samples")
            return (met / samples).double().reshape(1, 1)
        arrays = self.read(task, reply, task.like.new_empty(0, device="cpu")).sums.arrays
        return sizes({name: array.unsqueeze(0) for name, array in arrays.items()}, task.like.cpu())

    def check_together(self, task: Task, replies: Sequence[Message]) -> list[Tensor | None]:
        """On an accelerator replies go there as one, are looked at there, and stay there for the round."""
        if not batched(task) or self.secure_sum or replies[0].kind != "update" or EXPONENTS not in replies[0].arrays:
            return super().check_together(task, replies)
        found = sizes(read_together(replies, task.like).sums.arrays, task.like)
        return list(torch.split(found.cpu(), 1))

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
