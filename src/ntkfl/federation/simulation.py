"""Training in this process: clients are objects, everything else is as it is across machines."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ntkfl.data import Federated
from ntkfl.devices import find_device
from ntkfl.errors import ConfigError, ModelError, NumericalError
from ntkfl.federation.byzantine import ByzantineClients, Poison
from ntkfl.federation.client import Population
from ntkfl.federation.memory_check import available_bytes, check_memory, predicted_bytes
from ntkfl.federation.run import Run, describe
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import OnRound, play_rounds, record_of
from ntkfl.federation.server_state import Batch, ServerState, draw_cohort
from ntkfl.federation.transcript import Transcript, TranscriptRecorder
from ntkfl.federation.transport import Carrier, Traffic, carry_round, play_round
from ntkfl.methods import Method, Outcome, State, Task
from ntkfl.methods.batchnorm import answer
from ntkfl.privacy.projection import RunSecret
from ntkfl.progress import RoundLine
from ntkfl.tangent.parameters import flatten


def train(
    model: nn.Module,
    fed: Federated,
    method: Method,
    *,
    rounds: int = 10,
    clients_per_round: int = 20,
    seed: int = 0,
    hold_out: int = 0,
    shared: Batch | None = None,
    stop_at: float | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    secret: RunSecret | None = None,
    config: Mapping[str, Any] | None = None,
    record_wire: Collection[int] = (),
    on_wire: Callable[[Transcript], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    on_round: OnRound | None = None,
    progress: bool | None = None,
    carrier: Carrier | None = None,
    poison: Poison | None = None,
) -> Run:
    """Train `model` over the clients of `fed` with `method`; the model given keeps its weights, `run.model` is trained.

    A round draws `clients_per_round` clients without replacement; everything random comes from `seed`, so that the same
    call on the same machine gives the same bits. `hold_out` clients are set aside as the server's validation set.
    `shared` is data the server holds for all (data-share). Training ends early once the test accuracy is `stop_at`.
    With `out`, the run's folder is kept there after every round and `resume` continues from it, bit for bit.
    With a projection, the model takes the method's `projected_dim` features; `secret` is its seed, by default derived
    from `seed`, which is no secret. `on_start(line)` is told what memory the run expects to need
    (where that is more than is free, it does not begin), and `on_round(record, timing)` is called after each round.
    `progress` shows rounds, accuracy and the time left as one line on standard error: True anywhere, in a log as a line
    every ten seconds or so; False nowhere; if not given, in a terminal or notebook, unless `on_round` looks after it.
    `config` overrides what is written as the run's settings. Of the rounds in `record_wire` every message is kept in
    the folder and told to `on_wire`: what `ntkfl audit` attacks. With a `carrier`, clients are elsewhere: it takes the
    method's messages to them, and `fed` says how many there are and is measured on. With `poison`, some clients lie.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"method must be an instance such as ntkfl.methods.NTKFL(), not {method!r}")
    if not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(f"rounds must be a whole number of at least 1, got {rounds!r}")
    if any(not 1 <= number <= rounds for number in record_wire):
        raise ConfigError(f"cannot record rounds {sorted(record_wire)}: the run has rounds 1 to {rounds}")
    if record_wire and carrier is not None:
        raise ConfigError("messages are recorded where clients are in this process, not where they are carried")
    engine = Engine(model, fed, method, clients_per_round, seed, hold_out, shared, device, secret, carrier, poison)
    note = engine.check_memory()
    if on_start:
        on_start(note)
        if method.noise:
            on_start("noise follows from the seed and hides nothing: an ε of this run is a simulation's")
    settings = dict(config) if config is not None else describe(model, fed, method, clients_per_round, seed, hold_out)
    settings |= {"rounds": rounds, "stop_at": stop_at, "shape": engine.shape()}
    if poison is not None:
        settings |= {"poison": poison.model_dump(mode="json")}
    folder = RunFolder(out) if out is not None else None
    with folder.locked() if folder else nullcontext():

        def heard(wire: Transcript) -> None:
            if folder:
                wire.save(folder)
            if on_wire:
                on_wire(wire)

        engine.listen(record_wire, heard)
        with RoundLine(rounds, False if progress is None and on_round else progress) as line:

            def played(record: Record, timing: Record) -> None:
                line.show(record, timing)
                if on_round:
                    on_round(record, timing)

            history, timings = play_rounds(engine, folder, settings, resume=resume, on_round=played)
        trained = engine.learner.trained(model)
        if folder:
            folder.save_model(trained.state_dict())
    return Run(trained, history, timings, settings, engine.checkpoint(), method)


