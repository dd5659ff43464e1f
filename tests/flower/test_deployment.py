"""SuperLink, SuperNodes and the programs behind them as real processes on loopback, with TLS and authentication."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ntkfl.flower import commands, folders
from tests.flower.federations import NTK, distance, simulated
from tests.flower.world import World, free_port, until
from tests.spellings import private_bytes, spellings

pytestmark = pytest.mark.timeout(600)
SEED = 56  # of the second run: draws five of six clients without client 3 in its rounds 2 and 3


@pytest.fixture(scope="module")
def ntk_fl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Three rounds of NTK-FL under way: one SuperLink, four SuperNodes. Mostly it waits, so others run beside it."""
    with World(tmp_path_factory.mktemp("ntk"), NTK) as world:
        world.server()
        world.members("members", {i: world.npz(i) for i in range(4)})
        world.run()
        yield world


@pytest.mark.long
def test_fedavg_goes_on_after_its_server_is_killed_and_without_clients_that_fail(ntk_fl: World, tmp_path: Path) -> None:
    """First run: the ServerApp is killed after a round and started again; the weights are those of one process.
    Second run, same SuperLink: a SuperNode is killed inside a round, one client's data are bad, one comes late.
    """
    with World(tmp_path, {"name": "fedavg", "local_steps": 5}, clients=6, clients_per_round=4) as world:
        world.server()
        broken = tmp_path / "broken.npz"
        x, y = (np.load(world.npz(0))[name] for name in "xy")
        np.savez(broken, x=x, y=y + 50)
        port = free_port()  # where client 5 will have a SuperNode, once it comes
        members = world.members("members", {i: world.npz(i) for i in range(4)} | {5: world.npz(3)}, {5: port})
        first = world.run()
        until((world.out / "checkpoint" / "state.safetensors").exists, "a round's checkpoint")
        first.end()
        again = world.run()
        assert again.wait() == 0, world.story()
        assert "goes on after round" in again.output()
        assert [record["round"] for record in world.records()] == [1, 2, 3]
        assert distance(simulated(world.run_settings).model, world.weights()) < 1e-6

        bad = world.members("bad", {4: broken})  # once nobody draws it into the first run
        until(lambda: "labels must be whole numbers" in bad.output(), "the client's own complaint")
        until(lambda: "SuperNode ID" in world.supernode_log(4), "the client's node")
        faults(world, port)
        assert members.process.poll() is None
        tells_no_secret(world)


def faults(world: World, port: int) -> None:
    changed = {"clients": 5, "clients_per_round": 5, "round_seconds": 20.0, "seed": SEED}
    world.write_run(world.fl / "server" / "run.toml", **changed)
    os.kill(world.answering_pid("members", 3), signal.SIGSTOP)  # so that it is inside the round when its node dies
    received = world.supernode_log(3).count("Received successfully")
    second = world.run("second")
    until(lambda: world.supernode_log(3).count("Received successfully") > received, "the message at client 3")
    os.kill(world.supernode_pid(3), signal.SIGKILL)
    world.supernode(5, port)
    assert second.wait() == 0, world.story()
    history = world.records("second")
    failed = history[0]["failed"]
    assert failed["client-4"] == "labels must be whole numbers from 0 to 9, one per sample"
    assert failed["client-3"] == "no answer within 20 s"
    assert "client-4: labels must be" in second.output()
    assert any("client-5" in r["clients"] and "client-5" not in r.get("failed", {}) for r in history[1:])
    assert "client-5" not in history[0]["clients"]


def test_three_rounds_of_ntk_fl_end_with_the_weights_of_one_process(ntk_fl: World) -> None:
    world = ntk_fl
    stranger(world)
    run = world.processes["run"]
    assert run.wait() == 0, world.story()
    here = simulated(world.run_settings)
    assert distance(here.model, world.weights()) < 1e-6
    for there, record in zip(world.records(), here.history, strict=True):
        assert there["clients"] == [f"client-{i}" for i in record["clients"]]
        assert (there["uplink"], there["downlink"]) == (record["uplink"], record["downlink"])
        assert there["test_accuracy"] == pytest.approx(record["test_accuracy"])
        assert "failed" not in there
    tells_no_secret(world)


def tells_no_secret(world: World) -> None:
    """No key and no secret is in a log, an output or any other file but its own."""
    files = {path: path.read_bytes() for path in world.folder.rglob("*") if path.is_file()}
    logs = {path.name for path, text in files.items() if path.suffix == ".log" and text}
    assert {"superlink.log", "supernode.log", "server.log", "members.log", "run.log"} <= logs
    homes = [p for p in files if p.name in (folders.TLS_KEY, folders.NODE_KEY, folders.SECRET)]
    assert len(homes) >= 2 + 2 * world.clients
    for home in homes:
        text = files[home]
        body = b"".join(text.splitlines()[1:-1])
        for value in (text,) if home.name == folders.SECRET else (private_bytes(text), body):
            found = spellings(value)
            assert any(spelling in where for spelling in found for where in (text, body)), "looked for in vain"
            leaks = [path for path, said in files.items() if path != home and any(s in said for s in found)]
            assert not leaks, f"{home.name} of {home.parent.name} is in {leaks}"


def stranger(world: World) -> None:
    """A SuperNode with a key of its own making is turned away, and so is one without a key; one whose port is another
    program's ends, and says so in the words that have it started again.
    """
    other = world.folder / "other"
    folders.init(other, world.folder / "run.toml", 4, port=folders.ServerFile.read(world.fl / "server").port)
    theirs, ours = other / "clients" / "client-0", world.fl / "clients" / "client-0"
    (theirs / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())  # it knows whom it talks to; that is no secret
    with socket.create_server((commands.LOOPBACK, 0)) as taken:
        port = int(taken.getsockname()[1])
        keyed, plain = (commands.supernode(theirs, commands.free_port()) for _ in range(2))
        keyless = [word for word in plain.arguments if not word.endswith(("-private-key", "/node-key"))]
        late = commands.supernode(theirs, port).arguments
        refused = [
            subprocess.Popen(
                [*words, "--max-retries", "0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(keyed.environment),
            )
            for words in (keyed.arguments, keyless, late)
        ]
        try:
            outputs = []
            for process in refused:
                said, _ = process.communicate(timeout=200)
                assert process.returncode != 0, said
                outputs.append(said)
        finally:
            for process in refused:
                process.kill()
    assert all(b"Failed to initialize the connection" in said for said in outputs[:2])
    assert "does not take it" in str(commands.why_again(outputs[0], port))
    assert f"another program took port {port}" in str(commands.why_again(outputs[2], port))
