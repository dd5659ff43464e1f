"""The ServerApp and the ClientApp of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ntkfl.data.client import read_own
from ntkfl.data.files import USUAL, Columns
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Federation
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.federation.client import SeededRandomness, SystemRandomness
from ntkfl.federation.run_folder import Record
from ntkfl.federation.server import OnRound
from ntkfl.federation.server_state import Batch
from ntkfl.flower.client import FlowerClient
from ntkfl.flower.folders import ClientFile
from ntkfl.flower.records import in_reply, notes_of, payload_of
from ntkfl.flower.server import FlowerRun, FlowerServer
from ntkfl.flower.shuffled import FlowerShufflerTransport, deliver
from ntkfl.user_code import find_factory

Say = Callable[[str], None]


def server_app(
    nodes: Mapping[str, int],
    run: FlowerRun,
    out: Path,
    *,
    test: Batch | None = None,
    federation: Path | None = None,
    on_round: OnRound | None = None,
    say: Say = print,
    history: list[Record] | None = None,
    allow_code: bool = False,
) -> ServerApp:
    """Trains with the clients at `nodes`; with `federation`, an aggregator's folder, behind its shuffler."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server: Aggregator | FlowerServer
        if federation is None:
            server = FlowerServer(grid, nodes, run, out, test, say, allow_code=allow_code)
        else:
            reach = partial(FlowerShufflerTransport, grid, nodes)
            server = Aggregator(federation, out, say, allow_code=allow_code, reach=reach)
        finished = server.run(on_round)
        if history is not None:
            history.extend(finished.history)

    return app


def join(
    about: ClientFile,
    folder: Path,
    data: str,
    *,
    federation: Path | None,
    seed: int | None,
    say: Say,
    allow_code: bool = False,
    columns: Columns = USUAL,
) -> ClientApp:
    """The ClientApp of the client whose folder this is; with `federation`, its folder there, behind a shuffler."""
    terms = about.terms if federation is None else Federation.read(federation).terms
    randomness = SystemRandomness() if seed is None else SeededRandomness(seed, about.number)

    def read() -> Batch:
        return read_own(data, terms.images, find_factory, columns)

    if federation is not None:
        client = ShuffledClient(federation, *read(), randomness=randomness, say=say, allow_code=allow_code)
        if client.name != about.name:
            raise ConfigError(f"{federation} is {client.name}'s folder, {folder} is {about.name}'s")
        client.hello()
        return client_app(client)
    numbers = {"number": about.number, "clients": about.clients, "limit": int(about.max_message_mb * 1e6)}
    own = FlowerClient(terms, folder, read, randomness=randomness, allow_code=allow_code, say=say, **numbers)
    try:
        own.data()
    except NTKFLError as error:  # said here now, and to the server whenever it asks
        say(str(error))
    return client_app(own)


def client_app(client: FlowerClient | ShuffledClient) -> ClientApp:
    """Answers as a client with its own data; as one behind a shuffler, with receipts."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if isinstance(client, ShuffledClient):
            return in_reply(deliver(client, payload_of(message)), message)
        return in_reply(client.answer(payload_of(message), str(notes_of(message).get("run", ""))), message)

    return app