class Engine:
    """The state of a training run and how a round changes it."""

    def __init__(
        self,
        model: nn.Module,
        fed: Federated,
        method: Method,
        clients_per_round: int,
        seed: int,
        hold_out: int,
        shared: Batch | None,
        device: str | torch.device | None,
        secret: RunSecret | None,
        carrier: Carrier | None = None,
        poison: Poison | None = None,
    ) -> None:
        self.fed, held = fed.hold_out(hold_out, seed=seed) if hold_out else (fed, None)
        if not isinstance(clients_per_round, int) or not 1 <= clients_per_round <= len(self.fed):
            raise ConfigError(
                f"clients per round must be from 1 to the {len(self.fed)} clients there are, got {clients_per_round}"
            )
        if method.loss == "ce" and fed.classes is None:
            raise ConfigError("loss 'ce' needs class labels, but the targets are real-valued: use loss 'mse'")
        self.method, self.clients_per_round, self.seed = method, clients_per_round, seed
        weights = flatten(model)
        self.device, self.dtype = find_device(device) if device is not None else weights.device, weights.dtype
        self.task = Task(
            copy.deepcopy(model).to(self.device),
            fed.output_dim,
            method.loss,
            total_clients=len(self.fed),
            label_smoothing=method.label_smoothing,
        )
        self.population = Population(self.fed, method, seed, self.device, self.dtype, secret)
        self.task.shared = None if shared is None else self.population.place(shared)
        if held is not None:
            batches = [held.client(i) for i in range(len(held))]
            self.task.validation = self.population.place(
                (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
            )
        self.test = self.population.place(fed.test)
        self._check_model()
        self.learner, self.carrier = ServerState(self.task, method), carrier
        self.liars = ByzantineClients.of(poison, method, seed, len(self.fed), self.population.rows)
        self.memories: dict[int, State] = {}
        self._recorded: frozenset[int] = frozenset()
        self._heard: Callable[[Transcript], None] = lambda wire: None

    def check_memory(self) -> str:
        """What a round will need, in words; an error where it is more than there is."""
        needed = predicted_bytes(self.task, self.method, self.fed.sizes, self.clients_per_round, self.test[0][:1])
        return check_memory(needed, available_bytes(self.device), self.method, self.clients_per_round)

    def shape(self) -> dict[str, Any]:
        """What the network takes and gives, and which seed projects: a name for it, never the seed."""
        shape = {"inputs": list(self.fed.input_shape), "outputs": self.fed.output_dim}
        projected = self.population.projection is not None
        named = {"key_id": self.population.secret.key_id} if projected else {}
        return {**shape, "precision": str(self.dtype).removeprefix("torch."), **named}

    def listen(self, rounds: Collection[int], heard: Callable[[Transcript], None]) -> None:
        """Tell `heard` all that goes over the wire in these rounds."""
        self._recorded, self._heard = frozenset(rounds), heard

    def play(self, number: int) -> tuple[Record, Record]:
        """One round: (record, timing)."""
        began = time.perf_counter()
        cohort = draw_cohort(self.seed, len(self.fed), self.clients_per_round, number)
        outcome, traffic = self._converse(number, cohort)
        played = time.perf_counter()
        self.learner.advance(outcome)
        record = self._record(number, cohort, outcome, traffic)
        timing = {
            "round": number,
            "seconds": time.perf_counter() - began,
            "client_seconds": traffic.client_seconds,
            "server_seconds": played - began - traffic.client_seconds,
            "evaluation_seconds": time.perf_counter() - played,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }
        return record, timing

    def _converse(self, number: int, cohort: list[int]) -> tuple[Outcome, Traffic]:
        if self.carrier is not None:
            rows = self.population.rows
            return carry_round(self.task, self.method, self.learner.state, number, cohort, self.carrier, rows)
        clients = [self.population.client(i, number, self.memories.get(i, {})) for i in cohort]
        recorder = TranscriptRecorder(number, cohort) if number in self._recorded else None
        answers = answer if self.liars is None else self.liars.answer
        how = (recorder, answers, self.population.rows)
        result = play_round(self.task, self.method, self.learner.state, number, clients, *how)
        if recorder:
            self._heard(recorder.wire())
        self.memories |= {client.id: client.memory for client in clients if client.memory}
        return result

    def checkpoint(self) -> State:
        tensors = self.learner.checkpoint()
        for client, memory in self.memories.items():
            tensors |= {f"client/{client}/{name}": t for name, t in memory.items()}
        return tensors

    def restore(self, tensors: State) -> None:
        self.learner.restore(tensors)
        for key, t in tensors.items():
            if key.startswith("client/"):
                _, client, name = key.split("/", 2)
                self.memories.setdefault(int(client), {})[name] = t.to(self.device)

    def _record(self, number: int, cohort: list[int], outcome: Outcome, traffic: Traffic) -> Record:
        learner = self.learner
        accuracy, loss = learner.evaluate(learner.average.value, self.test)
        if not math.isfinite(loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged; lower the lr")
        record = record_of(number, accuracy, loss, outcome, traffic, cohort)
        # The trajectory does not depend on averaging, so one run tells both curves.
        last = learner.evaluate(learner.whole(), self.test)[0] if self.method.average else accuracy
        record |= {"last_accuracy": last}
        if self.task.validation is not None:
            held = learner.evaluate(learner.average.value, self.task.validation)
            record |= {"validation_accuracy": held[0], "validation_loss": held[1]}
        if self.method.shuffle:
            record["dropped_rows"] = traffic.dropped
        if self.liars is not None:
            record["poisoned"] = self.liars.among(cohort)
        return record | outcome.diagnostics

    def _check_model(self) -> None:
        """Fail before the first round where model and data do not fit."""
        x = self.test[0][:2]
        try:
            f = self.task.predict(self.task.like, x)
        except Exception as error:  # whatever a user's model raises
            reason = str(error).split("\n")[0]
            raise ModelError(f"the model fails on inputs of shape {list(x.shape[1:])} as a tensor: {reason}") from error
        if tuple(f.shape) != (len(x), self.fed.output_dim):
            raise ModelError(
                f"the model maps {len(x)} samples to {list(f.shape)}; the data need [{len(x)}, {self.fed.output_dim}] "
                "(by the largest label, or the targets' width)"
            )
        if not bool(self.task.like.isfinite().all()):
            raise NumericalError("the model's weights are not finite before training")
