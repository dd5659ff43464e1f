"""The aggregator of a federation: the server, with the shuffler between it and the clients.

It never holds ρ, never talks to a client, and sees rows without senders. Rounds are kept in a run folder like a
simulation's, and a run that was stopped goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ntkfl.crypto.row_frames import VERSION
from ntkfl.deployment.contract import Contract, Deployment, Federation
from ntkfl.deployment.ledger import ANEW, refuse_ended
from ntkfl.deployment.shuffler_transport import ShufflerTransport
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.build import describe_method
from ntkfl.federation.evaluation import MOST_SAMPLES, AskedClients
from ntkfl.federation.privacy_statement import privacy_statement, stated
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.server import OnRound, Server
from ntkfl.methods import Method, Task
from ntkfl.methods.batchnorm import statistics
from ntkfl.methods.inspection import Participation
from ntkfl.version import __version__

Say = Callable[[str], None]


class Aggregator:
    """The aggregator of the federation whose folder this is; the run's folder is `out`. `reach` makes the transport,
    where questions reach clients in another way than through the shuffler.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        say: Say = print,
        *,
        allow_code: bool = False,
        reach: Callable[..., ShufflerTransport] = ShufflerTransport,
    ) -> None:
        self.federation = Federation.read(folder)
        refuse_ended(folder, self.federation.run)
        if (out / "model.safetensors").exists():
            raise RunFolderError(f"{out} holds a run that has ended: {ANEW}")
        self.settings = Deployment.read(folder / "run.toml").spelled_out(allow_code=allow_code)
        self._check_settings()
        terms, settings = self.federation.terms, self.settings
        method = terms.build_method(allow_code=allow_code)
        if not (method.shuffle or method.secure_sum):
            raise ConfigError("clients send through the shuffler here: the terms need shuffle or secure_sum = true")
        model = terms.build_model(settings.seed, allow_code=allow_code)
        if method.trains_locally and statistics(model):
            raise ConfigError("batch normalisation is not averaged behind a shuffler: use group normalisation")
        smoothing = method.label_smoothing
        task = Task(model, terms.outputs, method.loss, total_clients=settings.clients, label_smoothing=smoothing)
        self.transport = reach(folder, self.federation, settings, task, method, say)
        most = MOST_SAMPLES if settings.evaluators or method.secure_sum or terms.sum_counts else 1
        self.server = Server(
            model,
            task,
            method,
            self.transport,
            AskedClients(self.transport, terms.real_targets, say, most),
            clients_per_round=settings.clients_per_round,
            seed=settings.seed,
            attempts=settings.attempts,
            deployed=True,
            say=say,
        )
        self.out, self._say = RunFolder(out), say
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # what it will hold is for its owner

    def run(self, on_round: OnRound | None = None) -> Run:
        """Train until the rounds are done; a run that was stopped goes on."""
        described = self._described(self.server.method)
        for line in stated(described["privacy"]):
            self._say(line)
        return self.server.run(self.out, described, resume=True, on_round=on_round)

    def _check_settings(self) -> None:
        settings, least = self.settings, self.federation.shuffler.min_clients
        if settings.model_dump(include=set(Contract.model_fields)) != self.federation.terms.model_dump():
            raise ConfigError("run.toml and federation.toml disagree about the terms that clients have pinned")
        if not least <= settings.clients_per_round <= settings.clients:
            raise ConfigError(
                f"clients_per_round must be from {least} (the shuffler's minimum) to the {settings.clients} "
                f"clients, got {settings.clients_per_round}"
            )
        settings.check_evaluators(settings.evaluators)

    def _evaluation(self, method: Method) -> str:
        """What this role sees of counts."""
        if self.settings.evaluators:
            return "the total of counts" if self.settings.sum_counts else "each evaluator's counts, without its name"
        summed = self.settings.sum_counts or method.secure_sum
        return "the total of counts" if summed else "a row per sample, without senders"

    def _described(self, method: Method) -> Mapping[str, Any]:
        terms, floor = self.federation.terms, self.federation.shuffler.min_clients
        cohort, most = terms.clients_per_round, terms.most_rounds
        run = Participation(most, cohort, self.settings.clients, most, simulated=False)
        return {
            "ntkfl": __version__,
            "protocol": VERSION,
            "simulation": False,
            "federation": self.federation.federation,
            "run": self.federation.run,
            **self.settings.model_dump(mode="json"),
            "method": describe_method(method),
            "shape": {"inputs": list(terms.inputs), "outputs": terms.outputs, "precision": terms.precision},
            "privacy": privacy_statement(method, run, floor, self._evaluation(method)),
        }
