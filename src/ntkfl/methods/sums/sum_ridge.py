"""One round for a linear head: clients send sums, the server solves ridge regression for the last layer exactly.

With a = (φ, 1) for the features φ that the last layer gets, and one-hot or real targets y, client m sends

    G_m = Σ a aᵀ,   C_m = Σ a yᵀ,   q_m = Σ ‖y‖²,   n_m

and the solution of the clients' pooled data, whatever the partition, follows from the totals (AFL, He et al. 2025;
Fed3R, Fanì et al. 2024): (W; b) = argmin Σ ‖f − y‖² + n λ s ‖W‖², `tangent/ridge.py`. λ is chosen by the squared error
on clients left out, which follows from the same sums.

Sums of all clients seen so far add up, each client counted once: one that comes back sends how its sums changed, or
with `keep_shares` all of them, and the server replaces what it kept of that client. Only the last linear layer trains:
whatever is before it, such as a pretrained backbone, stays as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import SAMPLES, WEIGHTS, Sums
from ntkfl.methods.sums.last_layer import head_inputs, last_layer
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.tangent.ridge import PENALTIES, RidgeSums, left_out_errors, solve, total
from ntkfl.tangent.sums import Factor
from ntkfl.wire.message import Message

GRAM, CROSS, SQUARES, FRESH, TAG = "gram", "cross", "squares", "fresh", "tag"
SHARE, PENALTY, COLUMNS = "share/", "penalty", "columns"
_SENT, _TOTAL = "sent/", "total/"
FOLDS = 5  # groups of clients left out in turn to choose λ; with fewer clients each of them
SLACK = 0.05  # the smallest λ is taken whose left-out error is within this part of the best


class RidgeReply(Sums):
    """A client's `samples` [], `gram` (the upper triangle of G, p (p + 1) / 2 numbers), `cross` [p, d2] and `squares`
    [], p being the features and one; or how they changed.

    `fresh` [] uint8 is 1 from a client that sends for the first time. Where the server keeps each client's sums, `tag`
    [] stands in its place: a number that the server gave to this client alone.
    """

    additive = False  # a total would show what clients add that are new

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        arrays = {name: task.like.new_zeros(shape) for name, shape in _shapes(task).items()}
        mark = {TAG: question.take(TAG, ())} if TAG in question.arrays else {FRESH: torch.tensor(1, dtype=torch.uint8)}
        return cls(arrays | mark)

    @property
    def ridge(self) -> RidgeSums:
        """In float64, made at every call: G takes p² numbers, of which a cohort's replies need not all be held."""
        return read_sums(self.arrays)

    @property
    def is_new(self) -> bool:
        """Whether these are all of a client's sums, rather than how they changed."""
        return FRESH in self.arrays and int(self.take(FRESH, ())) == 1

    @property
    def tag(self) -> int:
        """The number that the server gave to this client alone."""
        return int(self.take(TAG, ()))

    def check(self, task: Task) -> None:
        """Arrays of the last layer's shapes, and one mark."""
        for name, shape in _shapes(task).items():
            self.take(name, shape)
        if TAG in self.arrays:
            self.take(TAG, ())
        elif int(self.take(FRESH, ())) not in (0, 1):
            raise MessageError("sums are new or they are not: fresh is 0 or 1")

    def sizes(self, task: Task) -> Tensor:
        """Its samples, and the norm of its mean G: [1, 2]."""
        samples, gram = (self.take(name).double() for name in (SAMPLES, GRAM))
        return torch.stack([samples.abs(), gram.norm() / samples.abs().clamp(min=1)]).reshape(1, 2)


