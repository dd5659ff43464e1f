"""A real SuperLink on loopback: who has no token controls nothing, whoever can reach the port."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tomli_w
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.superlink.routers.control.router import router

from ntkfl.errors import TrustError
from ntkfl.flower import commands, folders
from ntkfl.flower.runtime import SuperLink

RUN = {"inputs": [1, 8, 8], "outputs": 10, "clients": 2, "clients_per_round": 2, "method": {"name": "fedavg"}}
OPEN = {"get-login-details", "get-auth-tokens", "refresh-auth-tokens"}  # of accounts, which there are none of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("superlink"))


def made(folder: Path) -> Path:
    """The server's folder of a new deployment."""
    (folder / "run.toml").write_text(tomli_w.dumps(RUN))
    folders.init(folder / "fl", folder / "run.toml", 2, port=commands.free_port())
    return folder / "fl" / "server"


def superlink(server: Path, secret: bytes | None = None) -> SuperLink:
    own = folders.read_secret(server) if secret is None else secret
    return SuperLink(folders.ServerFile.read(server).superlink, server / folders.CA, own)


@contextmanager
def started(server: Path) -> Iterator[SuperLink]:
    ours = superlink(server)
    with commands.running(commands.superlink(server), server / "superlink.log", 1) as process:
        assert ours.wait(100, lambda: process.poll() is None)
        yield ours


@pytest.fixture(scope="module")
def running(server: Path) -> Iterator[SuperLink]:
    with started(server) as ours:
        yield ours


def stranger(server: Path) -> ControlHttpClient:
    """Who can reach the port, and has no token."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    at = folders.ServerFile.read(server).superlink
    return ControlHttpClient.from_server_address(at, False, (server / folders.CA).read_bytes(), [version])


def test_a_stranger_cannot_unregister_a_client_or_control_anything_else(server: Path, running: SuperLink) -> None:
    keys = folders.known_keys(server)
    nodes = running.admit(keys)
    outsider = stranger(server)
    for ask in (
        lambda: outsider.UnregisterNode(UnregisterNodeRequest(node_id=nodes["client-0"])),
        lambda: outsider.RegisterNode(RegisterNodeRequest(public_key=b"x")),
        lambda: outsider.ListNodes(ListNodesRequest()),
        lambda: outsider.StartRun(StartRunRequest()),
        lambda: outsider.StopRun(StopRunRequest(run_id=1)),
    ):
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            ask()
    assert running.admit(keys) == nodes  # nobody was shut out
    with pytest.raises(TrustError, match="does not take this folder's executor-secret"):
        superlink(server, b"another folder's secret").admit(keys)


def test_every_route_of_the_control_interface_asks_for_the_token(server: Path, running: SuperLink) -> None:
    """Found in Flower's router, not listed by hand: a route that a later Flower adds is asked too."""
    context = ssl.create_default_context(cafile=server / folders.CA)
    names = {route.path.rpartition("/")[2] for route in router.routes}
    assert {"unregister-node", "start-run", *OPEN} <= names
    with httpx.Client(base_url=f"https://{running.address}", verify=context, trust_env=False) as http:
        for name in names - OPEN:
            for headers in ({}, {"authorization": "Basic eDp5"}, {"authorization": "Bearer " + "0" * 64}):
                answer = http.post(f"/v1/control/{name}", headers=headers)
                assert answer.status_code == 401, (name, headers)
        host = {"host": "x/?y="}  # a path of another kind, to whoever reads it from the header
        assert http.post("/v1/control/unregister-node", headers=host).status_code in (400, 401)
