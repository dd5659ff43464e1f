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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import WEIGHTS, Reply
from ntkfl.methods.sums.last_layer import head_inputs, last_layer
from ntkfl.methods.sums.ridge_reply import FRESH, NAMES, TAG, RidgeReply, Values, exact_arrays, pack_sums, unfold
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.tangent.ridge import PENALTIES, RidgeSums, left_out_errors, solve, total
from ntkfl.wire.message import Message

SHARE, FORGOTTEN, PENALTY, COLUMNS = "share/", "forgotten", "penalty", "columns"
_SENT, _TOTAL = "sent/", "total/"
FOLDS = 5  # groups of clients left out in turn to choose λ; with fewer clients each of them
SLACK = 0.05  # the smallest λ is taken whose left-out error is within this part of the best


class SumRidge(Method):
    """w ← argmin Σ ‖f − y‖² + n λ s ‖W‖² over the last layer, from the sums of all clients seen so far."""

    name: ClassVar[str] = "sum-ridge"
    paper: ClassVar[str] = "after He et al. 2025 and Fanì et al. 2024"
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": RidgeReply}

    loss: str = Field("mse", description="what is reported; the last layer is always solved for squared error")
    penalty: float | None = Field(
        None, ge=0, description="λ, in units of a feature's mean variance; none: chosen by left-out clients' errors"
    )
    values: Values = Field(
        "float32", description="how sums travel: float32 (the weights' own type) or 8bit (of correlations)"
    )
    keep_shares: bool = Field(False, description="the server keeps each client's sums, for `ntkfl forget`")

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        """With `keep_shares` also the layer's columns, and the clients that were forgotten."""
        if self.keep_shares and task.privacy.shuffle:
            raise ConfigError("behind a shuffler the server cannot tell whose sums came: leave keep_shares out")
        own = super().start(task, weights)
        if not self.keep_shares:
            return own
        layer = last_layer(task.model, task.outputs)
        columns = [layer.weight.start, layer.weight.stop, layer.bias.start, layer.bias.stop]
        return own | {FORGOTTEN: torch.zeros(0, dtype=torch.int64), COLUMNS: torch.tensor(columns)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """Totals of all clients seen so far (or the shares that are kept), and the layer that they solve for."""
        kept = {name: t for name, t in state.items() if name not in (WEIGHTS, PENALTY)}
        if self.keep_shares:
            # A number that nobody else knows: a client can replace its own share alone.
            tags = {client: torch.tensor(secrets.randbits(62)) for client in cohort}
            replies = yield {c: Message("weights", round, {WEIGHTS: state[WEIGHTS], TAG: tags[c]}) for c in cohort}
            kept |= self._shares(task, replies, {int(tag): c for c, tag in tags.items()}, state[FORGOTTEN])
            clients = _clients(kept)
            shares = ((_sums(kept, f"{SHARE}{client}/"), True) for client in clients)
            whole, parts = _grouped(shares, min(FOLDS, len(clients)))
        else:
            replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]})
            before = _sums(kept, _TOTAL) if _TOTAL + "gram" in kept else None
            new = sum(reply.is_new for reply in replies)
            whole, parts = _grouped(
                ((reply.ridge, reply.is_new) for reply in _let_go(replies)), min(FOLDS, new), before
            )
            kept |= _named(whole, _TOTAL)
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
            errors = left_out_errors(parts, whole, PENALTIES, FOLDS).tolist()
            # Shrinking lowers the squared error of clients unlike the others, and with it the accuracy. An error below
            # zero, or nan, is of sums that no data have.
            good = min(errors) + SLACK * abs(min(errors))
            penalty = min(p for p, error in zip(PENALTIES, errors, strict=True) if not error > good)
        elif penalty is None:
            penalty = before if before is not None else PENALTIES[len(PENALTIES) // 2]
        return solve(whole, penalty), penalty

    def _shares(self, task: Task, replies: list[RidgeReply], clients: Mapping[int, int], forgotten: Tensor) -> State:
        """What is kept of the replies. Clients that were forgotten are not counted again."""
        found: State = {}
        for reply in _let_go(replies):
            if reply.tag not in clients:
                raise MessageError("sums that carry a number which no client of the round was given")
            if clients[reply.tag] not in forgotten.tolist():
                found |= _named(reply.ridge, f"{SHARE}{clients[reply.tag]}/", task.like.dtype)
        return found

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> RidgeReply:
        """The client's sums, or how they changed since it last sent them. One forward pass; memory of p² numbers."""
        w = question.of_kind("weights").take(WEIGHTS, tuple(task.like.shape), task.like)
        exact = client_sums(task, task.at(w), client.x, client.y)
        sums = RidgeSums(*(part.to(w.dtype).double() for part in exact.parts()))
        before, arrays = None, None
        if TAG in question.arrays:
            told = {TAG: question.take(TAG, ())}
        else:
            # What is sent later is the difference to these: nothing at all where the data are the same.
            before = _sums(client.memory, _SENT) if _SENT + "gram" in client.memory else None
            arrays = exact_arrays(sums, w.dtype)
            client.memory |= {_SENT + name: array for name, array in arrays.items()}
            told = {FRESH: torch.tensor(int(before is None), dtype=torch.uint8)}
        # What is kept is what is sent, the same arrays, where that is all of it and exact.
        if arrays is None or before is not None or self.values != "float32":
            change = sums if before is None else sums - before
            arrays = pack_sums(change, w.dtype, self.values, partial(client.randomness.uniforms, "quantisation"))
        return RidgeReply(arrays | told)


def client_sums(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> RidgeSums:
    """The sums over a client's samples of the last layer's inputs. One forward pass; memory of p² numbers."""
    Y = task.training_targets(y)
    return total([RidgeSums.of(features, Y[rows]) for rows, features in head_inputs(model, task.outputs, x)])


def shares_of(state: State) -> dict[int, RidgeSums]:
    """The clients' sums that a server kept, by client: whole, hence p² numbers of float64 for each."""
    return {client: _sums(state, f"{SHARE}{client}/") for client in _clients(state)}


def _clients(state: State) -> list[int]:
    """Those whose sums a server kept, in order."""
    return sorted({int(name.split("/")[1]) for name in state if name.startswith(SHARE)})


def _let_go(replies: list[RidgeReply]) -> Iterator[RidgeReply]:
    """One after the other: a client's G takes p² numbers, and there may be hundreds of clients."""
    while replies:
        yield replies.pop(0)


def _grouped(
    sums: Iterable[tuple[RidgeSums, bool]], folds: int = 1, before: RidgeSums | None = None
) -> tuple[RidgeSums, list[RidgeSums]]:
    """`before` and all sums, added up; and those marked, dealt in turn to `folds` groups."""
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
