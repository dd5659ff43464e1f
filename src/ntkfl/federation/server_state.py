"""What the server of a run has learned so far, and how it draws a round's clients."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from ntkfl.errors import RunFolderError
from ntkfl.federation.seeds import derive
from ntkfl.methods import Method, Outcome, State, Task
from ntkfl.methods.task import STATISTICS, load_statistics
from ntkfl.tangent.parameters import load_flat

Batch = tuple[Tensor, Tensor]


class RunningAverage:
    """The weights that are reported and saved, never what training goes on from.

    w̄ ← e w̄ + (1−e) w with e = min(cap, n/(n+5)) for the n-th weights, from 0: the first count whole, all fade.
    """

    def __init__(self, start: Tensor, cap: float) -> None:
        self.settled, self.cap, self.count = start.clone(), cap, 0
        self.tentative: Tensor | None = None  # counts in `value`, and no longer once it is replaced

    @property
    def value(self) -> Tensor:
        return self.settled if self.tentative is None else self._with(self.tentative)

    def add(self, weights: Tensor) -> None:
        self.settled = self._with(weights)
        self.count += 1

    def _with(self, weights: Tensor) -> Tensor:
        e = min(self.cap, self.count / (self.count + 5))
        return e * self.settled + (1 - e) * weights


class ServerState:
    """The method's state and the running average of its weights: what a checkpoint holds."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.state = method.start(task, task.like)
        self.average = RunningAverage(self.flat_weights(), method.average)

    def advance(self, outcome: Outcome) -> None:
        """Take over what a round ended with, by name as `restore` does: a question asked again has the same bytes."""
        self.state = dict(sorted(outcome.state.items()))
        if outcome.passed is not None:
            self.average.add(self.flat_weights(outcome.passed))
        own = self.flat_weights(outcome.reported)
        self.average.tentative = own if outcome.tentative else None
        if not outcome.tentative:
            self.average.add(own)

    def flat_weights(self, weights: Tensor | None = None) -> Tensor:
        """The state's weights, or others, and behind them the running statistics that are averaged with them."""
        own = self.state["weights"] if weights is None else weights
        return torch.cat([own, *([self.state[STATISTICS]] if STATISTICS in self.state else [])])

    def parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [d], statistics [b]) of what `flat_weights` gives; b is 0 for a network without any."""
        d = self.task.like.numel()
        return flat[:d], flat[d:]

    def evaluate(self, batch: Batch, *flat: Tensor) -> list[tuple[float | None, float]]:
        """(accuracy, mean loss) of each of these weights and statistics; no accuracy for real-valued targets."""
        x, y = batch
        found = []
        for weights, own in map(self.parts, flat):
            if len(own):
                load_statistics(self.task.model, own)
            found.append(self.task.predict(weights, x))
        outputs, labels = torch.cat(found), torch.cat([y] * len(flat))
        losses = self.task.losses(outputs, labels).double().view(len(flat), len(y)).mean(1)
        if y.is_floating_point():
            return [(None, loss) for loss in losses.tolist()]
        right = (outputs.argmax(1) == labels).double().view(len(flat), len(y)).mean(1)
        return [(accuracy, loss) for accuracy, loss in torch.stack([right, losses], 1).tolist()]

    def trained(self, model: nn.Module) -> nn.Module:
        """A copy of `model` with the averaged weights and statistics."""
        result = copy.deepcopy(model)
        weights, own = self.parts(self.average.value.to(next(result.parameters()).device))
        load_flat(result, weights)
        if len(own):
            load_statistics(result, own)
        return result

    def checkpoint(self) -> State:
        return {f"state/{name}": t for name, t in self.state.items()} | {
            "averaged": self.average.settled,
            "averages": torch.tensor(self.average.count),
            "tentative": torch.tensor(self.average.tentative is not None),
        }

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint; `RunFolderError` for one that is of something else."""
        placed = {name: t.to(self.task.like.device) for name, t in tensors.items()}
        needed = ("averaged", "averages", "tentative", "state/weights")
        own = {name: t.shape for name, t in self.checkpoint().items() if name in needed}
        if any(name not in placed or placed[name].shape != shape for name, shape in own.items()):
            raise RunFolderError("the checkpoint is not of this model: it cannot be resumed from")
        self.average.settled, self.average.count = placed["averaged"], int(placed["averages"])
        self.state = {k.removeprefix("state/"): t for k, t in sorted(placed.items()) if k.startswith("state/")}
        self.average.tentative = self.flat_weights() if bool(placed["tentative"]) else None


def draw_cohort(seed: int, count: int, size: int, round: int) -> list[int]:
    """`size` of `count` clients, ascending, drawn for the round: the same for the same seed, and no secret."""
    rng = np.random.Generator(np.random.PCG64(derive(seed, "cohort", round)))
    return sorted(int(i) for i in rng.choice(count, size, replace=False))