class SumRidge(Method):
    """w ← argmin Σ ‖f − y‖² + n λ s ‖W‖² over the last layer, from the sums of all clients seen so far."""

    name = "sum-ridge"
    replies = {"weights": RidgeReply}

    loss: str = Field("mse", description="what is reported; the last layer is always solved for squared error")
    penalty: float | None = Field(
        None, ge=0, description="λ, in units of a feature's mean variance; none: chosen by left-out clients' errors"
    )
    keep_shares: bool = Field(False, description="the server keeps each client's sums, for `ntkfl forget`")

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        """With `keep_shares` also the layer's columns."""
        if not self.keep_shares:
            return super().start(task, weights)
        if task.privacy.shuffle:
            raise ConfigError("behind a shuffler the server cannot tell whose sums came: leave keep_shares out")
        layer = last_layer(task.model, task.outputs)
        columns = torch.tensor([layer.weight.start, layer.weight.stop, layer.bias.start, layer.bias.stop])
        return super().start(task, weights) | {COLUMNS: columns}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """Totals of all clients seen so far (or the shares that are kept), and the layer that they solve for."""
        kept = {name: t for name, t in state.items() if name not in (WEIGHTS, PENALTY)}
        if self.keep_shares:
            # A number that nobody else knows: a client can replace its own share alone.
            tags = {client: torch.tensor(secrets.randbits(62)) for client in cohort}
            replies = yield {c: Message("weights", round, {WEIGHTS: state[WEIGHTS], TAG: tags[c]}) for c in cohort}
            clients = {int(tag): client for client, tag in tags.items()}
            for reply in replies:
                if reply.tag not in clients:
                    raise MessageError("sums that carry a number which no client of the round was given")
                kept |= {f"{SHARE}{clients[reply.tag]}/{name}": reply.take(name) for name in _shapes(task)}
            parts = _dealt((read_sums(kept, f"{SHARE}{client}/") for client in _clients(kept)), FOLDS)
            whole = total(parts)
        else:
            replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]})
            before = [read_sums(kept, _TOTAL)] if _TOTAL + GRAM in kept else []
            parts = _dealt((reply.ridge for reply in replies if reply.is_new), FOLDS)
            changes = _dealt((reply.ridge for reply in replies if not reply.is_new), 1)
            whole = total([*before, *parts, *changes])
            kept |= {_TOTAL + name: array for name, array in arrays_of(whole, torch.float64).items()}
        solved, penalty = self.solve(parts, whole, float(state[PENALTY]) if PENALTY in state else None)
        weights = last_layer(task.model, task.outputs).write(state[WEIGHTS], solved)
        kept |= {WEIGHTS: check_finite(weights, "the solution"), PENALTY: torch.tensor(penalty, dtype=torch.float64)}
        samples = float(whole.samples)
        loss = float(whole.error(solved)) / (2 * samples * task.outputs)
        return Outcome(kept, max(loss, 0.0), None, {"samples": int(samples), "penalty": penalty})

    def solve(self, parts: Sequence[RidgeSums], whole: RidgeSums, before: float | None = None) -> tuple[Tensor, float]:
        """((W; bᵀ) [p, d2], λ) from the sums; `parts` are clients' shares of them, to choose λ by."""
        penalty = self.penalty
        if penalty is None and len(parts) > 1:
            errors = left_out_errors(_dealt(parts, FOLDS), whole, PENALTIES).tolist()
            # Shrinking lowers the squared error of clients unlike the others, and with it the accuracy. An error below
            # zero, or nan, is of sums that no data have.
            good = min(errors) + SLACK * abs(min(errors))
            penalty = min(p for p, error in zip(PENALTIES, errors, strict=True) if not error > good)
        elif penalty is None:
            penalty = before if before is not None else PENALTIES[len(PENALTIES) // 2]
        return solve(whole, penalty), penalty

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> RidgeReply:
        """The client's sums, or how they changed since it last sent them. One forward pass; memory of p² numbers."""
        w = question.of_kind("weights").vector(WEIGHTS, task.like)
        Y, inputs = task.training_targets(client.y), head_inputs(task.at(w), task.outputs, client.x)
        arrays = arrays_of(total([RidgeSums.of(features, Y[rows]) for rows, features in inputs]), w.dtype)
        if TAG in question.arrays:
            return RidgeReply(arrays | {TAG: question.take(TAG, ())})
        # What is sent later is the difference to these: nothing at all where the data are the same.
        fresh, before = _SENT + GRAM not in client.memory, dict(client.memory)
        client.memory |= {_SENT + name: array for name, array in arrays.items()}
        if not fresh:
            arrays = {name: array - before[_SENT + name] for name, array in arrays.items()}
        return RidgeReply(arrays | {FRESH: torch.tensor(int(fresh), dtype=torch.uint8)})


def shares_of(state: State) -> dict[int, RidgeSums]:
    """The clients' sums that a server kept, by client: whole, hence p² numbers of float64 for each."""
    return {client: read_sums(state, f"{SHARE}{client}/") for client in _clients(state)}


def arrays_of(sums: RidgeSums, dtype: torch.dtype) -> State:
    """Sums by name in `dtype`, on the CPU: G as its upper triangle, p (p + 1) / 2 numbers."""
    i, j = torch.triu_indices(*sums.gram.shape)
    arrays = {SAMPLES: sums.samples, GRAM: sums.gram[i, j], CROSS: sums.cross, SQUARES: sums.squares}
    return {name: array.to(dtype).cpu() for name, array in arrays.items()}


def read_sums(arrays: Mapping[str, Tensor], prefix: str = "") -> RidgeSums:
    """The inverse of `arrays_of`, in float64, from arrays with this before their names."""
    samples, triangle, cross, squares = (arrays[prefix + name].double() for name in (SAMPLES, GRAM, CROSS, SQUARES))
    return RidgeSums(samples, Factor(triangle.unsqueeze(0)).square()[0], cross, squares)


def _shapes(task: Task) -> dict[str, tuple[int, ...]]:
    """The shape of each array of sums for the network's last layer."""
    p = last_layer(task.model, task.outputs).module.in_features + 1
    return {SAMPLES: (), GRAM: (p * (p + 1) // 2,), CROSS: (p, task.outputs), SQUARES: ()}


def _clients(state: State) -> list[int]:
    """Those whose sums a server kept, in order."""
    return sorted({int(name.split("/")[1]) for name in state if name.startswith(SHARE)})


def _dealt(sums: Iterable[RidgeSums], groups: int) -> list[RidgeSums]:
    """Sums dealt in turn to so many groups and added up there: one G takes p² numbers, and clients may be hundreds."""
    found: list[RidgeSums] = []
    for at, one in enumerate(sums):
        if at < groups:
            found.append(one)
        else:
            found[at % groups] = found[at % groups] + one
    return found
