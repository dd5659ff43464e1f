"""What clients of `sum-ntk-fl` send (sums at the proposed weights, losses, counts), and what they are asked.

Everything in a reply adds up: the reply of all clients is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.replies import LARGEST_LOSS, SAMPLES, WEIGHTS, Sums
from ntkfl.methods.task import Task, blank_sample
from ntkfl.tangent.sums import CONSTANT, GRADIENT, INPUTS, REST
from ntkfl.tangent.sums import Sums as TangentSums
from ntkfl.wire.message import Message

if TYPE_CHECKING:
    from ntkfl.methods.base import Method
    from ntkfl.methods.sums.sum_ntk_fl import SumNTKFL

LOSSES, FRESH, CURVATURE, CHANGE, ASKS = "losses", "fresh", "curvature", "change", "asks"
_ACCEPTED, _STEP, _SCALE = "accepted", "step", "scale"
_LARGEST_CURVATURE = 1e4  # of one sample, in secure sums
_INPUT_LIMIT = 100.0  # secure sums: an input factor sums squares over positions, and exceeds other arrays by so much
TRIMMED = 0.2  # share of clients at either end whose losses do not count when two weights are compared
FAR = 10.0  # the most that a client's loss counts for, in units of the median client's
_ROUGH = 2.0**-5  # part of the accepted weights' norm by which 8 bits may miss them


class FactorSums(Sums):
    """`samples` [], and the curvature's factors over these, named as in `tangent/sums.py`."""

    @classmethod
    def limit(cls, name: str) -> float:
        large = name == CHANGE or name.partition("/")[2].startswith((INPUTS, CONSTANT))
        return super().limit(name) * (_INPUT_LIMIT if large else 1.0)

    @classmethod
    def of(cls, task: Task, values: str, arrays: Mapping[str, Tensor]) -> Self:
        """A reply whose sums, but no counts and losses, travel in halves where `values` says so, except under masks."""
        halves = values == "float16" and not task.privacy.secure_sum
        return cls(arrays, tuple(arrays.keys() - {*cls.counts, *cls.bounded}) if halves else ())

    def sums(self, like: Tensor) -> TangentSums:
        """Factors, number of samples and, if it was sent, the gradient, on the device and in the type of `like`."""
        names = [name for name in self.arrays if name in (GRADIENT, REST, SAMPLES) or "/" in name]
        return TangentSums({name: self.take(name, None, like) for name in names})

    def check(self, task: Task) -> None:
        """Factors whose shapes are those of layers of this network."""
        super().check(task)
        like = task.like.new_empty(0, device="cpu")
        no_gradient = {} if GRADIENT in self.arrays else {GRADIENT: like.new_zeros(()).expand(task.like.numel())}
        TangentSums({**self.sums(like).arrays, **no_gradient}).layers()

    def sizes(self, task: Task) -> Tensor:
        """Its samples, and the largest norm of its means, or that of the network's first weights where it is larger:
        [1, 2].
        """
        arrays = [
            array for name, array in self.arrays.items() if array.is_floating_point() and name not in self.bounded
        ]
        norms = [torch.linalg.vector_norm(array.to(task.like.cpu())) for array in arrays]  # may be inf: extreme
        samples = torch.tensor(float(self.samples), dtype=torch.float64)
        largest = torch.stack([task.like.cpu().norm() * samples, *norms]).amax() / samples
        return torch.stack([samples, largest]).unsqueeze(0)


class CurvatureSums(FactorSums):
    """Sums over a client's samples at the proposed weights w.

    `gradient` [d] and the curvature's factors, named as in `tangent/sums.py`; `samples` []; `losses` float64 [1], or
    [2] with those at the last accepted weights behind them; `fresh` [], the samples behind constant factors, where
    these are asked for. Other arrays are left to a derived method.
    """

    counts = (SAMPLES, FRESH)
    bounded = {LOSSES: LARGEST_LOSS}
    vectors = (GRADIENT,)

    @classmethod
    def blank(cls, method: SumNTKFL, task: Task, question: Message) -> Self:  # type: ignore[override]
        """Shapes are those of the method's `curvature` for one sample of zeros."""
        (x, y), asks = blank_sample(task), ASKS in question.arrays
        arrays = method.curvature(task, task.like, x, task.training_targets(y), asks)
        arrays |= {name: torch.tensor(1) for name in (cls.counts if asks else (SAMPLES,))}
        losses = torch.zeros(1 if accepted_weights(question, task.like) is None else 2, dtype=torch.float64)
        return cls.of(task, method.values, arrays | {LOSSES: losses})

    @property
    def losses(self) -> Tensor:
        """Sums of losses at the proposed and, after the first round, the last accepted weights: float64 [1] or [2]."""
        return self.take(LOSSES, (None,)).double()

    @property
    def fresh(self) -> int:
        """Samples behind the constant factors: all, or none of a client that sent these in an earlier round."""
        return int(self.take(FRESH, ())) if FRESH in self.arrays else 0

    def check(self, task: Task) -> None:
        """Counts that fit each other, losses, and a gradient [d]."""
        self.vector(GRADIENT, task.like.cpu())
        super().check(task)
        # A total may be partly of clients that sent their constant factors before.
        some = range(self.samples + 1) if task.privacy.secure_sum else (0, self.samples)
        if self.fresh not in some:
            raise MessageError(f"constant factors of {self.fresh} of {self.samples} samples")
        if not 1 <= len(self.losses) <= 2:
            raise MessageError(f"{len(self.losses)} losses, where one or two are asked for")


