"""What a method is: the server's side of a round, and a client's; and which settings go with which method.

`round` is the server's side as a generator: it yields a question, is sent the clients' replies, parsed, checked and in
the order of the clients, and returns the outcome. `answer` is one client's side. Neither knows what carries messages.

    class Mine(Method):
        replies = {"weights": Update}              # the type of reply to each kind of question

        def round(self, task, state, round, cohort):
            replies = yield Message("weights", round, {"weights": state["weights"]})
            return Outcome({"weights": …}, train_loss=None)

        def answer(self, task, question, client):
            return Update.of(client, weights=…)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PlainSerializer
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.methods.replies import Reply, Update
from ntkfl.methods.robust import Robust
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.options import Options
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent.losses import AnyLoss, check_loss, loss_name
from ntkfl.wire.message import Message

Outgoing = Message | Mapping[int, Message]  # one question for all clients, or one for each by client id
Replies = list[Any]  # of the types that `replies` names

# Settings that only some methods have a use for.
_OF_ROWS = ("sparsity", "values")
_OF_NOISE = ("epsilon", "delta", "budget_rounds", "noise_clients", "sampling_rate")
_BOUNDS = {"updates": "update", "row_clip": "rows", "trim_losses": "rows"}  # of which kind of reply each is


@dataclass
class Outcome:
    """What a round ended with. `train_loss` is over the cohort's samples, `steps` the t chosen, where there are these.

    `tentative`: the state's weights are reported now, and count in the running average only once a later round has
    `passed` them.
    """

    state: State
    train_loss: float | None
    steps: float | None = None
    diagnostics: dict[str, float | str] = field(default_factory=dict)
    passed: Tensor | None = None
    tentative: bool = False


Round = Generator[Outgoing, Replies, Outcome]  # yields questions, is sent the replies to each, returns the outcome


class Method(Options):
    """A federated method and its options. A class outside this package is named `package.module:Class`."""

    # Schemas are built when they are first used: a run needs one method's.
    model_config = ConfigDict(defer_build=True)

    name: ClassVar[str]
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": Update}
    _privacy: ClassVar[Privacy] = Privacy()  # in place of the settings' defaults, of a method that is private by itself

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
        check_loss(self.loss)

    def _fitted(self, model: nn.Module, outputs: int, everyone: bool) -> Self:
        """A copy with options that follow from these in place of those nobody gave; itself where none do."""
        return self

    def start(self, task: Task, weights: Tensor) -> State:
        """The server's state before the first round; lines about what the network decides go to `task.notes`."""
        return {"weights": weights.clone()}

    @abstractmethod
    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The server's side of round `round` (counted from 1) with the clients whose ids are `cohort`, ascending."""

    @abstractmethod
    def answer(self, task: Task, question: Message, client: ClientRound) -> Reply:
        """A client's reply to the question, of the type that `replies` names for it."""


def fitted(method: Method, model: nn.Module, outputs: int, everyone: bool) -> Method:
    """The method with the options that follow from the network, and from whether rounds ask `everyone`, where nobody
    gave them: what a run goes on with.
    """
    return method._fitted(model, outputs, everyone)


def adds_noise(method: Method | type[Method]) -> bool:
    """Whether it is a method of differential privacy: one with an ε of its own."""
    return method._privacy.epsilon is not None


def kinds_of(method: Method | type[Method]) -> frozenset[str]:
    """The kinds of reply its clients send: rows, updates, sums."""
    return frozenset(reply.kind for reply in method.replies.values())


def privacy_of(method: Method | type[Method], given: Privacy | None = None) -> Privacy:
    """The privacy settings of a run: those given, and for the rest the method's own (CP-NTK-FL projects and shuffles,
    private methods have an ε).
    """
    own, values = (
        {n: getattr(part, n) for n in part.model_fields_set} for part in (method._privacy, given or Privacy())
    )
    return Privacy(**(own | values))


def settle(
    method: Method, privacy: Privacy | None = None, robust: Robust | Literal["on"] | None = None
) -> tuple[Privacy, Robust]:
    """The settings of a run: those given over the method's own; `ConfigError` for a combination that is refused.

    `robust="on"` is every bound there is on what this method's clients send; None is no bound, as in the papers.
    """
    if not isinstance(privacy, Privacy | None):
        raise ConfigError(f"privacy must be ntkfl.methods.Privacy(…), not {privacy!r:.60}")
    if not isinstance(robust, Robust | None) and robust != "on":
        raise ConfigError(f'robust must be "on" or ntkfl.methods.Robust(…), not {robust!r:.60}')
    own, kinds, name = privacy_of(method, privacy), kinds_of(method), method.name
    if robust == "on":
        robust = Robust.on(kinds - {"update"} if own.secure_sum else kinds)
    bounds = robust or Robust()
    sends = " and ".join(sorted("updates" if kind == "update" else kind for kind in kinds))
    if own.secure_sum and not all(reply.additive for reply in method.replies.values()):
        raise ConfigError(f"{name} needs each client's reply, and secure_sum shows only their sum: leave it out")
    for option in _changed(own, () if "rows" in kinds else _OF_ROWS):
        raise ConfigError(f"{option} is for methods that send rows, and {name} sends {sends}")
    for option in _changed(own, () if adds_noise(method) else _OF_NOISE):
        why = f"{name} adds none: take private-sums or private-ridge"
        raise ConfigError(f"{option} is for methods that add noise, and {why}")
    for option in _changed(bounds, [option for option, kind in _BOUNDS.items() if kind not in kinds]):
        bounded = _BOUNDS[option].replace("update", "updates")
        raise ConfigError(f"robust {option} bounds {bounded}, and {name} sends {sends}")
    if own.secure_sum and bounds.updates != "mean":
        raise ConfigError("robust updates compares clients, of whom a secure sum shows none: leave one of them out")
    return own, bounds


def _changed(settings: Privacy | Robust, names: Sequence[str]) -> list[str]:
    """Those of the options that differ from their defaults."""
    return [name for name in names if getattr(settings, name) != type(settings).model_fields[name].default]
