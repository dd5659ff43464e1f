"""One round as it went over the wire: what attacks read, and beside it the truth they are scored against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.run_folder import Record
from ntkfl.federation.simulation import simulation_of
from ntkfl.federation.transport import LocalTransport
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.replies import STEPS, WEIGHTS, Reply, Update
from ntkfl.privacy.projection import Projection
from ntkfl.wire import Message

Records = tuple[Tensor, Tensor]  # inputs x [n, ...] and labels or targets y [n] or [n, d2]


@dataclass(frozen=True, repr=False)
class Capture:
    """One round as it went over the wire, decoded from its bytes."""

    config: RunConfig  # as it was planned
    round: int
    method: Method
    task: Task  # network and loss: task.at(w), task.predict(w, x)
    clients: LocalTransport  # with all data and the projection
    broadcast: Message  # what every client received first ("weights"; where each got its own, the first client's)
    uploads: list[Reply]  # parsed: one per client in order of `cohort`, or, shuffled, joined rows
    cohort: tuple[int, ...]  # ids, known to the aggregator
    after: Tensor  # the weights [d] that the round ended with, which the next broadcast tells
    # For scoring only:
    truth: list[Records]  # a client's records as the network took them
    raw: list[Tensor]  # a client's inputs, unprojected
    order: Tensor | None  # shuffled: of each row its place among all rows sent

    @property
    def masked(self) -> bool:
        """Whether the run has secure sums: of what clients sent, the aggregator has the total alone."""
        return self.config.settled[0].secure_sum

    @property
    def reply(self) -> type[Reply]:
        """The type of the uploads."""
        return self.method.replies[self.broadcast.kind]

    @property
    def weights(self) -> Tensor:
        """The broadcast weights w [d], as clients read them."""
        return self.broadcast.take("weights", None, self.task.like)

    @property
    def projection(self) -> Projection | None:
        """P, where inputs are projected: clients and the key server know it, nobody else."""
        return self.clients.projection

    @property
    def asker(self) -> str:
        """The role that can ask about a record: with a projection the aggregator needs help to place it."""
        return "aggregator" if self.projection is None else "aggregator+insider"

    @property
    def members(self) -> Records:
        """All records of the round, as the network took them: for scoring only."""
        xs, ys = zip(*self.truth, strict=True)
        return torch.cat(xs), torch.cat(ys)

    @property
    def public(self) -> Records:
        """Unprojected records that anybody may have: the test set."""
        return self.clients.fed.test

    @cached_property
    def others(self) -> Records:
        """The public records as the network takes them."""
        return self.clients.place(self.public)

    @property
    def pictures(self) -> bool:
        """Whether the network takes pictures whose normalisation is known, projected or not."""
        return bool(self.clients.fed.rows.mean) and self.clients.features is None

    def local_model(self, upload: Reply) -> tuple[Tensor, float] | None:
        """Where a client's local training ended: its weights [d], and how far along the gradient that is, which is the
        learning rate times the steps. None if clients did not train locally.

        Methods send weights, or their change over the learning rate and, where they count steps, over these.
        """
        method = self.method
        if not isinstance(upload, Update) or not isinstance(method, LocalTraining):
            return None
        counted = int(upload.take(STEPS)) if STEPS in upload.arrays else 0
        epochs = (method.local_epochs or 0) * -(-upload.samples // method.batch_size)
        name, w = upload.vectors[0], self.weights
        sent = upload.vector(name, w)
        weights = sent if name == WEIGHTS else w - method.lr * (counted or 1) * sent
        return weights, method.lr * (counted or epochs or method.local_steps)

    def aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, raw) of every row of samples in the order the aggregator has them: for scoring only."""
        places = slice(None) if self.order is None else self.order
        x, y = self.members
        return x[places], y[places], torch.cat(self.raw)[places]

    def images(self, x: Tensor) -> Tensor:
        """Unprojected inputs [n, ...] as pictures in 0..1, [n, C, H, W]."""
        rows = self.clients.fed.rows
        mean, std = (torch.tensor(v, dtype=x.dtype).view(-1, 1, 1) for v in (rows.mean, rows.std))
        return (x.reshape(len(x), *self.raw[0].shape[1:]) * std + mean).clamp(0, 1)


def capture(
    config: RunConfig, round: int = 1, on_round: Callable[[Record, Record], None] = lambda record, timing: None
) -> Capture:
    """Play a planned configuration to `round` and capture its first exchange; `on_round` hears of each round.

    One with secure sums is played without the masks, to have what they would hide; they change nothing else but the
    last digits. What clients draw follows from the seed, so that they can be asked again which samples they drew.
    """
    privacy = config.settled[0].model_copy(update={"secure_sum": False})
    simulation = simulation_of(config.model_copy(update={"privacy": privacy, "repeatable": True}), load_data(config))
    clients, task, answer = simulation.clients, simulation.task, simulation.clients.respond
    heard, uploads = list[tuple[Message, ClientRound, Reply]](), list[Reply]()

    def respond(method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        """A client answers, in the order of the cohort."""
        reply = answer(method, task, question, client)
        if question.round == round and not uploads:
            heard.append((question, client, reply))
        return reply

    def received(replies: list[Reply]) -> None:
        """The replies as the aggregator has them."""
        if heard and not uploads:
            uploads.extend(type(r).parse(Message.decode(r.message(round).encode()), task) for r in replies)

    clients.respond, simulation.server.on_replies = respond, received
    end = simulation.run(round, callbacks=[on_round]).checkpoint
    questions, cohort, sent = zip(*heard, strict=True)
    held = [clients.fed.client(client.id)[0] for client in cohort]
    return Capture(
        config=config,
        round=round,
        method=simulation.method,
        task=task,
        clients=clients,
        broadcast=questions[0],
        uploads=uploads,
        cohort=tuple(client.id for client in cohort),
        after=end["state/weights"],
        truth=[(client.x, client.y) for client in cohort],
        raw=[x[clients[client.id].drawn(round, len(x))] for x, client in zip(held, cohort, strict=True)],
        order=_order(sent, uploads) if privacy.shuffle else None,
    )


def _order(sent: Sequence[Reply], received: Sequence[Reply]) -> Tensor:
    """Of each row received its place among those sent, known by its bytes: equal rows are as good as one another. A
    reply that does not split is one row.
    """
    before, after = ([row.message(1).encode() for r in replies for row in r.split()] for replies in (sent, received))
    places = defaultdict[bytes, list[int]](list)
    for place, row in enumerate(before):
        places[row].append(place)
    return torch.tensor([places[row].pop() for row in after])
