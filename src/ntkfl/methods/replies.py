"""What a client sends: one of three kinds of typed value, parsed once, right after the transport.

    Rows     one row per sample (per-sample Jacobian, outputs, label): splits into rows that a shuffler can mix
    Update   where local training ended, with its samples and loss: a weighted mean adds up
    Sums     totals over a client's samples (gradient, curvature factors, counts): they add up

A method names a type of reply for each kind of question it asks (`Method.replies`). The type says which arrays it
holds, checks them, measures them (`sizes`), adds them (`addends`, `from_total`) and splits them (`split`, `join`);
`blank` says how large an honest one is. Validation, secure sums, shuffling, audits and Byzantine studies need no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError
from ntkfl.methods.task import STATISTICS, ClientRound, Task, statistics_of
from ntkfl.privacy.settings import SUM_LIMIT
from ntkfl.wire.message import Message, NamedArrays, check_finite_arrays, describes, join_rows, split_rows

if TYPE_CHECKING:
    from ntkfl.methods.base import Method

SAMPLES, LOSS, WEIGHTS, STEPS = "samples", "loss", "weights", "steps"
LARGEST_LOSS, MOST_STEPS = 100.0, 1e5  # in secure sums: of one sample, and of one client in a round


class Addend(NamedTuple):
    """An array that is summed over clients, and the largest absolute value that one client's numbers may have.

    `by_samples`: only a client of more than `sum_samples` samples has numbers beyond it.
    """

    values: Tensor
    limit: float
    by_samples: bool = False


Addends = dict[str, Addend]


class Reply(NamedArrays):
    """Named arrays of one client (or, from a shuffler or a secure sum, of many). `halves` of them travel as float16."""

    arrays: dict[str, Tensor]
    additive: ClassVar[bool] = False  # whether a method's round needs no more than the sum over clients
    sampled: ClassVar[bool] = False  # whether it splits into one row per sample, rather than one per client
    # How many times the median of all replies one may measure, in each of the ways that `sizes` measures it.
    extreme: ClassVar[tuple[float, ...]] = (10.0,)
    vectors: ClassVar[tuple[str, ...]] = ()  # arrays [d] that move the weights

    def __init__(self, arrays: Mapping[str, Tensor], halves: tuple[str, ...] = ()) -> None:
        self.arrays, self.halves = dict(arrays), halves

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.arrays.items())
        return f"{type(self).__name__}({shapes})"

    def message(self, round: int) -> Message:
        """As it travels: arrays in the order of their names, so that all clients' replies look the same."""
        arrays = {name: array.detach().cpu() for name, array in sorted(self.arrays.items())}
        return Message(self.kind, round, arrays, tuple(sorted(self.halves)))

    @classmethod
    def parse(cls, message: Message, task: Task) -> Self:
        """The reply in a message; `MessageError` with the reason where a round could not use it."""
        message.of_kind(cls.kind)
        check_finite_arrays(message.arrays)
        reply = cls(message.arrays, message.halves)
        reply.check(task)
        return reply

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        """A reply of the form that an honest client's reply to the question has, its numbers of no meaning. The sizes
        of sealed rows and of masked vectors follow from it.
        """
        raise ConfigError(f"{cls.__name__} has no `blank` form: it cannot be shuffled or summed under masks")

    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Self:
        """The reply with these in place of its own. A type whose vectors are packed overrides this and `vector`."""
        return type(self)(self.arrays | dict(vectors), self.halves)

    def check(self, task: Task) -> None:
        """`MessageError` unless all arrays are there and fit the network."""

    def sizes(self, task: Task) -> Tensor | None:
        """How large each of its rows is, in one or more ways, [rows, k]: one far beyond the others is no honest one.

        None where size says nothing.
        """
        return None

    def __len__(self) -> int:
        """Rows it splits into."""
        return 1

    def split(self) -> list[Self]:
        """Its rows, each of which says as little as possible of whose it is: what a shuffler mixes."""
        return [self]

    @classmethod
    def join(cls, rows: Sequence[Self]) -> list[Self]:
        """Rows of many clients, in any order, as replies for `round`."""
        return list(rows)

    def addends(self, method: Method, task: Task, question: Message) -> Addends:
        """What the reply to `question` adds to a sum over clients."""
        raise ConfigError(f"replies of kind {self.kind!r} do not add up: leave secure_sum out")

    @classmethod
    def from_total(
        cls, method: Method, task: Task, question: Message, total: Mapping[str, Tensor], clients: int
    ) -> Self:
        """The reply that holds the sum of the clients' addends (float64, on the CPU)."""
        raise ConfigError(f"replies of kind {cls.kind!r} do not add up: leave secure_sum out")


