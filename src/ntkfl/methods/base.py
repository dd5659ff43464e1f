"""What a method is: the server's side of a round, and the clients'.

`Method.round` is the server's side as a generator: it yields a message for the clients, is sent their replies (ordered
by client id), and returns the outcome. `Method.answer` is the clients' side. Neither knows what transports the
messages, so the same two functions serve in one process and across machines.

What else a simulation, an audit or a study of Byzantine clients needs to know of a method, it asks the method:
`shows`, `read_rows`, `local_update`, `guarantees`, `attacks`, `corrupt`. Nothing outside
this package looks at which class a method is.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PlainSerializer
from torch import Tensor, nn

from ntkfl.errors import ConfigError, NumericalError
from ntkfl.methods.additive import Summand
from ntkfl.methods.inspection import Corruption, LocalUpdate, Participation, SampleRows
from ntkfl.privacy.accounting import Guarantee
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.stages import Stages
from ntkfl.tangent import Jacobian, jacobian, plan_jacobian
from ntkfl.tangent.losses import AnyLoss, check_loss, find_loss, loss_name, per_sample, targets
from ntkfl.tangent.parameters import eager, evaluating, flatten, load_flat, trainable, unflatten, with_values
from ntkfl.tangent.passes import JacobianPlan
from ntkfl.wire import Message

_ROWS = 4096  # of samples that pass through the network at once
State = dict[str, Tensor]  # what the server keeps between rounds; "weights" [d] is the model to broadcast next
Outgoing = Message | Mapping[int, Message]  # one message for all clients, or one for each by client id


@dataclass(slots=True)
class ClientRound:
    """A client as it is in one round: its data, its randomness for the round, and what it keeps between rounds."""

    id: int
    x: Tensor
    y: Tensor
    randomness: Randomness
    memory: State = field(default_factory=dict)
    statistics: Tensor | None = None  # of batch normalisation, after local training

    def __len__(self) -> int:
        return len(self.y)


@dataclass
class Outcome:
    """What a round ended with. `train_loss` is over the cohort's samples, `steps` the t chosen: where there is one.

    `reported` are weights to evaluate and save in place of the state's own, where a method trains on from others than
    it reports. `tentative`: the state's own weights are reported now, and count in the running average only where a
    later round has `passed` them.
    """

    state: State
    train_loss: float | None
    steps: float | None = None
    diagnostics: dict[str, float | str] = field(default_factory=dict)
    reported: Tensor | None = None
    passed: Tensor | None = None
    tentative: bool = False


class Task:
    """The network being trained and the data the server itself may hold. The model given is never changed."""

    def __init__(
        self,
        model: nn.Module,
        outputs: int,
        loss: AnyLoss,
        shared: tuple[Tensor, Tensor] | None = None,
        validation: tuple[Tensor, Tensor] | None = None,
        total_clients: int = 1,
        label_smoothing: float = 0.0,
    ) -> None:
        with eager(model) as own:
            self.model = copy.deepcopy(own)
        find_loss(loss)  # says before the first round where one named by its user is not there
        self.outputs, self.loss, self.label_smoothing = outputs, loss, label_smoothing
        self.shared, self.validation = shared, validation
        self.total_clients = total_clients  # of the whole federation, not of a round
        # What the server itself draws in a round, such as noise: its operating system's, unless this is a simulation.
        self.randomness: Callable[[int], Randomness] = lambda round: Randomness.fresh()
        self.like = flatten(self.model)  # device and type of weights
        self._plans: dict[Hashable, JacobianPlan] = {}

    def at(self, weights: Tensor) -> nn.Module:
        """The network with these weights loaded: one scratch copy, overwritten by the next call."""
        load_flat(self.model, weights)
        return self.model

    @torch.no_grad()
    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """f(w; x) in eval mode, [N, d2]."""
        with evaluating(self.model):
            outputs = with_values(self.model, unflatten(self.model, weights))
            return torch.cat([outputs(part) for part in torch.split(x, _ROWS)])

    @torch.no_grad()
    def candidate_losses(self, candidates: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """ℓ of every sample under each of the candidate weights [S, d]: [S, N]."""
        parameters, found = list(trainable(self.model).values()), []
        sizes = [p.numel() for p in parameters]
        with evaluating(self.model):  # as `predict`, in half the time: clients with few samples are many passes
            for w in candidates:
                for p, values in zip(parameters, torch.split(w, sizes), strict=True):
                    p.copy_(values.view_as(p))
                found.append(torch.cat([self.model(part) for part in torch.split(x, _ROWS)]))
        return per_sample(self.loss, torch.stack(found), targets(y, self.outputs, self.loss, self.like.dtype))

    def jacobian(self, weights: Tensor, x: Tensor, form: str = "auto") -> Jacobian:
        """J at these weights for the rows of x."""
        return jacobian(self.at(weights), x, form, plan=self.plan(x, form))

    def plan(self, x: Tensor, form: str = "auto") -> JacobianPlan:
        """How Jacobians of this network are made, worked out once for inputs of one shape and type."""
        kind = (form, x.shape[1:], x.dtype)
        if kind not in self._plans:
            self._plans[kind] = plan_jacobian(self.model, x, form)
        return self._plans[kind]

    def training_targets(self, y: Tensor) -> Tensor:
        """Targets [N, d2] to train on: a class keeps 1 − s of its one, the rest is spread over all. Real y as it is."""
        Y = targets(y, self.outputs, self.loss, self.like.dtype)
        s = 0.0 if y.is_floating_point() else self.label_smoothing
        return Y if s == 0 else Y.mul_(1 - s).add_(s / self.outputs)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ for each sample on its true label, [N]."""
        return per_sample(self.loss, outputs, targets(y, self.outputs, self.loss, outputs.dtype))


