"""The shuffler's life as a process: killed, stopped, without its key server; and what it logs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.deployment.federation import PREFIX, Deployment, refused

from ntkfl.services.key_server.store import KeyServer


def test_revoked_clients_are_out_before_the_next_batch_opens(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    clients = {name: deployment.client(name) for name in ("client-0", "client-1", "client-2")}
    with deployment.start_key_server() as key_server, deployment.start() as process:
        aggregator = deployment.aggregator()
        for client in clients.values():
            assert client.ask("POST", "/hello").status_code == 200
        first = deployment.batch(*clients)
        assert aggregator.publish(first).status_code == 200
        assert clients["client-1"].submit(first.key).status_code == 200
        KeyServer.open(deployment.folder / "key-server").revoke("client-1")
        second = deployment.batch(*clients)
        assert aggregator.publish(second).status_code == 200
        assert aggregator.on(first.key, "GET").json()["clients"] == 0  # what it had sent is gone
        key_server.kill()

        third = deployment.batch(*clients)
        assert aggregator.publish(third).status_code == 200  # nobody answers: the last list holds
        for ask in (("POST", "/hello"), ("GET", "/announcement?after=0")):
            assert refused(clients["client-1"].ask(*ask)) == (403, "revoked")
        assert refused(clients["client-1"].submit(third.key)) == (403, "revoked")
        assert aggregator.ask("GET", "/clients").json()["clients"] == ["client-0", "client-2"]
        for name in ("client-0", "client-2"):
            assert clients[name].submit(third.key).status_code == 200
        assert aggregator.on(third.key, "GET").json()["state"] == "ready"  # it is not waited for
        deployment.hang_up()
        assert process.stop() == 0
        events = [json.loads(line) for line in process.err]
        assert [line["level"] for line in events if line["event"] == "revocations-unavailable"] == ["warning"]


def test_the_log_names_no_client(tmp_path: Path) -> None:
    """Neither beside rows nor beside a greeting or a poll, whose times would tell whose rows came between."""
    deployment, name = Deployment(tmp_path), "zebedee"
    batch = deployment.batch(name, "bob")
    with deployment.start() as process:
        client, aggregator = deployment.client(name), deployment.aggregator()
        client.ask("POST", "/hello")
        aggregator.publish(batch)
        client.ask("GET", "/announcement?after=0")
        client.submit(batch.key)
        client.submit(batch.key)
        client.ask("POST", "/rows", b"damaged")
        client.ask("GET", "/nothing-here")
        deployment.client("bob").submit(batch.key)
        aggregator.on(batch.key, "POST", "/release")
        deployment.hang_up()
        assert process.stop() == 0
        lines = [json.loads(line) for line in process.err]
        assert [line["status"] for line in lines if line.get("path") == f"{PREFIX}/rows"] == [200, 409, 422, 200]
        said = process.output()
        assert name not in said
        assert "bob" not in said
        assert not any("client" in line or "127.0.0.1" in json.dumps(line) for line in lines)