class Rows(Reply):
    """Arrays with a row per sample; those that describe the network are the same in every row."""

    kind = "rows"
    sampled = True

    def __len__(self) -> int:
        return len(next(a for name, a in self.arrays.items() if not describes(name)))

    def split(self) -> list[Self]:
        """n replies of one row each; arrays that describe the network are in all of them."""
        return [type(self)(row, self.halves) for row in split_rows(self.arrays)]

    @classmethod
    def join(cls, rows: Sequence[Self]) -> list[Self]:
        """One reply of all rows, in the order given."""
        return [cls(join_rows([row.arrays for row in rows]), rows[0].halves)] if rows else []


class Update(Reply):
    """Vectors [d] that local training ended with, the client's number of samples, the mean loss met on the way, and the
    running statistics of batch normalisation where the network has some.
    """

    kind = "update"
    additive = True
    vectors: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    counts: ClassVar[tuple[str, ...]] = ()  # whole numbers [] beside samples, such as steps

    @classmethod
    def of(cls, client: ClientRound, loss: Tensor | None = None, **arrays: Tensor) -> Self:
        """A client's reply, with its number of samples."""
        arrays[SAMPLES] = torch.tensor(len(client), dtype=torch.int32)
        return cls(arrays if loss is None else arrays | {LOSS: loss.detach().to(torch.float32)})

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        arrays = {name: torch.zeros_like(task.like) for name in cls.vectors}
        arrays |= {name: torch.ones((), dtype=torch.int32) for name in (SAMPLES, *cls.counts)} | {LOSS: torch.ones(())}
        return cls(arrays | {name: torch.zeros_like(own) for name, own in statistics_of(task.model).items()})

    @property
    def samples(self) -> int:
        return int(self.take(SAMPLES, ()))

    @property
    def loss(self) -> float | None:
        """None where clients keep it to themselves."""
        return float(self.take(LOSS, ())) if LOSS in self.arrays else None

    def check(self, task: Task) -> None:
        """Vectors of d numbers, at least one sample and one step, statistics of the network's size or none."""
        for name in self.vectors:
            self.vector(name, task.like.cpu())
        if not 1 <= self.samples < 2**31:
            raise MessageError(f"an update trained on {self.samples} samples")
        if STEPS in self.arrays and float(self.take(STEPS, ())) < 1:
            raise MessageError("an update of no local steps")
        if STATISTICS in self.arrays:
            if not (own := statistics_of(task.model)):
                raise MessageError("statistics of batch normalisation, which this network has not")
            self.vector(STATISTICS, own[STATISTICS])

    def sizes(self, task: Task) -> Tensor | None:
        """The largest norm of its vectors, or that of the network's first weights where none is larger: [1, 1]."""
        like = task.like.cpu()
        norms = [like.double().norm(), *(self.vector(name, like).double().norm() for name in self.vectors)]
        return torch.stack(norms).amax().reshape(1, 1)

    def addends(self, method: Method, task: Task, question: Message) -> Addends:
        """p·v of every array v, weights as their change. p is 1, or where clients count by their samples
        min(n, sum_samples) / sum_samples, and then the samples are summed too.
        """
        if STATISTICS in self.arrays:
            raise ConfigError("statistics of batch normalisation are not summed: use group normalisation")
        most, p, found = task.privacy.sum_samples, 1.0, Addends()
        if by_samples(method):
            counted = float(min(self.samples, most))
            p = counted / most
            found[SAMPLES] = Addend(torch.tensor(counted, dtype=torch.float64), float(most))
        limits = {LOSS: LARGEST_LOSS, STEPS: MOST_STEPS}
        for name, array in self.arrays.items():
            value = array.double().cpu()
            if name == WEIGHTS:
                value = value - question.take(WEIGHTS).double().cpu()
            if name != SAMPLES:
                found[name] = Addend(p * value, limits.get(name, SUM_LIMIT))
        return found

    @classmethod
    def from_total(
        cls, method: Method, task: Task, question: Message, total: Mapping[str, Tensor], clients: int
    ) -> Self:
        """Σ p v / Σ p, weights added to those broadcast."""
        counted = float(total[SAMPLES]) if SAMPLES in total else float(clients)
        if counted < 1:
            raise MessageError("a total over no samples")
        weight = counted / task.privacy.sum_samples if SAMPLES in total else counted
        arrays = {name: array / weight for name, array in total.items() if name != SAMPLES}
        if WEIGHTS in arrays:
            arrays[WEIGHTS] = question.take(WEIGHTS).double().cpu() + arrays[WEIGHTS]
        if STEPS in arrays:
            arrays[STEPS].clamp_(min=1)  # as every client's are; rounding may leave a little less
        whole = {name: array.to(task.like.dtype) for name, array in arrays.items()}
        return cls(whole | {SAMPLES: torch.tensor(round(counted), dtype=torch.int64)})