class Method(Stages):
    """Options common to all methods, the stages of `privacy/` among them.

    A class outside this package is named after its place, `package.module:Class`: so a configuration names it.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    trains_locally: ClassVar[bool] = False
    shows: ClassVar[str] = "updates"  # what the server sees of a client: rows, updates, sums or samples
    sampled: ClassVar[tuple[str, ...]] = ()  # kinds of replies that split into one row per sample
    # How many times the median of all rows one may measure, in each of the ways that `check` measures them.
    extreme: ClassVar[tuple[float, ...]] = (10.0,)
    sum_limit: ClassVar[float] = 10.0  # secure sums: largest number of an update, or of a gradient per sample
    additive: ClassVar[bool] = False  # whether `round` needs no more of replies than their sum: see `summand`
    model_defaults: ClassVar[Mapping[str, float]] = {}  # options of the network that suit it, where none are given

    loss: Annotated[AnyLoss, PlainSerializer(loss_name, when_used="json")] = Field(
        "ce", description="ce, mse, or package.module:name"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="part of a class label spread over all classes")
    average: float = Field(
        0.0, ge=0, lt=1, description="running average of the rounds' weights that is reported and saved; 0: none"
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if not cls.__module__.startswith("ntkfl.methods."):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        check_loss(self.loss)
        if self.secure_sum and not self.additive:
            raise ConfigError(f"{self.name} needs more of clients than the sum of their replies: leave secure_sum out")

    def start(self, task: Task, weights: Tensor) -> State:
        """The server's state before the first round."""
        return {"weights": weights.clone()}

    @abstractmethod
    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        """The server's side of round `round` (counted from 1) with the clients whose ids are `cohort`, ascending."""

    @abstractmethod
    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """The clients' side: each client's reply to `message`, in the order given."""

    def split(self, reply: Message) -> list[Message]:
        """A client's reply as rows that say as little as can be of whose they are: what a shuffler mixes."""
        return [reply]

    def join(self, rows: list[Message]) -> list[Message]:
        """Rows of many clients, in any order, as replies for `round`."""
        return rows

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """What a client's reply to the message adds to a sum over clients, with `secure_sum`."""
        raise NotImplementedError

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        """The one reply that stands for the sum of the summands of so many clients (float64, on the CPU)."""
        raise NotImplementedError

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """`MessageError` for a reply that `round` could not use.

        Else how large each of its rows is, in one or more ways, [rows, k]: one far beyond the others is no honest one.
        None where size says nothing.
        """
        for name in reply.arrays:
            reply.take(name)
        return None

    @property
    def adds_noise(self) -> bool:
        """Whether it is a method of differential privacy."""
        return False

    @property
    def most_samples(self) -> int | None:
        """Samples that a client counts for at most; None where there is no such limit."""
        return self.sum_samples if self.secure_sum else None

    # What others ask of a method; the defaults suit methods whose clients send updates.

    def read_rows(self, task: Task, reply: Message, like: Tensor | None = None) -> SampleRows:
        """The rows of a reply, where `shows` is rows; of the type and on the device of `like`, or of the weights."""
        raise ConfigError(f"replies of {self.name} have no rows of samples")

    def local_update(self, reply: Message, w: Tensor) -> LocalUpdate | None:
        """A client's local weights where the server sees them in its reply to the weights w [d]; else None."""
        return None

    def for_network(self, task: Task, x: Tensor) -> tuple[Method, list[str]]:
        """The method with those options that the network decides, for inputs such as x [1, …], and lines on which."""
        return self, []

    def promise(self, cohort: int, rounds: int) -> list[str]:
        """Lines that a simulation says of its noise before the first round."""
        return []

    def advice(self) -> list[str]:
        """Lines on options that do not do what their user may expect, said before the first round."""
        return []

    def noise_advice(self, weights: Tensor, samples: float, cohort: int, rounds: int) -> list[str]:
        """Lines on noise that drowns what so many samples of a round's clients give, known before the first round."""
        return []

    def guarantees(self, run: Participation) -> list[Guarantee]:
        """What noise is worth in such a run; none without noise."""
        return []

    @property
    def attacks(self) -> frozenset[str]:
        """Kinds of Byzantine attack that `corrupt` knows, beside those that any client can mount (byzantine.py)."""
        return frozenset()

    def corrupt(
        self, corruption: Corruption, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        """A client's `reply` to `asked`, corrupted; as it is where this kind of attack does not touch it."""
        return reply


def take_labels(message: Message, name: str, like: Tensor) -> Tensor:
    """Labels from a message: classes as int64, real-valued targets in the weights' type; on the weights' device."""
    labels = message.take(name)
    return labels.to(device=like.device, dtype=like.dtype if labels.is_floating_point() else torch.int64)


def check_finite(weights: Tensor, what: str) -> Tensor:
    """`weights` themselves, unless the round has blown up."""
    if not bool(weights.isfinite().all()):
        raise NumericalError(f"{what} has values that are not finite: the training diverged")
    return weights
