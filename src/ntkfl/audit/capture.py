"""One round as it went over the wire: what attacks read, and beside it the truth they are scored against.

A planned run is played to the round and listened to. A finished one has recordings (`ntkfl train --record-wire`), or is
replayed from its settings, data and seed; every record met on the way must then equal the one in its history.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.data import Federated
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.build import build_method, build_model, load_data
from ntkfl.federation.callbacks import Functions
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import Record, RunFolder, called
from ntkfl.federation.simulation import Simulation, execute
from ntkfl.federation.transcript import Exchange, Transcript, recorded_rounds
from ntkfl.methods import Method, Task
from ntkfl.privacy.projection import Projection
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, unpack_halves

OnRound = Callable[[Record, Record], None]


@dataclass(frozen=True)
class Capture:
    """One round as it went over the wire, decoded from its bytes."""

    round: int
    method: Method
    task: Task  # network and loss: task.at(w), task.predict(w, x)
    broadcast: Message  # what every client received first ("weights"; where each got its own, the first client's)
    uploads: list[
        Message
    ]  # replies of the first exchange: one per client in order of `cohort`, or, shuffled, joined rows
    losses: list[Message]  # replies of the second exchange (candidate losses), likewise; empty where there is none
    candidates: Message | None  # the second broadcast
    cohort: tuple[int, ...]  # ids, known to the aggregator
    truth: list[tuple[Tensor, Tensor]] = field(repr=False)  # (x as the network took it, y) a client: for scoring only
    raw: list[Tensor] = field(repr=False)  # the unprojected inputs a client: for scoring only
    senders: list[int] | None  # shuffled: the true sender of each row of the joined upload, for scoring only
    bytes_up: int
    bytes_down: int
    exchanges: tuple[Exchange, ...] = field(default=(), repr=False)  # sizes and counts, as roles other than the two see
    loss_senders: list[int] | None = None  # as `senders`, of the joined losses, for scoring only
    projection: Projection | None = field(default=None, repr=False)  # clients and the key server know it, nobody else
    public: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # raw x, y anybody may have: the test set
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and std that normalised pixels in 0..1
    after: Tensor | None = field(default=None, repr=False)  # the weights it ended with [d]; of a round that was played
    masked: bool = False  # the run has secure sums: of what clients sent, the aggregator has the total alone

    @property
    def unmasked_by_pair(self) -> bool:
        """Whether aggregator and shuffler together open each client's masked reply."""
        return self.masked

    @property
    def weights(self) -> Tensor:
        """The broadcast weights w [d], as clients read them."""
        if EXPONENTS in self.broadcast.arrays:
            return unpack_halves(self.broadcast, ("weights",), self.task.like)["weights"]
        return self.broadcast.take("weights", None, self.task.like)

    def rows_truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, raw) of all clients joined, in order of `cohort`: for scoring only."""
        xs, ys = zip(*self.truth, strict=True)
        return torch.cat(xs), torch.cat(ys), torch.cat(self.raw)

    def aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, raw) of every row in the order the aggregator has them: for scoring only."""
        x, y, raw = self.rows_truth()
        first = self.exchanges[0]
        if first.senders is None or first.samples is None or not self.method.sampled:
            return x, y, raw
        starts, at = {}, 0
        for client, (_, labels) in zip(self.cohort, self.truth, strict=True):
            starts[client] = at
            at += len(labels)
        order = torch.tensor([starts[c] + n for c, n in zip(first.senders, first.samples, strict=True)])
        return x[order], y[order], raw[order]

    def images(self, x: Tensor) -> Tensor:
        """Unprojected inputs [n, ...] as pictures in 0..1, [n, C, H, W]."""
        if self.pixels is None:
            raise ConfigError("these inputs are no images")
        shape = self.raw[0].shape[1:]
        mean, std = (torch.tensor(v, dtype=x.dtype).view(-1, 1, 1) for v in self.pixels)
        return (x.reshape(len(x), *shape) * std + mean).clamp(0, 1)


def capture(
    config: RunConfig, round: int, *, data: Federated | None = None, on_round: OnRound | None = None
) -> Capture:
    """Play a planned configuration to `round` and capture it."""
    return captures(config, [round], data=data, on_round=on_round)[round]


def captures(
    config: RunConfig, rounds: Collection[int], *, data: Federated | None = None, on_round: OnRound | None = None
) -> dict[int, Capture]:
    """Several rounds of one planned run, played once. One with secure sums is played without the masks, to have what
    they would hide; they change nothing else but the last digits.
    """
    data, masked = data or load_data(config), config.method.get("secure_sum") is True
    if masked:
        config = config.model_copy(update={"method": config.method | {"secure_sum": False}})
    heard: list[Transcript] = []
    played = config.model_copy(update={"rounds": max(rounds), "stop_at": None})
    listener = Functions(on_round=on_round, on_transcript=heard.append, transcript_rounds=rounds)
    run = execute(played, data=data, callbacks=[listener])
    simulation = _simulation(config, data)
    found = {transcript.round: replace(_capture(transcript, simulation), masked=masked) for transcript in heard}
    last = max(rounds)
    return found | {last: replace(found[last], after=run.checkpoint["state/weights"])}


