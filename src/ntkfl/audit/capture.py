"""One round as it went over the wire: what attacks read, and beside it the truth they are scored against.

A planned run is played to the round and listened to. A finished one is replayed from its settings, data and seed; every
record met on the way must then equal the one in its history.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.data import Federated
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.run_folder import Record, RunFolder, called
from ntkfl.federation.simulation import simulation_of
from ntkfl.methods import Method, Task
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import STEPS, WEIGHTS, Reply, Update
from ntkfl.privacy.projection import Projection
from ntkfl.wire import Message

OnRound = Callable[[Record, Record], None]


@dataclass(frozen=True)
class Capture:
    """One round as it went over the wire, decoded from its bytes."""

    round: int
    method: Method
    task: Task  # network and loss: task.at(w), task.predict(w, x)
    broadcast: Message  # what every client received first ("weights"; where each got its own, the first client's)
    uploads: list[Reply]  # parsed: one per client in order of `cohort`, or, shuffled, joined rows
    cohort: tuple[int, ...]  # ids, known to the aggregator
    truth: list[tuple[Tensor, Tensor]] = field(repr=False)  # (x as the network took it, y) a client: for scoring only
    raw: list[Tensor] = field(repr=False)  # the unprojected inputs a client: for scoring only
    sent_by: list[tuple[int, int]] = field(repr=False)  # shuffled: (client, its n-th row) a row: for scoring only
    after: Tensor = field(repr=False)  # the weights [d] that the round ended with, which the next broadcast tells
    projection: Projection | None = field(default=None, repr=False)  # clients and the key server know it, nobody else
    public: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # raw x, y anybody may have: the test set
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and std that normalised pixels in 0..1
    masked: bool = False  # the run has secure sums: of what clients sent, the aggregator has the total alone

    @property
    def reply(self) -> type[Reply]:
        """The type of the uploads."""
        return self.method.replies[self.broadcast.kind]

    @property
    def weights(self) -> Tensor:
        """The broadcast weights w [d], as clients read them."""
        return self.broadcast.take("weights", None, self.task.like)

    @property
    def asker(self) -> str:
        """The role that can ask about a record: with a projection the aggregator needs help to place it."""
        return "aggregator" if self.projection is None else "aggregator+insider"

    def placed(self, x: Tensor) -> Tensor:
        """Raw inputs as the network takes them."""
        x = x.to(self.weights) if x.is_floating_point() else x
        return x if self.projection is None else self.projection(x)

    def local_model(self, upload: Reply) -> tuple[Tensor, float] | None:
        """Where a client's local training ended: its weights [d], and how far along the gradient that is, which is the
        learning rate times the steps. None if clients did not train locally.

        Methods send weights, or their change over the learning rate and, where they count steps, over these.
        """
        method = self.method
        if not isinstance(upload, Update) or not isinstance(method, LocalTraining):
            return None
        w = self.weights
        epochs = (method.local_epochs or 0) * -(-upload.samples // method.batch_size)
        counted = STEPS in upload.arrays
        steps = int(upload.take(STEPS)) if counted else epochs or method.local_steps
        name = upload.vectors[0]
        sent = upload.vector(name, w)
        weights = sent if name == WEIGHTS else w - method.lr * (steps if counted else 1) * sent
        return weights, method.lr * steps

    def aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, raw) of every row in the order the aggregator has them: for scoring only."""
        xs, ys = zip(*self.truth, strict=True)
        rows = torch.cat(xs), torch.cat(ys), torch.cat(self.raw)
        if not (self.sent_by and self.reply.sampled):
            return rows
        starts = dict(zip(self.cohort, accumulate([0, *map(len, ys)]), strict=False))
        order = torch.tensor([starts[client] + n for client, n in self.sent_by])
        return rows[0][order], rows[1][order], rows[2][order]

    def images(self, x: Tensor) -> Tensor:
        """Unprojected inputs [n, ...] as pictures in 0..1, [n, C, H, W]."""
        if self.pixels is None:
            raise ConfigError("these inputs are no images")
        shape = self.raw[0].shape[1:]
        mean, std = (torch.tensor(v, dtype=x.dtype).view(-1, 1, 1) for v in self.pixels)
        return (x.reshape(len(x), *shape) * std + mean).clamp(0, 1)


