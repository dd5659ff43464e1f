"""Training in this process: clients are objects, everything else is as it is across machines."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntkfl.data import Federated
from ntkfl.engine.averaging import RunningAverage
from ntkfl.engine.conversation import Traffic, play_round
from ntkfl.engine.folder import Record, RunFolder
from ntkfl.engine.memory import available_bytes, check_memory, predicted_bytes
from ntkfl.engine.recording import Recorder, Wire
from ntkfl.engine.run import Run, describe
from ntkfl.engine.seeds import derive
from ntkfl.errors import ConfigError, ModelError, NumericalError
from ntkfl.methods import Client, Method, Outcome, State, Task
from ntkfl.methods.statistics import NAME, load_statistics, start
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.subsample import subsample
from ntkfl.tangent.parameters import flatten, load_flat

Batch = tuple[Tensor, Tensor]


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
    on_wire: Callable[[Wire], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    on_round: Callable[[Record, Record], None] | None = None,
) -> Run:
    """Train `model` over the clients of `fed` with `method`; the model given keeps its weights, `run.model` is trained.

    A round draws `clients_per_round` clients without replacement; everything random comes from `seed`, so that the same
    call on the same machine gives the same bits. `hold_out` clients are set aside as the server's validation set.
    `shared` is data the server holds for all (data-share). Training ends early once the test accuracy is `stop_at`.
    With `out`, the run's folder is kept there after every round and `resume` continues from it, bit for bit.
    With a projection, the model takes the method's `projected_dim` features; `secret` is its seed, by default derived
    from `seed`, which is no secret. `on_start(line)` is told what memory the run expects to need
    (where that is more than is free, it does not begin), and `on_round(record, timing)` is called after each round.
    `config` overrides what is written as the run's settings. Of the rounds in `record_wire` every message is kept in
    the folder and told to `on_wire`: what `ntkfl audit` attacks.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"method must be an instance such as ntkfl.methods.NTKFL(), not {method!r}")
    if not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(f"rounds must be a whole number of at least 1, got {rounds!r}")
    if any(not 1 <= number <= rounds for number in record_wire):
        raise ConfigError(f"cannot record rounds {sorted(record_wire)}: the run has rounds 1 to {rounds}")
    engine = Engine(model, fed, method, clients_per_round, seed, hold_out, shared, device, secret)
    note = engine.check_memory()
    if on_start:
        on_start(note)
    settings = dict(config) if config is not None else describe(model, fed, method, clients_per_round, seed, hold_out)
    settings |= {"rounds": rounds, "stop_at": stop_at, "shape": engine.shape()}
    folder = RunFolder(out) if out is not None else None
    with folder.locked() if folder else nullcontext():
        history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
        if tensors:
            engine.restore(tensors)
        for number in range(len(history) + 1, rounds + 1):
            if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
                break
            record, timing, wire = engine.play(number, number in record_wire)
            if wire is not None and folder:
                wire.save(folder)
            if wire is not None and on_wire:
                on_wire(wire)
            history.append(record)
            timings.append(timing)
            if folder:
                folder.append("history.jsonl", record)
                folder.append("timings.jsonl", timing)
                folder.save_checkpoint(number, engine.checkpoint())
            if on_round:
                on_round(record, timing)
        trained = engine.trained(model)
        if folder:
            folder.save_model(trained.state_dict())
    return Run(trained, history, timings, settings, engine.checkpoint())


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
        self.device, self.dtype = torch.device(device) if device is not None else weights.device, weights.dtype
        self.task = Task(
            copy.deepcopy(model).to(self.device),
            fed.output_dim,
            method.loss,
            total_clients=len(self.fed),
            label_smoothing=method.label_smoothing,
        )
        self.secret = secret or RunSecret.simulated(seed)
        self.projection = method.make_projection(self.secret, fed.input_shape)
        self.task.shared = None if shared is None else self._place(shared)
        if held is not None:
            batches = [held.client(i) for i in range(len(held))]
            self.task.validation = self._place((torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])))
        self.test = self._place(fed.test)
        self._check_model()
        self.state = start(method, self.task, self.task.like)
        self.average = RunningAverage(self._whole(), method.average)
        self.memories: dict[int, State] = {}
        self._cache: dict[int, Batch] = {}

    def check_memory(self) -> str:
        """What a round will need, in words; an error where it is more than there is."""
        needed = predicted_bytes(self.task, self.method, self.fed.sizes, self.clients_per_round, self.test[0][:1])
        return check_memory(needed, available_bytes(self.device), self.method, self.clients_per_round)

    def shape(self) -> dict[str, Any]:
        """What the network takes and gives, and which seed projects: a name for it, never the seed."""
        shape = {"inputs": list(self.fed.input_shape), "outputs": self.fed.output_dim}
        named = {"key_id": self.secret.key_id} if self.projection is not None else {}
        return {**shape, "precision": str(self.dtype).removeprefix("torch."), **named}

    def play(self, number: int, recorded: bool = False) -> tuple[Record, Record, Wire | None]:
        """One round: (record, timing, what went over the wire if that is wanted)."""
        began = time.perf_counter()
        clients = [self.client(i, number) for i in self._cohort(number)]
        recorder = Recorder(number, [client.id for client in clients]) if recorded else None
        outcome, traffic = play_round(self.task, self.method, self.state, number, clients, recorder)
        played = time.perf_counter()
        self.state = outcome.state
        self.memories |= {client.id: client.memory for client in clients if client.memory}
        for weights in (*outcome.passed, self._whole()):
            self.average.add(weights)
        record = self._record(number, clients, outcome, traffic)
        timing = {
            "round": number,
            "seconds": time.perf_counter() - began,
            "client_seconds": traffic.client_seconds,
            "server_seconds": played - began - traffic.client_seconds,
            "evaluation_seconds": time.perf_counter() - played,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }
        return record, timing, recorder.wire() if recorder else None

    def checkpoint(self) -> State:
        tensors = {f"state/{name}": t for name, t in self.state.items()} | {
            "averaged": self.average.value,
            "averages": torch.tensor(self.average.count),
        }
        for client, memory in self.memories.items():
            tensors |= {f"client/{client}/{name}": t for name, t in memory.items()}
        return tensors

    def restore(self, tensors: State) -> None:
        placed = {name: t.to(self.device) for name, t in tensors.items()}
        self.average.value, self.average.count = placed.pop("averaged"), int(placed.pop("averages"))
        self.state = {k.removeprefix("state/"): t for k, t in placed.items() if k.startswith("state/")}
        for key, t in placed.items():
            if key.startswith("client/"):
                _, client, name = key.split("/", 2)
                self.memories.setdefault(int(client), {})[name] = t

    def trained(self, model: nn.Module) -> nn.Module:
        result = copy.deepcopy(model)
        whole = self.average.value.to(next(result.parameters()).device)
        load_flat(result, whole[: self.task.like.numel()])
        if NAME in self.state:
            load_statistics(result, whole[self.task.like.numel() :])
        return result

    def _whole(self) -> Tensor:
        """The weights and, behind them, the running statistics that are averaged with them."""
        parts = [self.state["weights"], *([self.state[NAME]] if NAME in self.state else [])]
        return torch.cat(parts)

    def _record(self, number: int, clients: list[Client], outcome: Outcome, traffic: Traffic) -> Record:
        accuracy, loss = self._evaluate(self.average.value, self.test)
        if not math.isfinite(loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged; lower the lr")
        record: Record = {
            "round": number,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": outcome.train_loss,
            "steps": outcome.steps,
            "uplink_bytes": traffic.uplink.total(),
            "downlink_bytes": traffic.downlink.total(),
            "clients": [client.id for client in clients],
            "uplink": dict(traffic.uplink),
            "downlink": dict(traffic.downlink),
            # The trajectory does not depend on averaging, so one run tells both curves.
            "last_accuracy": self._evaluate(self._whole(), self.test)[0] if self.method.average else accuracy,
        }
        if self.task.validation is not None:
            held = self._evaluate(self.average.value, self.task.validation)
            record |= {"validation_accuracy": held[0], "validation_loss": held[1]}
        if self.method.shuffle:
            record["dropped_rows"] = traffic.dropped
        return record | outcome.diagnostics

    def _evaluate(self, whole: Tensor, batch: Batch) -> tuple[float | None, float]:
        """(accuracy, mean loss) of weights and statistics; no accuracy for real-valued targets."""
        x, y = batch
        weights, own = whole[: self.task.like.numel()], whole[self.task.like.numel() :]
        if len(own):
            load_statistics(self.task.model, own)
        outputs = self.task.predict(weights, x)
        accuracy = None if y.is_floating_point() else float((outputs.argmax(1) == y).double().mean())
        return accuracy, float(self.task.losses(outputs, y).double().mean())

    def _cohort(self, number: int) -> list[int]:
        rng = np.random.Generator(np.random.PCG64(derive(self.seed, "cohort", number)))
        return sorted(int(i) for i in rng.choice(len(self.fed), self.clients_per_round, replace=False))

    def client(self, i: int, number: int) -> Client:
        """Client i as round `number` finds it."""
        x, y = self._cache[i] if i in self._cache else self._place(self.fed.client(i))
        if self.device.type != "cpu":  # on the CPU, making rows again is cheaper than keeping all clients' floats
            self._cache[i] = (x, y)
        rows = self.drawn(i, number)
        if len(rows) < len(y):
            x, y = x[rows.to(x.device)], y[rows.to(y.device)]
        return Client(i, x, y, derive(self.seed, "client", i, number), dict(self.memories.get(i, {})))

    def drawn(self, i: int, number: int) -> Tensor:
        """Which of its samples client i uses in round `number`, int64 [n].

        A simulation repeats, so even this comes from the seed; a deployed client asks its operating system.
        """
        draw = random.Random(derive(self.seed, "subsample", i, number))
        return subsample(self.fed.sizes[i], self.method.subsample_rate, draw)

    def _place(self, batch: Batch) -> Batch:
        """A batch as the network gets it: on the device, projected."""
        x, y = batch[0].to(self.device), batch[1]
        if x.is_floating_point():  # tokens stay whole
            x = x.to(self.dtype)
        elif self.projection is not None:
            raise ConfigError("tokens cannot be projected: leave projected_dim out")
        return (
            x if self.projection is None else self.projection(x),
            y.to(self.device, self.dtype if y.is_floating_point() else y.dtype),
        )

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
