"""One round for a linear head: clients send sums, the server solves ridge regression for the last layer exactly.

The solution is that of the clients' pooled data, whatever the partition (AFL, He et al. 2025; Fed3R, Fanì et al. 2024).
The mathematics is in `tangent/ridge.py`. Sums of clients seen so far add up, each client counted once: one that comes
back sends how its sums changed, or (`keep_shares`) all of them, and the server replaces what it kept of that client.
Only the last linear layer trains: whatever is before it, such as a pretrained backbone, stays as it is.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import shake_256
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError, TooFew, unknown
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.last_layer import head_inputs, last_layer
from ntkfl.methods.ridge_message import NAMES, exact_arrays, pack_sums, take_sums, unfold
from ntkfl.tangent.ridge import PENALTIES, RidgeSums, left_out_errors, solve, total
from ntkfl.wire import Message
from ntkfl.wire.topk import VALUES

SHARE, FORGOTTEN, PENALTY, COLUMNS = "share/", "forgotten", "penalty", "columns"
_SENT, _TOTAL = "sent/", "total/"
_FRESH, _TAG = "fresh", "tag"
FOLDS = 5  # groups of clients left out in turn to choose λ; with fewer clients each of them


class SumRidge(Method):
    """w ← argmin Σ ‖f − y‖² + n λ s ‖W‖² over the last layer, from the sums of all clients seen so far."""

    name: ClassVar[str] = "sum-ridge"
    paper: ClassVar[str] = "after He et al. 2025 and Fanì et al. 2024"

    loss: str = Field("mse", description="what is reported; the last layer is always solved for squared error")
    penalty: float | None = Field(
        None, ge=0, description="λ, in units of a feature's mean variance; none: chosen by left-out clients' errors"
    )
    slack: float = Field(
        0.05, ge=0, description="the smallest λ is taken whose left-out error is within this part of the best"
    )
    values: str = Field(
        "float32", description="how sums travel: float32 (the weights' own type), float16 or 8bit (of correlations)"
    )
    features: int | None = Field(
        None, ge=1, description="random projections of the last layer's inputs that sums are taken of; default: none"
    )
    keep_shares: bool = Field(
        False, description="the server keeps each client's sums, for `ntkfl forget`; else the total"
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.values not in VALUES:
            raise unknown("kind of values", self.values, VALUES)
        if self.keep_shares and self.shuffle:
            raise ConfigError("behind a shuffler the server cannot tell whose sums came: leave keep_shares out")

    def start(self, task: Task, weights: Tensor) -> State:
        own = super().start(task, weights)
        if not self.keep_shares:
            return own
        layer = last_layer(task.model, task.outputs)
        columns = [layer.weight.start, layer.weight.stop, layer.bias.start, layer.bias.stop]
        return own | {FORGOTTEN: torch.zeros(0, dtype=torch.int64), COLUMNS: torch.tensor(columns)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        asked = Message("weights", round, {"weights": state["weights"]})
        kept = {name: t for name, t in state.items() if name not in ("weights", PENALTY)}
        if self.keep_shares:
            # A number that nobody else knows: a client can replace its own share alone.
            tags = {client: secrets.randbits(62) for client in cohort}
            replies = yield {c: _with(asked, {_TAG: torch.tensor(tag)}) for c, tag in tags.items()}
            kept |= self._shares(task, replies, {tag: client for client, tag in tags.items()}, state[FORGOTTEN])
            clients = _clients(kept)
            shares = ((_sums(kept, f"{SHARE}{client}/"), True) for client in clients)
            whole, parts = _grouped(shares, min(FOLDS, len(clients)))
        else:
            replies = yield asked
            whole, parts = self._add_up(task, replies, _sums(kept, _TOTAL) if _TOTAL + "gram" in kept else None)
            kept |= _named(whole, _TOTAL)
        solved, penalty = self.solve(parts, whole, float(state[PENALTY]) if PENALTY in state else None)
        layer = last_layer(task.model, task.outputs)
        new = layer.write(state["weights"], self.lift(solved, layer.module.in_features))
        kept |= {"weights": check_finite(new, "the solution"), PENALTY: torch.tensor(penalty, dtype=torch.float64)}
        samples = float(whole.samples)
        loss = float(whole.error(solved)) / (2 * samples * task.outputs)
        return Outcome(kept, max(loss, 0.0), None, {"samples": int(samples), "penalty": penalty})

    def _add_up(
        self, task: Task, replies: list[Message], before: RidgeSums | None
    ) -> tuple[RidgeSums, list[RidgeSums]]:
        """The sums of all clients seen so far, and those of the new ones in `FOLDS` groups, to choose λ by."""
        new = [int(reply.take(_FRESH, ())) == 1 for reply in replies]
        read = ((self.read(task, replies.pop(0)), is_new) for is_new in new)
        return _grouped(read, min(FOLDS, sum(new)), before)

    def solve(self, parts: Sequence[RidgeSums], whole: RidgeSums, before: float | None = None) -> tuple[Tensor, float]:
        """(weights [p, d2], λ) from the sums; `parts` are clients' shares of them, to choose λ by."""
        penalty = self.penalty
        if penalty is None and len(parts) > 1:
            errors = left_out_errors(parts, whole, PENALTIES, FOLDS).tolist()
            # Shrinking lowers the squared error of clients unlike the others, and with it the accuracy. An error below
            # zero, or nan, is of sums that no data have.
            good = min(errors) + self.slack * abs(min(errors))
            penalty = min(p for p, error in zip(PENALTIES, errors, strict=True) if not error > good)
        elif penalty is None:
            penalty = before if before is not None else PENALTIES[len(PENALTIES) // 2]
        return solve(whole, penalty), penalty

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = message.of_kind("weights").take("weights", tuple(task.like.shape), task.like)
        model = task.at(w)
        replies = []
        for client in clients:
            exact = self._client_sums(task, model, client.x, client.y)
            sums = RidgeSums(*(part.to(w.dtype).double() for part in exact.parts()))
            before, own = None, None
            if _TAG in message.arrays:
                told = {_TAG: message.take(_TAG, ())}
            else:
                # What is sent later is the difference to these: nothing at all where the data are the same.
                before = _sums(client.memory, _SENT) if _SENT + "gram" in client.memory else None
                own = exact_arrays(sums, w.dtype)
                client.memory |= {_SENT + name: array for name, array in own.items()}
                told = {_FRESH: torch.tensor(int(before is None), dtype=torch.uint8)}
            # What is kept is what is sent, the same arrays, where that is all of it and exact.
            if own is None or before is not None or self.values != "float32":
                change = sums if before is None else sums - before
                own = pack_sums(change, w.dtype, self.values, partial(client.randomness.uniforms, "quantisation"))
            replies.append(Message("update", message.round, {**own, **told}))
        return replies

    def _client_sums(self, task: Task, model: nn.Module, x: Tensor, y: Tensor) -> RidgeSums:
        """Over a client's samples, of what the model's last layer gets; projected as the options say."""
        return client_sums(task, model, x, y, self._signs(last_layer(model, task.outputs).module.in_features))

    def _signs(self, inputs: int) -> Tensor | None:
        """P [inputs, features]; None where features are taken as they are."""
        if self.features is None:
            return None
        if self.features >= inputs:
            raise ConfigError(f"features must be below the {inputs} that the last layer has, got {self.features}")
        return random_signs(inputs, self.features)

    def lift(self, solved: Tensor, inputs: int) -> Tensor:
        """(W; bᵀ) [inputs + 1, d2] of the layer itself: P W, where W was solved for on projected features."""
        signs = self._signs(inputs)
        return solved if signs is None else torch.cat([signs.to(solved) @ solved[:-1], solved[-1:]])

    def _shares(self, task: Task, replies: list[Message], clients: Mapping[int, int], forgotten: Tensor) -> State:
        """What is kept of the replies, which are let go one after the other."""
        found: State = {}
        while replies:
            reply = replies.pop(0)
            tag = int(reply.take(_TAG, ()))
            if tag not in clients:
                raise MessageError("sums that carry a number which no client of the round was given")
            if clients[tag] not in forgotten.tolist():
                found |= _named(self.read(task, reply), f"{SHARE}{clients[tag]}/", task.like.dtype)
        return found

    def read(self, task: Task, reply: Message) -> RidgeSums:
        """A client's sums, or how they changed, checked."""
        sums = take_sums(reply.of_kind("update"))
        inputs = last_layer(task.model, task.outputs).module.in_features
        expected = ((self.features or inputs) + 1, task.outputs)
        if sums.cross.shape != expected:
            raise MessageError(f"sums of shape {list(sums.cross.shape)}, and the last layer needs {list(expected)}")
        return sums

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """Two sizes, its samples and the norm of its mean G: sums far from all others' are no honest ones."""
        sums = self.read(task, reply)
        if not self.keep_shares and int(reply.take(_FRESH, ())) not in (0, 1):
            raise MessageError("sums are new or they are not")
        samples = sums.samples.abs()
        return torch.stack([samples, sums.gram.norm() / samples.clamp(min=1)]).reshape(1, 2)


@cache
def random_signs(inputs: int, features: int) -> Tensor:
    """P [inputs, features] of ±1/√features: for all machines the same, as it follows from the two numbers alone."""
    bits = np.frombuffer(
        shake_256(f"ntkfl ridge projection {inputs} {features}".encode()).digest(-(-inputs * features // 8)),
        dtype=np.uint8,
    )
    signs = np.unpackbits(bits, count=inputs * features).reshape(inputs, features).astype(np.float64)
    return torch.from_numpy((2 * signs - 1) / math.sqrt(features))


def client_sums(task: Task, model: nn.Module, x: Tensor, y: Tensor, project: Tensor | None = None) -> RidgeSums:
    """The sums over a client's samples of what the model's last layer gets, times `project`."""
    Y, parts, at = task.training_targets(y), list[RidgeSums](), 0
    for features, _ in head_inputs(model, task.outputs, x):
        features = features if project is None else features @ project.to(features)
        rows = slice(at, at + len(features))
        parts.append(RidgeSums.of(features, Y[rows]))
        at += len(features)
    return total(parts)


def shares_of(state: State) -> dict[int, RidgeSums]:
    """The clients' sums that a server kept, by client: whole, hence p² numbers of float64 for each."""
    return {client: _sums(state, f"{SHARE}{client}/") for client in _clients(state)}


def _clients(state: State) -> list[int]:
    """Those whose sums a server kept, in order."""
    return sorted({int(name.split("/")[1]) for name in state if name.startswith(SHARE)})


def _grouped(
    sums: Iterable[tuple[RidgeSums, bool]], folds: int = 1, before: RidgeSums | None = None
) -> tuple[RidgeSums, list[RidgeSums]]:
    """`before` and all sums, added up; and those marked, dealt in turn to `folds` groups. One at a time: a client's G
    takes p² numbers of float64, and there may be hundreds.
    """
    groups, whole, at = list[RidgeSums](), before, 0
    for one, is_marked in sums:
        whole = one if whole is None else whole + one
        if is_marked:
            fold = at % folds
            groups[fold : fold + 1] = [groups[fold] + one if fold < len(groups) else one]
            at += 1
    if whole is None:
        raise TooFew("no client's sums came")
    return whole, groups


def _named(sums: RidgeSums, prefix: str, dtype: torch.dtype = torch.float64) -> State:
    return {prefix + name: t for name, t in exact_arrays(sums, dtype).items()}


def _sums(state: Mapping[str, Tensor], prefix: str) -> RidgeSums:
    return unfold({name: state[prefix + name].double() for name in NAMES})


def _with(message: Message, arrays: dict[str, Any]) -> Message:
    return Message(message.kind, message.round, {**message.arrays, **arrays})