class _FirstExchange:
    """The first exchange of one round: the question, the replies as the aggregator has them, and of shuffled rows who
    sent which.
    """

    def __init__(self, round: int, method: Method, shuffled: bool) -> None:
        self.round, self.method, self.shuffled = round, method, shuffled
        self.cohort: tuple[int, ...] = ()
        self.replies: list[bytes] = []
        self.sent_by: list[tuple[int, int]] = []
        self._rows: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # by a row's bytes

    def asked(self, question: Outgoing, cohort: Sequence[int]) -> None:
        """A question goes out: the first of the round is kept."""
        first = question if isinstance(question, Message) else question[cohort[0]]
        self.hearing = first.round == self.round and not self.cohort
        if self.hearing:
            self.cohort, self.question = tuple(cohort), first.encode()

    def sent(self, client: int, message: Message) -> None:
        """A client answers: of shuffled rows it is kept who sent which."""
        if self.hearing and self.shuffled:
            kind = self.method.replies[Message.decode(self.question).kind]
            for n, row in enumerate(kind(message.arrays, message.halves).split()):
                self._rows[row.message(self.round).encode()].append((client, n))

    def answered(self, replies: Sequence[Reply]) -> None:
        """The replies as the aggregator has them, and the sender of each row."""
        if self.hearing:
            self.replies = [reply.message(self.round).encode() for reply in replies]
            rows = [row.message(self.round).encode() for reply in replies for row in reply.split()]
            self.sent_by = [self._rows[row].pop() for row in rows] if self.shuffled else []
            self.hearing = False


def capture(
    config: RunConfig, round: int = 1, *, data: Federated | None = None, on_round: OnRound | None = None
) -> Capture:
    """Play a planned configuration to `round` and capture it. One with secure sums is played without the masks, to have
    what they would hide; they change nothing else but the last digits.
    """
    data, masked = data or load_data(config), config.settled[0].secure_sum
    if masked:
        given = {name: getattr(config, name) for name in config.model_fields_set}
        config = RunConfig(**given | {"privacy": config.settled[0].model_copy(update={"secure_sum": False})})
    simulation = simulation_of(config, data)
    first = _FirstExchange(round, simulation.method, simulation.task.privacy.shuffle)
    simulation.clients.listener = first
    after = simulation.run(round, callbacks=[on_round] if on_round else []).checkpoint["state/weights"]
    simulation = simulation_of(config, data)  # as it was before the first round, to ask what clients held
    task, broadcast, cohort = simulation.task, Message.decode(first.question), first.cohort
    reply, clients, rows = simulation.method.replies[broadcast.kind], simulation.clients, simulation.data.rows
    held = [simulation.data.client(i)[0] for i in cohort]
    played_by = [clients[i].at(round) for i in cohort]
    return Capture(
        round=round,
        method=simulation.method,
        task=task,
        broadcast=broadcast,
        uploads=[reply.parse(Message.decode(sent), task) for sent in first.replies],
        cohort=cohort,
        truth=[(client.x, client.y) for client in played_by],
        raw=[x[clients[i].drawn(round, len(x))] for i, x in zip(cohort, held, strict=True)],
        sent_by=first.sent_by,
        after=after,
        projection=clients.projection,
        public=simulation.data.test,
        pixels=(rows.mean, rows.std) if rows.mean else None,
        masked=masked,
    )


def capture_of_run(
    folder: Path | str,
    round: int | None = None,
    *,
    data: Federated | None = None,
    on_round: OnRound | None = None,
    allow_code: bool = False,
) -> Capture:
    """A round of a finished run (the first by default), by replaying it. The replay is exact or refused: its records
    must equal the run's. Code that its settings name is run only with `allow_code`.
    """
    run, number = RunFolder(folder), round or 1
    config = RunConfig.read(run.path / "config.toml", allow_code=allow_code) if run.holds_run else None
    history = run.records()
    if config is None or not history:
        raise RunFolderError(f"{run.path} holds no run with a finished round")
    if number > len(history):
        raise ConfigError(f"{run.path} has rounds 1 to {len(history)}, not {number}")
    advice = f"audit a run of the same settings: ntkfl audit --config {shlex.quote(str(run.path / 'config.toml'))}"
    if config.settled[0].secure_sum:
        raise ConfigError(f"{run.path} has secure sums, which a replay could not compare; {advice}")
    if gone := [client for record in history[:number] for client in record.get("forgotten") or []]:
        names = called(run.config(), gone)
        raise RunFolderError(f"{run.path} cannot be re-made: a client was forgotten since ({names}); {advice}")

    def compare(record: Record, timing: Record) -> None:
        then = history[record["round"] - 1]
        if differs := [name for name in then if then[name] != record.get(name)]:
            raise RunFolderError(
                f"{run.path} cannot be re-made here: {differs[0]} of round {record['round']} was {then[differs[0]]}, "
                f"the replay gives {record.get(differs[0])} (another machine, or another version); {advice}"
            )
        if on_round:
            on_round(record, timing)

    return capture(config, number, data=data, on_round=compare)
