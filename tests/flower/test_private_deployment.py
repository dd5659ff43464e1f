"""CP-NTK-FL on Flower with every part a process: key server, shuffler, SuperLink, SuperNodes, clients, aggregator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ntkfl_experiments.bench.relay import Relay

import ntkfl
from ntkfl.federation.build import build_network
from ntkfl.federation.config import ModelConfig
from ntkfl.federation.simulation import Simulation
from ntkfl.flower import folders
from ntkfl.methods import CPNTKFL
from ntkfl.services.key_server.client import Identity
from tests.deployment.roles import METHOD, Roles
from tests.flower.federations import distance
from tests.flower.world import HERE, Process, free_port, until

SEED, ROUNDS, COHORT = 7, 1, 3


@pytest.mark.timeout(600)
@pytest.mark.long
def test_rows_go_past_flower_and_the_weights_are_the_simulations(tmp_path: Path) -> None:
    started: dict[str, Process] = {}

    def start(name: str, *arguments: str | Path) -> Process:
        started[name] = Process(tmp_path / f"{name}.log", *arguments)
        return started[name]

    fl, port = tmp_path / "fl", free_port()
    with Roles(tmp_path, seed=SEED, rounds=ROUNDS, clients_per_round=COHORT) as roles:
        folders.init(fl, tmp_path / "run.toml", 4, port=port)
        relay = Relay(port)  # between the SuperNodes and the SuperLink: counts all that crosses
        try:
            server = start("server", "-m", "ntkfl", "flower", "server", fl / "server")
            roles.key_server()
            roles.shuffler()
            evaluator = roles.evaluator()
            until(lambda: "SuperLink is up" in server.output() or server.process.poll() is not None, "the SuperLink")
            lines = []
            for number in range(4):
                name = f"client-{number}"
                own = fl / "clients" / name
                about = own / "client.toml"
                about.write_text(about.read_text().replace(f":{port}", f":{relay.port}"))
                words = ["--data", roles.data / f"{name}.npz", "--federation", roles.folder / "clients" / name]
                lines.append(["flower", "client", *map(str, [own, *words]), "--seed", str(SEED)])
            start("members", HERE / "members.py", json.dumps(lines))
            options = ("--out", roles.out, "--federation", roles.folder / "aggregator", "--json")
            run = start("run", "-m", "ntkfl", "flower", "run", fl / "server", *options)
            assert run.wait(200) == 0, "\n".join(process.output()[-2000:] for process in started.values())

            history = [json.loads(line) for line in run.output().splitlines() if line.startswith("{")]
            here = simulation(roles)
            # Sorted rows, so that the shuffler's order is no part of the result: the same up to rounding.
            assert distance(here.model, roles.weights()) < 1e-6
            for there, record in zip(history, here.history, strict=True):
                assert there["clients"] == [f"client-{i}" for i in record["clients"]]
                assert there["uplink_bytes"] == record["uplink_bytes"]
                assert there["dropped_rows"] == 0
                assert there["evaluated_samples"] == len(roles.fed.test[1])
                assert there["test_accuracy"] == pytest.approx(record["test_accuracy"])
                assert "failed" not in there
            # Sealed rows cannot be made smaller: had they gone through Flower, it would have carried as much at least.
            assert 64 * 2 * COHORT < relay.up < sum(record["uplink_bytes"] for record in history)
            assert evaluator.output().count("not answered") == 0
        finally:
            relay.close()
            for process in started.values():
                process.end()
        assert not re.search("Traceback|not answered", started["members"].output())


def simulation(roles: Roles) -> ntkfl.Run:
    """The same run in one process, by one who is enrolled and so knows ρ."""
    method = CPNTKFL(**{k: v for k, v in METHOD.items() if k != "name"})  # type: ignore[arg-type]
    model = build_network(ModelConfig(hidden=(12,)).suited(method), (20,), 10, SEED).double()
    secret = Identity.of(roles.folder / "clients" / "client-0").run_secret()
    simulation = Simulation(model, roles.fed, method, clients_per_round=COHORT, seed=SEED, secret=secret)
    return simulation.run(ROUNDS)
