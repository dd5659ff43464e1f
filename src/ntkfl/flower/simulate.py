"""Flower's simulation: a round's clients spread over this machine's (or a Ray cluster's) cores and GPUs.

The ServerApp is `execute` with a transport; a ClientApp is told which client it is, so there are only as many virtual
nodes as a round has clients, however many the federation has. Here all roles are one owner's: a shuffler is played by
the server, as in a simulation without Flower.
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

from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.build import build_method, build_model, load_data
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.callbacks import Functions
from ntkfl.federation.config import RunConfig
from ntkfl.federation.feature_cache import feature_folder, split_frozen
from ntkfl.federation.local import SimulatedClients
from ntkfl.federation.run import Run
from ntkfl.federation.seeds import seeded_torch
from ntkfl.federation.server import OnRound
from ntkfl.federation.simulation import execute
from ntkfl.federation.transport import Traffic
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.flower.quiet import quiet
from ntkfl.flower.ray_cluster import private_cluster
from ntkfl.flower.records import in_reply, notes_of, payload_of
from ntkfl.flower.transport import FlowerTransport
from ntkfl.methods import Task
from ntkfl.methods.base import Outgoing
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
    data = load_data(config)
    config = config.with_cohort(len(data))
    if config.clients_per_round > len(data):
        raise ConfigError(f"clients per round must be at most the {len(data)} there are")
    finished: list[Run] = []
    with ExitStack() as stack:
        kept = (out if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))) / "clients"
        settings = json.dumps(config.model_dump(mode="json", exclude_none=True))
        device = "cuda" if gpus_per_client else "cpu"
        threads = max(1, round(cpus_per_client))

        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            finished.append(serve(grid, config, data, out=out, resume=resume, on_start=on_start, on_round=on_round))

        stack.enter_context(quiet())
        cluster = stack.enter_context(private_cluster(on_start or (lambda line: None)))
        run_simulation(
            server_app=server,
            client_app=client_app(settings, str(kept.absolute()), device, threads),
            num_supernodes=config.clients_per_round,
            backend_config={
                "client_resources": {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client},
                # What fails is said by the transport, with the client's name.
                "init_args": cluster | {"log_to_driver": False},
            },
        )
    return finished[0]


def serve(
    grid: Grid,
    config: RunConfig,
    data: Federated,
    *,
    out: Path | None,
    resume: bool = False,
    on_start: Callable[[str], None] | None = None,
    on_round: OnRound | None = None,
) -> Run:
    """The server's side: training as in one process, with what the grid reaches for clients."""
    return execute(
        config,
        data=data,
        out=out,
        resume=resume,
        callbacks=[Functions(on_start=on_start, on_round=on_round)],
        transport=_Seats(grid, len(data) - config.hold_out, on_start or (lambda line: None)),
        runtime="flower",
    )


class _Seats(FlowerTransport):
    """Whoever is the i-th of a round's cohort sits at the i-th virtual node, and is told which client it is."""

    def __init__(self, grid: Grid, clients: int, say: Callable[[str], None]) -> None:
        super().__init__(grid, {}, "client {}".format, notes=lambda client: {"client": client}, say=say)
        self._clients = clients

    def available(self, wanted: int) -> Sequence[int]:
        return range(self._clients)

    def name(self, client: int) -> int:  # type: ignore[override]  # as a simulation without Flower records it
        return client

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[WireMessage]:
        self.nodes = dict(zip(cohort, sorted(self.grid.get_node_ids()), strict=True))
        return super().exchange(message, cohort, traffic)


def client_app(settings: str, kept: str, device: str, threads: int) -> ClientApp:
    """The ClientApp of any simulated client; `settings` are a `RunConfig` in JSON."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(threads)
        clients, number = _load(settings, device, kept), int(notes_of(message)["client"])
        client, question = clients[number], WireMessage.decode(payload_of(message))
        with seeded_torch(torch.device(device), clients.seed, question.round, question.kind, number):
            reply = client.answer(question).encode()
        client.rest()
        return in_reply(reply, message)

    return app


@lru_cache(maxsize=1)
def _load(settings: str, device: str, kept: str) -> SimulatedClients:
    """All clients of a configuration, in the process that plays one at a time. What they keep is in `kept`."""
    config = RunConfig(**json.loads(settings))
    data, method = load_data(config), build_method(config.method)
    model = build_model(config, data).to(torch.device(device))
    data = data.hold_out(config.hold_out, seed=config.seed)[0] if config.hold_out else data
    smoothing = method.label_smoothing
    trained, features = split_frozen(model, method, feature_folder())
    task = Task(trained, data.output_dim, method.loss, total_clients=len(data), label_smoothing=smoothing)
    clients = SimulatedClients(
        data,
        task,
        method,
        config.seed,
        memory=lambda number: ClientMemory(Path(kept) / str(number)),
        features=features,
    )
    cheats = ByzantineClients.of(config.byzantine, method, config.seed, len(data), clients.rows)
    clients.respond = clients.respond if cheats is None else cheats.answer
    return clients