class Sums(Reply):
    """Totals over a client's samples, with their number: everything adds up."""

    kind = "sums"
    additive = True
    counts: ClassVar[tuple[str, ...]] = (SAMPLES,)  # whole numbers
    bounded: ClassVar[Mapping[str, float]] = {}  # float64, not negative: the most that one sample adds

    @property
    def samples(self) -> int:
        return int(self.take(SAMPLES, ()))

    @classmethod
    def limit(cls, name: str) -> float:
        """The largest number that one sample adds to this array, in a secure sum."""
        return cls.bounded.get(name, SUM_LIMIT)

    def check(self, task: Task) -> None:
        """At least one sample, and no negative total of what no sample makes negative."""
        if not 1 <= self.samples < 2**31:
            raise MessageError(f"sums over {self.samples} samples")
        for name in self.bounded:
            if name in self.arrays and bool((self.arrays[name] < 0).any()):
                raise MessageError(f"{name!r} is below zero")

    def addends(self, method: Method, task: Task, question: Message) -> Addends:
        """All arrays, as if of `sum_samples` samples where there are more."""
        most = task.privacy.sum_samples
        share, found = min(1.0, most / self.samples), Addends()
        for name, array in self.arrays.items():
            value, limit = array.double().cpu(), most * self.limit(name)
            if name in self.counts:
                found[name] = Addend(value.clamp(max=most), float(most))
            else:
                found[name] = Addend((share * value).clamp(max=limit) if name in self.bounded else share * value, limit)
        return found

    @classmethod
    def from_total(
        cls, method: Method, task: Task, question: Message, total: Mapping[str, Tensor], clients: int
    ) -> Self:
        arrays = {}
        for name, array in total.items():
            if name in cls.counts:
                arrays[name] = array.round().long()
            else:
                arrays[name] = array.clamp(min=0) if name in cls.bounded else array.to(task.like.dtype)
        return cls(arrays)


def by_samples(method: Method) -> bool:
    """Whether the method's clients count by their samples, rather than equally."""
    return getattr(method, "weighting", "samples") == "samples"
