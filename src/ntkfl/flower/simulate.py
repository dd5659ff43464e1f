"""Flower's simulation: a round's clients spread over this machine's (or a Ray cluster's) cores and GPUs.

The ServerApp is `train` with a carrier; a ClientApp is told which client it is, so there are only as many virtual nodes
as a round has clients, however many the federation has. Here all roles are one owner's: a shuffler is played by the
server, as in a simulation without Flower.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.client import Population
from ntkfl.federation.config import Prepared, RunConfig, build_model, execute, prepare
from ntkfl.federation.run import Run
from ntkfl.federation.server import OnRound
from ntkfl.federation.transport import Traffic
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.flower.quiet import quiet
from ntkfl.flower.ray_cluster import private_cluster
from ntkfl.flower.records import in_reply, notes_of, payload_of
from ntkfl.flower.transport import GridCarrier
from ntkfl.methods import Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import answer
from ntkfl.wire import Message as WireMessage


def simulate(
    config: RunConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    on_start: Callable[[str], None] | None = None,
    on_round: OnRound | None = None,
) -> Run:
    """Train what the configuration says, as `execute` does, with the clients in Flower's simulation."""
    ready = prepare(config)
    if config.clients_per_round > len(ready.fed):
        raise ConfigError(f"clients per round must be at most the {len(ready.fed)} there are")
    finished: list[Run] = []
    with ExitStack() as stack:
        kept = (out if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))) / "clients"
        settings = json.dumps(config.model_dump(mode="json", exclude_none=True))
        device = "cuda" if gpus_per_client else "cpu"
        threads = max(1, round(cpus_per_client))

        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            finished.append(serve(grid, config, ready, out=out, resume=resume, on_start=on_start, on_round=on_round))

        stack.enter_context(quiet())
        cluster = stack.enter_context(private_cluster(on_start or (lambda line: None)))
        run_simulation(
            server_app=server,
            client_app=client_app(settings, str(kept.absolute()), device, threads),
            num_supernodes=config.clients_per_round,
            backend_config={
                "client_resources": {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client},
                # What fails is said by the carrier, with the client's name.
                "init_args": cluster | {"log_to_driver": False},
            },
        )
    return finished[0]


def serve(
    grid: Grid,
    config: RunConfig,
    ready: Prepared,
    *,
    out: Path | None,
    resume: bool = False,
    on_start: Callable[[str], None] | None = None,
    on_round: OnRound | None = None,
) -> Run:
    """The server's side: training as in one process, with what the grid reaches for clients."""
    return execute(
        config,
        prepared=ready,
        out=out,
        resume=resume,
        on_start=on_start,
        on_round=on_round,
        carrier=_Seats(grid, on_start or (lambda line: None)),
        runtime="flower",
    )


class _Seats(GridCarrier):
    """Whoever is the i-th of a round's cohort sits at the i-th virtual node, and is told which client it is."""

    def __init__(self, grid: Grid, say: Callable[[str], None]) -> None:
        super().__init__(grid, {}, "client {}".format, notes=lambda client: {"client": client}, say=say)

    def ask(self, outgoing: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[bytes]:
        self.nodes = dict(zip(cohort, sorted(self.grid.get_node_ids()), strict=True))
        return super().ask(outgoing, cohort, traffic)


def client_app(settings: str, kept: str, device: str, threads: int) -> ClientApp:
    """The ClientApp of any simulated client; `settings` are a `RunConfig` in JSON."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(threads)
        clients = _load(settings, device)
        return in_reply(clients.answer(int(notes_of(message)["client"]), payload_of(message), Path(kept)), message)

    return app


class _Clients:
    """All clients of a configuration, in the process that plays one at a time."""

    def __init__(self, config: RunConfig, ready: Prepared, device: torch.device) -> None:
        self.method = config.build_method()
        fed = ready.fed.hold_out(config.hold_out, seed=config.seed)[0] if config.hold_out else ready.fed
        model = build_model(config, ready.fed).to(device)
        smoothing = self.method.label_smoothing
        self.task = Task(model, fed.output_dim, self.method.loss, total_clients=len(fed), label_smoothing=smoothing)
        dtype = getattr(torch, config.precision)
        self.population = Population(fed, self.method, config.seed, device, dtype)
        byzantine = ByzantineClients.of(config.byzantine, self.method, config.seed, len(fed), self.population.rows)
        self.answers = answer if byzantine is None else byzantine.answer

    def answer(self, number: int, payload: bytes, kept: Path) -> bytes:
        asked = WireMessage.decode(payload)
        memory = ClientMemory(kept / str(number))
        client = self.population.client(number, asked.round, memory.before(asked.round))
        reply = self.answers(self.method, self.task, asked, [client])[0].encode()
        memory.keep(asked.round, client.memory)
        return reply


@lru_cache(maxsize=1)
def _load(settings: str, device: str) -> _Clients:
    config = RunConfig(**json.loads(settings))
    return _Clients(config, prepare(config), torch.device(device))
