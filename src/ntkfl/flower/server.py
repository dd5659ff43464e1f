"""The server of a deployment: plays rounds with the clients whose keys it knows, as far as they are there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from flwr.serverapp import Grid
from pydantic import Field

from ntkfl.deployment.aggregator import Deployment
from ntkfl.deployment.client import check_data
from ntkfl.errors import ConfigError, MessageError, NumericalError, TooFew
from ntkfl.federation.evaluation import Score, add_up
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import OnRound, play_rounds, record_of, remarks
from ntkfl.federation.server_state import Batch, ServerState, attempt_labels, draw_cohort
from ntkfl.federation.transport import Traffic, carry_round
from ntkfl.flower.transport import GridCarrier
from ntkfl.methods import Outcome, State, Task
from ntkfl.methods.batchnorm import NAME
from ntkfl.safe_parse import read_toml
from ntkfl.version import __version__
from ntkfl.wire import Message

_SHUFFLED = {"retries", "count_multiple", "count_epsilon"}  # settings that mean something behind a shuffler alone


class FlowerRun(Deployment):
    """run.toml of a deployment on Flower. `quorum` counts clients that answer; a shuffled run's counts good rows."""

    max_message_mb: float = Field(2000, gt=0, description="largest message; a larger one is refused before it is made")

    @staticmethod
    def read(path: Path) -> FlowerRun:
        return FlowerRun(**read_toml(path))

    @property
    def limit(self) -> int:
        return int(self.max_message_mb * 1e6)


