"""The server of a deployment on Flower: trains with the clients whose keys it knows, as far as they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from flwr.serverapp import Grid
from pydantic import Field

from ntkfl.deployment.contract import Deployment, with_sums
from ntkfl.errors import ConfigError
from ntkfl.federation.build import describe_method
from ntkfl.federation.client import check_data
from ntkfl.federation.evaluation import AskedClients, Evaluator, OwnTestSet
from ntkfl.federation.privacy_statement import privacy_statement
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.server import OnRound, Server
from ntkfl.federation.server_state import Batch
from ntkfl.flower.transport import FlowerTransport
from ntkfl.methods import Task
from ntkfl.methods.inspection import Participation
from ntkfl.safe_parse import read_toml
from ntkfl.version import __version__

# Settings that mean something behind a shuffler alone.
_SHUFFLED = {"retries", "sum_counts", "count_multiple"}


class FlowerRun(Deployment):
    """run.toml of a deployment on Flower. `quorum` counts clients that answer; a shuffled run's counts good rows."""

    max_message_mb: float = Field(2000, gt=0, description="largest message; a larger one is refused before it is made")

    @staticmethod
    def read(path: Path) -> FlowerRun:
        return FlowerRun(**with_sums(read_toml(path)))

    @property
    def limit(self) -> int:
        return int(self.max_message_mb * 1e6)


class FlowerServer:
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
        self.settings, self.out = run, RunFolder(out)
        method, names = run.build_method(allow_code=allow_code), list(nodes)
        if method.shuffle or method.secure_sum or method.projected_dim is not None:
            raise ConfigError(
                "a shuffled, summed or projected method needs a key server and a shuffler: give --federation"
            )
        if run.clients_per_round > run.clients or run.clients > len(nodes):
            raise ConfigError(
                f"{run.clients_per_round} clients a round of {run.clients} to wait for, and {len(nodes)} keys are known"
            )
        model = run.build_model(run.seed, allow_code=allow_code)
        smoothing = method.label_smoothing
        task = Task(model, run.outputs, method.loss, total_clients=len(nodes), label_smoothing=smoothing)
        self.run_id = self.out.config().get("run_id", "") if self.out.holds_run else token_hex(8)
        self.transport = FlowerTransport(
            grid,
            dict(enumerate(nodes.values())),
            names.__getitem__,
            seconds=run.round_seconds,
            patience=run.patience,
            expected=run.clients,
            quorum=run.quorum,
            limit=run.limit,
            notes={"run": self.run_id},
            say=say,
        )
        evaluator: Evaluator = AskedClients(self.transport, run.real_targets, say)
        if test is not None:
            evaluator = OwnTestSet(self._checked(test))
        self.server = Server(
            model,
            task,
            method,
            self.transport,
            evaluator,
            clients_per_round=run.clients_per_round,
            seed=run.seed,
            attempts=run.attempts,
            deployed=True,
            say=say,
        )

    def run(self, on_round: OnRound | None = None) -> Run:
        """Train until the rounds are done; a run that was stopped goes on."""
        return self.server.run(self.out, self._described(), resume=True, on_round=on_round)

    def _checked(self, test: Batch) -> Batch:
        x, y = test
        check_data(x, y, self.settings.inputs, self.settings.outputs)
        dtype = getattr(torch, self.settings.precision)
        return x.to(dtype) if x.is_floating_point() else x, y.to(dtype) if y.is_floating_point() else y.long()

    def _described(self) -> Mapping[str, Any]:
        settings, method = self.settings, self.server.method
        cohort, rounds = settings.clients_per_round, settings.rounds
        run = Participation(rounds, cohort, settings.clients, rounds, simulated=False)
        return {
            "ntkfl": __version__,
            "simulation": False,
            "runtime": "flower",
            "run_id": self.run_id,
            **settings.model_dump(mode="json", exclude=_SHUFFLED),
            "method": describe_method(method),
            "shape": {"inputs": list(settings.inputs), "outputs": settings.outputs, "precision": settings.precision},
            "privacy": privacy_statement(method, run),
        }
