"""The ServerApp and the ClientApp of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ntkfl.data.client import Images, read_own
from ntkfl.deployment.client import Participant
from ntkfl.deployment.contract import Federation
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.federation.client_randomness import SeededDraws, SystemDraws
from ntkfl.federation.config import find_factory
from ntkfl.federation.run_folder import Record
from ntkfl.federation.server import OnRound
from ntkfl.federation.server_state import Batch
from ntkfl.flower.folders import ClientFile
from ntkfl.flower.member import Member
from ntkfl.flower.records import in_reply, notes_of, payload_of
from ntkfl.flower.server import Deployed, FlowerRun
from ntkfl.flower.shuffled import FlowerAggregator, deliver

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
        server = (
            FlowerAggregator(federation, out, grid, nodes, say, allow_code=allow_code)
            if federation is not None
            else Deployed(grid, nodes, run, out, test, say, allow_code=allow_code)
        )
        records = server.run(on_round)
        if history is not None:
            history.extend(records)

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
) -> ClientApp:
    """The ClientApp of the client whose folder this is; with `federation`, its folder there, behind a shuffler."""
    terms = about.terms if federation is None else Federation.read(federation).terms
    images = Images(terms.inputs, terms.mean, terms.std, terms.class_names)
    draws = SystemDraws() if seed is None else SeededDraws(seed, about.number)

    def read() -> Batch:
        return read_own(data, images, find_factory)

    if federation is not None:
        participant = Participant(federation, *read(), draws=draws, say=say, allow_code=allow_code)
        if participant.name != about.name:
            raise ConfigError(f"{federation} is {participant.name}'s folder, {folder} is {about.name}'s")
        participant.hello()
        return client_app(participant)
    numbers = {"number": about.number, "clients": about.clients, "limit": int(about.max_message_mb * 1e6)}
    member = Member(terms, folder, read, draws=draws, allow_code=allow_code, **numbers)
    try:
        member.data()
    except NTKFLError as error:  # said here now, and to the server whenever it asks
        say(str(error))
    return client_app(member)


def client_app(member: Member | Participant) -> ClientApp:
    """Answers as a client with its own data; as a participant of a federation, with receipts."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if isinstance(member, Participant):
            return in_reply(deliver(member, payload_of(message)), message)
        return in_reply(member.answer(payload_of(message), str(notes_of(message).get("run", ""))), message)

    return app
