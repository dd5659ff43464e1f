"""A method of ntkfl as a Flower strategy: Flower samples nodes, evaluates and reports; the rounds are the method's."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import nn

from ntkfl.errors import ConfigError, Diverged, MessageError, ModelError, NumericalError, RunFolderError, TooFew
from ntkfl.federation.client import split_frozen
from ntkfl.federation.config import build_method
from ntkfl.federation.policy import Terms
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import ADVICE, Server, remarks
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.flower.messages import content, digest, needs_shuffler, note
from ntkfl.flower.transport import FlowerTransport, fail, why
from ntkfl.methods import Method, Robust, Task
from ntkfl.methods.base import adds_noise, fitted, settle
from ntkfl.models.backbone import outputs_of
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent.parameters import eager, flatten, full_precision
from ntkfl.version import __version__

log = logging.getLogger("flwr")
_MEMORY = "What clients keep between rounds is lost when a run of Flower ends."
_ASKED, _LARGEST_INPUT = 5, 1 << 28  # clients that tell what a sample looks like; numbers in one
Shape = tuple[tuple[int, ...], bool, bool]  # of one input; whether inputs are tokens, and targets real numbers


class Strategy(FedAvg):
    """Trains `model` by `method` on the nodes that Flower samples; their clients answer with `ntkfl.flower.reply`.

        strategy = Strategy(SumNTKFL(), Net(), fraction_train=0.2)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=10)

    The server needs the network itself: its layers, which of its parameters train, its batch normalisation. Its weights
    come from `initial_arrays`; what does not train never travels, and must be the same in the clients' models. `fedavg`
    are the keyword arguments of Flower's `FedAvg`, for sampling and evaluation; `result.arrays` is the model's state
    dict, and `result.train_metrics_clientapp` has each round's training loss, bytes and diagnostics.

    With `checkpoint`, a folder, the run is kept there after every round, and the same call goes on from it: rounds that
    are done are not repeated. (What clients keep between rounds, as SCAFFOLD's do, ends with Flower's run.)
    `through` is a shuffler, for methods that need one.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        *,
        privacy: Privacy | None = None,
        robust: Robust | Literal["on"] | None = "on",
        checkpoint: Path | str | None = None,
        through: Any = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if not isinstance(method, Method):
            raise ConfigError(
                f"method must be an instance, with brackets: ntkfl.methods.SumNTKFL(), not {method!r:.80}"
            )
        if not self.fraction_train:
            raise ConfigError("fraction_train=0 asks no node in newer Flower: leave it out, and set min_train_nodes")
        if method.name in ("centralized", "data-share"):
            raise ConfigError(f"{method.name} moves samples, as a baseline of simulations: ntkfl.train(…) runs it")
        if "train_metrics_aggr_fn" in fedavg:
            raise ConfigError("train_metrics_aggr_fn has nothing to aggregate: replies of ntkfl hold no metrics")
        self.privacy, self.robust = settle(method, privacy, robust)
        if needs_shuffler(self.privacy) and through is None:
            raise ConfigError(f"{method.name} with these settings needs a shuffler: give Strategy(…, through=…)")
        if through is not None and not needs_shuffler(self.privacy):
            raise ConfigError(
                f"through= is a shuffler, and {method.name} with these settings sends nothing through one: give "
                "privacy=ntkfl.methods.Privacy(secure_sum=True), so that the server sees totals alone, or leave it out"
            )
        with eager(model) as own:
            self.model = copy.deepcopy(own)
        if adds_noise(method) and self.fraction_evaluate:
            log.info("clients evaluate nothing: what they measure on their data would leave without noise")
        self.method, self.through = method, through
        self.folder = None if checkpoint is None else RunFolder(checkpoint)

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
        """Play `num_rounds` rounds, those of the checkpoint among them, as every Flower strategy does; `TooFew` where
        not one of them changed the model.
        """
        try:
            self.model.load_state_dict(initial_arrays.to_torch_state_dict())
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"initial_arrays does not fit the model: {reason:.200}") from None
        self._grid, self._timeout, self._rounds, self._done = grid, timeout, num_rounds, 0
        self._server, self._origin, arrays = None, secrets.token_hex(8), initial_arrays
        self._changed, self._lost = False, ""  # whether any round did, and why the last one did not
        with self.folder.locked() if self.folder else nullcontext():
            if self.folder and self.folder.holds_run:
                settings = self.folder.config()
                if "origin" not in settings:
                    raise RunFolderError(f"{self.folder.path} holds a run that is none of Flower's: choose another")
                self._origin, shape = settings["origin"], settings["shape"]
                self._server = self._make(tuple(shape["inputs"]), shape["tokens"], shape["real"])
                self._done, arrays = self.folder.load_checkpoint()[0], self.arrays()
                log.info("%s holds %d rounds: they are not repeated. %s", self.folder.path, self._done, _MEMORY)

            def evaluate(round: int, found: ArrayRecord) -> MetricRecord | None:
                return evaluate_fn(round, found) if evaluate_fn and round >= self._done else None

            configs = (train_config, evaluate_config, evaluate)
            result = super().start(grid, arrays, num_rounds, timeout, *configs)  # type: ignore[arg-type]
            if self._lost and not self._changed:
                raise TooFew(f"no round changed the model; the last: {self._lost}")
            if self.folder and self._server:
                self.folder.save_model(self._server.state.trained(self.model).state_dict())
        result.arrays = result.arrays or arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower samples the nodes; what they are asked follows in `aggregate_train`, where a round may ask twice. In a
        round that the checkpoint holds nobody is asked.
        """
        done = server_round <= self._done
        messages = [] if done else super().configure_train(server_round, arrays, config, grid)
        self._nodes, self._config = sorted(message.metadata.dst_node_id for message in messages), config
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One round of the method. Where it cannot be built, as with too few replies, nothing changes, and the run goes
        on.
        """
        if not self._nodes:
            self._lost = "" if server_round <= self._done else "Flower sampled no node"
            return None, None
        try:
            with full_precision():
                server = self._server = self._server or self._begin()
                self._transport.nodes, self._transport.config = self._nodes, {self.configrecord_key: self._config}
                server.clients_per_round = len(self._nodes)
                server.task.total_clients = max(len(self._nodes), len(list(self._grid.get_node_ids())))
                record, timing = server.play(server_round)
        except (TooFew, NumericalError) as error:
            advice = f"; {ADVICE}" if isinstance(error, NumericalError | Diverged) else ""
            self._lost = f"{error}{advice}"
            log.warning("round %d changed nothing: %s", server_round, self._lost)
            return None, None
        self._changed = True
        for line in remarks(record):
            log.warning("round %d: %s", server_round, line)
        if self.folder:
            self.folder.append("history.jsonl", record)
            self.folder.append("timings.jsonl", timing)
            self.folder.save_checkpoint(server_round, server.checkpoint())
        return self.arrays(), metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's own, but for rounds that the checkpoint holds, and for methods whose clients add noise."""
        if server_round <= self._done or adds_noise(self.method):
            return []
        return super().configure_evaluate(server_round, arrays, config, grid)

    def arrays(self) -> ArrayRecord:
        """The reported model's state dict."""
        assert self._server is not None
        return ArrayRecord(self._server.state.trained(self.model).cpu().state_dict())

    def _begin(self) -> Server:
        """The server, once some nodes have told what a sample looks like: most of them are believed."""
        traffic, config = Traffic(), {self.configrecord_key: self._config}
        asking, told = FlowerTransport(self._grid, self._timeout, {}, config), Counter[Shape]()
        for node, reply in asking.send({n: content({"ask": "shape"}) for n in self._nodes[:_ASKED]}, traffic).items():
            try:
                inputs = tuple(note(reply, "inputs", list))
                if not (all(type(n) is int and n > 0 for n in inputs) and math.prod(inputs) < _LARGEST_INPUT):
                    raise MessageError(f"it has samples of shape {inputs}")
                told[inputs, note(reply, "tokens", bool), note(reply, "real", bool)] += 1
            except MessageError as error:
                fail(node, str(error), traffic)
        if not told:
            raise TooFew(
                f"no node answered the first question, which asks for the shape of its samples: {why(traffic)}"
            )
        return self._make(*told.most_common(1)[0][0])

    def _make(self, inputs: tuple[int, ...], tokens: bool, real: bool) -> Server:
        """The server for samples of this shape, as far as its checkpoint has come."""
        like = flatten(self.model)
        shape = (1, *self.privacy.model_input_shape(inputs))
        x = torch.zeros(shape, dtype=torch.int64 if tokens else like.dtype, device=like.device)
        outputs = outputs_of(self.model, x)
        method = fitted(self.method, self.model, outputs, everyone=self.fraction_train >= 1)
        trained, features = split_frozen(self.model, self.privacy, like.device)
        task = Task(
            trained,
            outputs,
            method.loss,
            label_smoothing=method.label_smoothing,
            privacy=self.privacy,
            robust=self.robust,
        )
        y = torch.zeros(1, outputs, dtype=like.dtype) if real else torch.zeros(1, dtype=torch.int64)
        task.example = x if features is None else features(x), y.to(x.device)
        terms = Terms.of(
            method,
            self.privacy,
            rounds=self._rounds,
            min_clients=max(1, self.min_train_nodes),
            precision=str(like.dtype).removeprefix("torch."),
            outputs=outputs,
            inputs=inputs,
            shuffler="" if self.through is None else self.through.digest,
        )
        method = build_method(terms.method)  # as the clients make it
        run = hashlib.sha256(f"{self._origin} {self._rounds}".encode()).hexdigest()[:16]  # other terms, another run
        network = digest(self.model, method)
        notes = {"terms": terms.text, "run": run, "network": network}
        self._transport = FlowerTransport(self._grid, self._timeout, notes, {})
        transport: Transport = self._transport
        if self.through is not None:
            transport = self.through.transport(self._transport, task, method, terms, run)
        server = Server(self.model, task, method, transport, None, clients_per_round=1)
        for line in task.notes:
            log.info(line)
        if self.folder:
            settings = {"ntkfl": __version__, "origin": self._origin, "rounds": self._rounds, "method": terms.method}
            about = terms.model_dump(mode="json", include={"inputs", "outputs", "precision"})
            about |= {"tokens": tokens, "real": real}
            model = {"class": type(self.model).__name__, "weights": len(like), "digest": network}
            _, _, tensors = self.folder.open(settings | {"shape": about, "model": model}, resume=True)
            if tensors:
                server.restore(tensors)
        return server


def metrics(record: Record) -> MetricRecord:
    """A round's record as Flower's metrics: its numbers, how many clients were asked, and how many failed."""
    numbers = {name: value for name, value in record.items() if type(value) in (int, float) and name != "round"}
    return MetricRecord({**numbers, "clients": len(record["clients"]), "failures": len(record.get("failed", ()))})