def read_capture(folder: Path | str, round: int, *, data: Federated | None = None, allow_code: bool = False) -> Capture:
    """A round that was recorded. Truth, for scoring, comes from the run's settings and data; code that they name is run
    only with `allow_code`.
    """
    run = RunFolder(folder)
    transcript = Transcript.read(run, round)
    config = RunConfig.read(run.path / "config.toml", allow_code=allow_code)
    return _capture(transcript, _simulation(config, data or load_data(config)))


def captures_of_run(
    folder: Path | str,
    rounds: Collection[int],
    *,
    data: Federated | None = None,
    on_round: OnRound | None = None,
    allow_code: bool = False,
) -> dict[int, Capture]:
    """Rounds of a finished run: recorded ones as they are, the others by replaying it from its first round.

    The one checkpoint of a run is that after its last round, so an earlier round has to be reached again. The replay is
    exact or refused: its records must equal the run's. Code that its settings name is run only with `allow_code`.
    """
    run = RunFolder(folder)
    config = RunConfig.read(run.path / "config.toml", allow_code=allow_code) if run.holds_run else None
    history = run.records()
    if config is not None and config.method.get("secure_sum"):
        planned = shlex.quote(str(run.path / "config.toml"))
        raise ConfigError(
            f"{run.path} has secure sums, of which nothing is kept: audit its settings, ntkfl audit --config {planned}"
        )
    if config is None or not history:
        raise RunFolderError(f"{run.path} holds no run with a finished round")
    for number in rounds:
        if not 1 <= number <= len(history):
            raise ConfigError(f"{run.path} has rounds 1 to {len(history)}, not {number}")
    have = set(recorded_rounds(run.path)) & set(rounds)
    replayed = history[: max(set(rounds) - have, default=0)]
    if gone := [client for record in replayed for client in record.get("forgotten") or []]:
        raise RunFolderError(
            f"{run.path} cannot be re-made: a client was forgotten since ({called(run.config(), gone)}), and its "
            "history is of the model that is left; audit a run of the same settings: "
            f"ntkfl audit --config {run.path}/config.toml"
        )
    data = data or load_data(config)
    found = {number: read_capture(folder, number, data=data, allow_code=allow_code) for number in have}
    missing = set(rounds) - have

    def compare(record: Record, timing: Record) -> None:
        then = history[record["round"] - 1]
        differs = [name for name in then if then[name] != record.get(name)]
        if differs:
            raise RunFolderError(
                f"{run.path} cannot be re-made here: {differs[0]} of round {record['round']} was {then[differs[0]]}, "
                f"the replay gives {record.get(differs[0])} (another machine, or another version); "
                "record rounds as they are played: ntkfl train --record-wire ROUND"
            )
        if on_round:
            on_round(record, timing)

    if missing:
        found |= captures(config, missing, data=data, on_round=compare)
    return found


def _simulation(config: RunConfig, data: Federated) -> Simulation:
    """The run's simulation, to ask what clients held; it plays nothing."""
    return Simulation(
        build_model(config, data),
        data,
        build_method(config.method),
        clients_per_round=config.clients_per_round,
        seed=config.seed,
        hold_out=config.hold_out,
    )


def _capture(transcript: Transcript, simulation: Simulation) -> Capture:
    round, cohort, clients = transcript.round, transcript.cohort, simulation.clients
    held = [simulation.data.client(i)[0] for i in cohort]
    raw = [x[clients[i].drawn(round, len(x))] for i, x in zip(cohort, held, strict=True)]
    first, *rest = transcript.exchanges
    second = rest[0] if rest else None
    down = sum(
        len(q) * (len(cohort) if len(e.questions) == 1 else 1) for e in transcript.exchanges for q in e.questions
    )
    rows = simulation.data.rows
    played = [clients[i].at(round) for i in cohort]
    return Capture(
        round=round,
        method=simulation.method,
        task=simulation.task,
        broadcast=Message.decode(first.questions[0]),
        uploads=[Message.decode(reply) for reply in first.replies],
        losses=[Message.decode(reply) for reply in second.replies] if second else [],
        candidates=Message.decode(second.questions[0]) if second else None,
        cohort=cohort,
        truth=[(client.x, client.y) for client in played],
        raw=raw,
        senders=None if first.senders is None else list(first.senders),
        bytes_up=sum(sum(e.submitted) for e in transcript.exchanges),
        bytes_down=down,
        exchanges=transcript.exchanges,
        loss_senders=None if second is None or second.senders is None else list(second.senders),
        projection=clients.projection,
        public=simulation.data.test,
        pixels=(rows.mean, rows.std) if rows.mean else None,
    )