class Deployed:
    """The server's side over `grid`. `nodes` are the node ids of the clients whose keys are known, by name, in the
    order that numbers them. Measured on `test` where the server has one, else by the round's clients, who count.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        run: FlowerRun,
        out: Path,
        test: Batch | None = None,
        say: Callable[[str], None] = print,
        *,
        allow_code: bool = False,
    ) -> None:
        run = run.spelled_out(allow_code=allow_code)
        self.grid, self.settings, self.out, self.say = grid, run, RunFolder(out), say
        self.names, self.nodes = list(nodes), dict(enumerate(nodes.values()))
        self.method = run.build_method(allow_code=allow_code)
        if self.method.shuffle or self.method.projected_dim is not None:
            raise ConfigError("a shuffled or projected method needs a key server and a shuffler: give --federation")
        if run.clients_per_round > run.clients or run.clients > len(nodes):
            raise ConfigError(
                f"{run.clients_per_round} clients a round of {run.clients} to wait for, and {len(nodes)} keys are known"
            )
        self.model = run.build_model(run.seed, allow_code=allow_code)
        smoothing = self.method.label_smoothing
        self.task = Task(self.model, run.outputs, self.method.loss, total_clients=len(nodes), label_smoothing=smoothing)
        self.test = None if test is None else self._checked(test)
        self.learner, self._gathered = ServerState(self.task, self.method), False
        self.run_id = self.out.config().get("run_id", "") if self.out.holds_run else token_hex(8)
        self._carrier = GridCarrier(
            grid,
            self.nodes,
            self.names.__getitem__,
            seconds=run.round_seconds,
            quorum=run.quorum,
            limit=run.limit,
            notes=lambda client: {"run": self.run_id},
            say=say,
        )

    def run(self, on_round: OnRound | None = None) -> list[Record]:
        """Train until the rounds are done; a run that was stopped goes on. The history."""
        with self.out.locked():
            history, _ = play_rounds(self, self.out, self._description(), resume=True, on_round=on_round)
            self.out.save_model(self.learner.trained(self.model).state_dict())
        return history

    def play(self, number: int) -> tuple[Record, Record]:
        """One round, begun anew with others where too few answer: (record, timing)."""
        if not self._gathered:
            self._present(self.settings.clients)
            self._gathered = True
        began = time.perf_counter()
        for attempt in range(self.settings.attempts):
            try:
                cohort = self._cohort(number, attempt)
                state = self.learner.state
                outcome, traffic = carry_round(self.task, self.method, state, number, cohort, self._carrier)
                break
            except TooFew as error:
                self.say(f"round {number}, attempt {attempt}: {error}")
        else:
            raise TooFew(f"round {number} failed {self.settings.attempts} times; start again to go on from the last")
        played = time.perf_counter()
        self.learner.advance(outcome)
        record = self._record(number, attempt, cohort, outcome, traffic)
        now = time.perf_counter()
        return record, {
            "round": number,
            "seconds": now - began,
            "client_seconds": traffic.client_seconds,
            "server_seconds": played - began - traffic.client_seconds,
            "evaluation_seconds": now - played,
            "device": "cpu",
        }

    def checkpoint(self) -> State:
        return self.learner.checkpoint()

    def restore(self, tensors: State) -> None:
        self.learner.restore(tensors)
        self.say(f"goes on after round {self.out.load_checkpoint()[0]}")

    def _cohort(self, number: int, attempt: int) -> list[int]:
        """Drawn as a simulation draws it, from those present."""
        size = self.settings.clients_per_round
        there = self._present(size)
        drawn = draw_cohort(self.settings.seed, len(there), size, *attempt_labels(number, attempt))
        return [there[i] for i in drawn]

    def _present(self, wanted: int) -> list[int]:
        """Those connected, as soon as there are enough."""
        until = time.monotonic() + self.settings.patience
        while True:
            online = set(self.grid.get_node_ids())
            there = [client for client, node in self.nodes.items() if node in online]
            if len(there) >= wanted:
                return there
            if time.monotonic() > until:
                raise TooFew(f"{len(there)} of {wanted} clients came within {self.settings.patience:g} seconds")
            time.sleep(0.2)

    def _record(self, number: int, attempt: int, cohort: list[int], outcome: Outcome, traffic: Traffic) -> Record:
        score = self._measure(number, cohort, traffic)
        if score.loss is not None and not math.isfinite(score.loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged; lower the lr")
        names = [self.names[client] for client in cohort]
        own = {"attempt": attempt, "evaluated_samples": score.samples}
        record = record_of(number, score.accuracy, score.loss, outcome, traffic, names) | own | outcome.diagnostics
        for line in remarks(record):
            self.say(f"round {number}: {line}")
        return record

    def _measure(self, number: int, cohort: list[int], traffic: Traffic) -> Score:
        """The averaged model's score; a round that nobody measures is still a round."""
        whole = self.learner.average.value
        if self.test is not None:
            return Score(*self.learner.evaluate(whole, self.test), len(self.test[1]))
        weights, own = whole[: self.task.like.numel()], whole[self.task.like.numel() :]
        question = Message("evaluate", number, {"weights": weights} | ({NAME: own} if len(own) else {}))
        try:
            answers = [Message.decode(reply) for reply in self._carrier.ask(question, cohort, Traffic())]
            return add_up(answers, self.settings.real_targets)
        except (TooFew, MessageError) as error:
            self.say(f"round {number} was not evaluated: {error}")
            return Score(None, None, 0)

    def _checked(self, test: Batch) -> Batch:
        x, y = test
        check_data(x, y, self.settings.inputs, self.settings.outputs)
        dtype = getattr(torch, self.settings.precision)
        return x.to(dtype) if x.is_floating_point() else x, y.to(dtype) if y.is_floating_point() else y.long()

    def _description(self) -> Mapping[str, Any]:
        method = self.method.model_dump(mode="json")
        shape = {"inputs": list(self.settings.inputs), "outputs": self.settings.outputs}
        return {
            "ntkfl": __version__,
            "simulation": False,
            "runtime": "flower",
            "run_id": self.run_id,
            **self.settings.model_dump(mode="json", exclude=_SHUFFLED),
            "method": {"name": self.method.name} | method,
            "shape": shape | {"precision": self.settings.precision},
        }