class StepCurvature(Sums):
    """`curvature` [], n Δᵀ C Δ over a client's n samples: the exact curvature that the step Δ meets; and `samples`."""

    bounded = {CURVATURE: _LARGEST_CURVATURE}

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        return cls({SAMPLES: torch.tensor(1), CURVATURE: torch.zeros((), dtype=torch.float64)})

    @property
    def curvature(self) -> float:
        return float(self.take(CURVATURE, ()))

    def check(self, task: Task) -> None:
        self.take(CURVATURE, ())
        super().check(task)

    def sizes(self, task: Task) -> Tensor:
        """The mean curvature that the step meets, [1, 1]."""
        return torch.tensor([[self.curvature / self.samples]], dtype=torch.float64)


def trimmed_losses(losses: Tensor, samples: Tensor) -> Tensor:
    """Mean losses [2], of clients' sums [M, 2] over `samples` [M], without the clients whose loss grew most, and least,
    from the second weights to the first, and with none that drowns the others: a few liars must not make a good step
    look bad, nor a bad one good.
    """
    order = (losses[:, 0].clamp(min=1e-30).log() - losses[:, 1].clamp(min=1e-30).log()).argsort()
    cut = int(TRIMMED * len(losses))
    kept = order[cut : len(losses) - cut]
    means = losses[kept] / samples[kept].unsqueeze(1)
    most = FAR * means[:, 1].median()
    means = means * (most / means[:, 1].clamp(min=1e-30)).clamp(max=1).unsqueeze(1)
    return (samples[kept] @ means) / samples[kept].sum()


def total_sums(replies: Sequence[FactorSums], like: Tensor) -> TangentSums:
    """What the replies' sums add up to, on the device and in the type of `like`."""
    return reduce(add, (reply.sums(like) for reply in replies))


def stacked_losses(replies: Sequence[CurvatureSums], wanted: int) -> Tensor:
    """Each client's sums of losses, float64 [M, wanted]."""
    for reply in replies:
        if len(reply.losses) != wanted:
            raise MessageError(f"{len(reply.losses)} losses where {wanted} were asked for")
    return torch.stack([reply.losses for reply in replies])


def weights_question(round: int, w: Tensor, accepted: Tensor | None, asks: bool, halves: bool) -> Message:
    """Asks for sums at w [d], for losses there and at the last accepted weights, and with `asks` for constant factors.

    The accepted weights travel as the step to them in 8 bits, scaled by its largest number: what is judged is one loss.
    Where that is too rough, as after a step to far-off weights, they travel whole.
    """
    arrays, reals = {WEIGHTS: w}, [WEIGHTS]
    if accepted is not None:
        step = w - accepted
        scale = (step.abs().max() / 127).clamp(min=torch.finfo(torch.float32).tiny).float()
        coarse = (step / scale).round()
        if float((coarse * scale - step).norm()) <= _ROUGH * float(accepted.norm()):
            arrays |= {_STEP: coarse.to(torch.int8), _SCALE: scale}
        else:
            arrays[_ACCEPTED] = accepted
            reals.append(_ACCEPTED)
    if asks:
        arrays[ASKS] = torch.tensor(1, dtype=torch.uint8)
    return Message("weights", round, arrays, tuple(reals) if halves else ())


def accepted_weights(question: Message, w: Tensor) -> Tensor | None:
    """The last accepted weights [d] beside the proposed ones w; None in the first round."""
    if _ACCEPTED in question.arrays:
        return question.vector(_ACCEPTED, w)
    if _STEP not in question.arrays:
        return None
    return w - question.vector(_STEP, w) * question.take(_SCALE, (), w)
