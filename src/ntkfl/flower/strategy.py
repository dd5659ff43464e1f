"""A method of ntkfl as a Flower strategy: Flower samples nodes, evaluates and reports; the rounds are the method's."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import nn

from ntkfl.errors import ConfigError, MessageError, ModelError, NumericalError, OutOfRounds, TooFew
from ntkfl.federation import chance
from ntkfl.federation.build import describe_method
from ntkfl.federation.evaluation import Score
from ntkfl.federation.feature_cache import split_frozen
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import Server, remarks
from ntkfl.federation.transport import Traffic
from ntkfl.flower import network
from ntkfl.flower.records import content, note, notes_of
from ntkfl.flower.terms import Terms, build
from ntkfl.flower.transport import FlowerTransport
from ntkfl.methods import Method, Task, batchnorm
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import eager, flatten, full_precision
from ntkfl.version import __version__

log = logging.getLogger("flwr")
_LARGEST_INPUT = 1 << 28  # numbers in one sample, as a client tells them
_METRICS = {"train_loss": "train_loss", "steps": "t", "uplink_bytes": "uplink-bytes", "downlink_bytes": "downlink-bytes"}


class Strategy(FedAvg):
    """Trains `model` by `method` on the nodes that Flower samples; their clients answer with `ntkfl.flower.reply`.

        strategy = Strategy(SumNTKFL(), Net(), fraction_train=0.2)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=10)

    The server needs the network itself: its layers, which of its parameters train, its batch normalisation. Its weights
    come from `initial_arrays`; what has no gradient is sent only to clients that have it otherwise. `fedavg` are the
    keyword arguments of Flower's `FedAvg`, for sampling and evaluation; `result.arrays` is the model's state dict, and
    `result.train_metrics_clientapp` has each round's training loss, bytes and diagnostics.

    With `checkpoint`, a folder, the run is kept there after every round, and the same call goes on from it: rounds that
    are done are not played again. (What clients keep between rounds, as SCAFFOLD's do, ends with Flower's run.)
    `seed` makes the server's own draws repeat; by default they are the operating system's.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        *,
        seed: int | None = None,
        checkpoint: Path | str | None = None,
        through: Any = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if not isinstance(method, Method):
            raise ConfigError(f"method must be an instance such as ntkfl.methods.SumNTKFL(), not {method!r}")
        if "train_metrics_aggr_fn" in fedavg:
            raise ConfigError("train_metrics_aggr_fn has nothing to aggregate: replies of ntkfl hold no metrics")
        if (method.shuffle or method.secure_sum or method.projected_dim is not None) and through is None:
            raise ConfigError(f"{method.name} with these options needs a shuffler: give through=ntkfl.flower.Shuffler(…)")
        with eager(model) as own:
            self.model = copy.deepcopy(own)
        self.method, self.seed, self.through = method, seed, through
        self.folder = None if checkpoint is None else RunFolder(checkpoint)
        self._rounds = self._done = 0
        self._server: Server | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Play `num_rounds` rounds, those of the checkpoint among them, as every Flower strategy does."""
        weights, own = initial_arrays.to_torch_state_dict(), self.model.state_dict()
        network.load(self.model, weights, own, "initial_arrays")
        self._grid, self._timeout, self._rounds, self._done = grid, timeout, num_rounds, 0
        self._server, self._run = None, secrets.token_hex(8)
        with self.folder.locked() if self.folder else nullcontext():
            if self.folder and self.folder.holds_run:
                settings = self.folder.config()
                self._run = settings.get("run", self._run)
                self._make(settings["shape"]["inputs"], settings["shape"]["tokens"])
                if self._done:
                    log.info("%s holds %d rounds: they are not played again", self.folder.path, self._done)
                    initial_arrays = self.arrays()
            result = super().start(
                grid,
                initial_arrays,
                num_rounds - self._done,
                timeout,  # type: ignore[arg-type]
                train_config,
                evaluate_config,
                None if evaluate_fn is None else lambda round, arrays: evaluate_fn(round + self._done, arrays),
            )
            if self.folder and self._server:
                self.folder.save_model(self._server.state.trained(self.model).state_dict())
        if self._done:  # numbered as in a run without a break
            for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
                setattr(result, name, {round + self._done: found for round, found in getattr(result, name).items()})
            result.arrays = result.arrays or initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower samples the nodes; what they are asked follows in `aggregate_train`, where a round may ask twice."""
        number = server_round + self._done
        self._nodes = sorted(m.metadata.dst_node_id for m in super().configure_train(number, arrays, config, grid))
        self._config = {self.configrecord_key: config}
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One round of the method. With too few usable replies nothing changes, and the run goes on."""
        number = server_round + self._done
        if not self._nodes:
            return None, None
        try:
            with full_precision():
                server = self._server or self._begin()
                transport = self._transport
                transport.nodes, transport.config = self._nodes, self._config
                server.clients_per_round = len(self._nodes)
                server.task.total_clients = max(len(self._nodes), len(list(self._grid.get_node_ids())))
                record, timing = server.play(number)
        except OutOfRounds:
            raise
        except TooFew as error:
            log.warning("round %d changed nothing: %s", number, error)
            return None, None
        except NumericalError as error:
            error.add_note(f"training diverged: {chance.advice(self.method)}")
            raise
        for line in remarks(record, timing):
            log.warning("round %d: %s", number, line)
        if self.folder:
            self.folder.append("history.jsonl", record)
            self.folder.append("timings.jsonl", timing)
            self.folder.save_checkpoint(number, server.checkpoint())
        return self.arrays(), metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return super().configure_evaluate(server_round + self._done, arrays, config, grid)

    def arrays(self) -> ArrayRecord:
        """The reported model's state dict."""
        assert self._server is not None
        return ArrayRecord(self._server.state.trained(self.model).cpu().state_dict())

    # Before the first round.

    def _begin(self) -> Server:
        """Ask the first node that can tell what a sample looks like; what the network gives for one is seen here."""
        traffic, asking = Traffic(), FlowerTransport(self._grid, self._timeout, {}, ArrayRecord())
        asking.config = self._config
        for node in self._nodes:
            for reply in asking.send({node: content({"ask": "shape"})}, traffic).values():
                try:
                    told = notes_of(reply)
                    inputs, tokens = list(told.get("inputs", [])), bool(note(told, "tokens", bool))  # type: ignore[arg-type]
                    if not all(type(n) is int and 0 < n < _LARGEST_INPUT for n in inputs):
                        raise MessageError(f"samples of shape {inputs}")
                    return self._make(inputs, tokens)
                except (MessageError, ModelError) as error:
                    traffic.failed[str(node)] = str(error)
                    log.warning("node %d: %s", node, error)
        why = "; ".join(f"node {node}: {reason}" for node, reason in list(traffic.failed.items())[:3])
        raise TooFew(f"no node could say what its samples look like: {why}")

    def _make(self, inputs: list[int], tokens: bool) -> Server:
        """The server for samples of this shape, as far as its checkpoint has come."""
        method, like = self.method, flatten(self.model)
        shape = method.model_input_shape(inputs)
        x = torch.zeros((1, *shape), dtype=torch.int64 if tokens else like.dtype, device=like.device)
        outputs = network.outputs_of(self.model, x)
        trained, features = split_frozen(self.model, method, None, like.device)
        task = Task(trained, outputs, method.loss, label_smoothing=method.label_smoothing)
        if self.seed is not None:
            seed = self.seed
            task.randomness = lambda round: Randomness.simulated(seed, "server", round)
        method, lines = method.for_network(task, x if features is None else features(x))
        for line in [*lines, *batchnorm.advice(method, task)]:
            log.warning("%s", line)
        precision = str(like.dtype).removeprefix("torch.")
        terms = Terms(
            method=describe_method(method),
            rounds=self._rounds,
            min_clients=self.min_train_nodes,
            precision=precision,
            inputs=tuple(inputs),
            outputs=outputs,
        )
        method = build(terms)  # as the clients do
        frozen = network.frozen(self.model, method)
        agreed = {"layout": network.layout(self.model), "frozen": network.digest(frozen)}
        notes = {"terms": terms.text(), "run": self._run, **agreed}
        self._transport = FlowerTransport(self._grid, self._timeout, notes, ArrayRecord(dict(frozen)))
        transport = self._transport
        if self.through is not None:
            transport = self.through.transport(transport, task, method, terms, self._run)
        server = Server(
            self.model,
            task,
            method,
            transport,
            _Elsewhere(),
            clients_per_round=1,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
        )
        if self.folder:
            shape = {"inputs": list(inputs), "tokens": tokens, "outputs": outputs, "precision": precision}
            model = {"class": type(self.model).__name__, "weights": len(like)} | agreed
            settings = {"ntkfl": __version__, "run": self._run, "rounds": self._rounds, "shape": shape, "model": model}
            _, _, tensors = self.folder.open(settings | {"method": terms.method}, resume=True)
            if tensors:
                server.restore(tensors)
                self._done, _ = self.folder.load_checkpoint()
        self._server = server
        return server


class _Elsewhere:
    """The evaluator of a server whose clients and `evaluate_fn` measure the model themselves."""

    def constant(self, task: Task) -> None:
        return None

    def measure(self, *_: Any) -> tuple[Score, dict[str, Any]]:
        return Score(None, None, 0), {}


def metrics(record: Record) -> MetricRecord:
    """A round's record as Flower's metrics: its numbers."""
    found = {shown: record[name] for name, shown in _METRICS.items() if record.get(name) is not None}
    found |= {"clients": len(record["clients"]), "failures": len(record.get("failed", ()))}
    found |= {"rejected": sum(record.get("rejected", {}).values())}
    known = {*_METRICS, "round", "test_accuracy", "last_accuracy", "rejected", "rejected_clients"}
    more = {k: v for k, v in record.items() if k not in known and k not in found and type(v) in (int, float)}
    return MetricRecord(found | more)
