"""`kill -9` of a SuperNode and of the SuperLink in a round: every round is in the ledgers once, and ε is counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ntkfl.federation.policy import Agreed, Policy
from ntkfl.flower import Strategy, reply
from ntkfl.methods import Privacy, PrivateSums
from ntkfl.methods.combinations import settle
from ntkfl.privacy.ledger import Ledger, LedgerEntry, spent_in_year
from tests.flower.cases import perceptron, samples
from tests.flower.test_superlink import free_port, wait

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
ROUNDS, PRIVACY = 4, Privacy(epsilon=8.0, delta=1e-5, budget_rounds=4)
POLICY = 'methods = ["sums"]\n[privacy]\nepsilon_per_run = 9.0\nepsilon_per_year = 20.0\ndelta = 1e-5\n'
APP = """[project]
name = "kill"
version = "1.0.0"
description = "Replies that can be held."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "ntkfl"
[tool.flwr.app.components]
serverapp = "kill_app:server"
clientapp = "kill_app:client"
[tool.flwr.app.config]
checkpoint = ""
"""
CODE = "from tests.flower import test_kill\n\nserver = test_kill.server\nclient = test_kill.client\n"
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    checkpoint = Path(str(context.run_config["checkpoint"]))
    how = {"min_train_nodes": 2, "min_available_nodes": 2, "fraction_evaluate": 0.0}
    strategy = Strategy(PrivateSums(), perceptron(), privacy=PRIVACY, checkpoint=checkpoint, **how)
    strategy.start(grid, ArrayRecord(perceptron().state_dict()), ROUNDS, timeout=20)
    checkpoint.with_suffix(".done").touch()


@client.train()
def train(msg: Message, context: Context) -> Message:
    """Held, as long as there is a file `hold`, once the reply is in the ledger and before it leaves."""
    number = int(context.node_config["partition-id"])
    hold = Path(str(context.node_config["policy"])).with_name(f"hold-{number}")
    answer, until = reply(msg, context, perceptron(), samples(2)[number]), time.monotonic() + 60
    while hold.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return answer


class Fleet:
    """A SuperLink and two SuperNodes, each in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.at = folder, folder / "log", f"127.0.0.1:{free_port()}"
        for made in (self.log, folder / "home", folder / "app"):
            made.mkdir()
        here = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.at}"\ninsecure = true\n'
        (folder / "home" / "config.toml").write_text(here)
        (folder / "policy.toml").write_text(POLICY)
        (folder / "app" / "pyproject.toml").write_text(APP)
        (folder / "app" / "kill_app.py").write_text(CODE)
        self.env = {**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PATH": f"{BIN}:{os.environ['PATH']}"}
        self.env |= path
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        host, port = self.at.split(":")
        command = ["flower-superlink", "--host", host, "--port", port]
        if name != "link":
            config = f'partition-id={name} policy="{self.folder / "policy.toml"}"'
            command = ["flower-supernode", "--superlink", self.at, "--node-config", config, "--port", str(free_port())]
        with (self.log / name).open("a") as out:
            made = [str(BIN / command[0]), "--insecure", *command[1:]]
            options = {"env": self.env, "cwd": self.folder, "start_new_session": True}
            self.processes[name] = subprocess.Popen(made, stdout=out, stderr=out, **options)  # type: ignore[call-overload]
        if name == "link":
            wait(lambda: socket.create_connection((host, int(port))).close())

    def kill(self, name: str) -> None:
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, name: str = "run") -> None:
        command = [str(BIN / "flwr"), "run", str(self.folder / "app"), "here"]
        config = f'checkpoint="{self.folder / name}"'
        subprocess.run([*command, "--run-config", config], env=self.env, cwd=self.folder, check=True, timeout=60)

    def until(self, true: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            said = "\n".join(path.read_text()[-6000:] for path in self.log.iterdir())
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def ledger(self, number: int) -> list[LedgerEntry]:
        ledger = Ledger(self.folder / "ledger" / str(number))
        if (ledger.folder / "ledger.jsonl").exists():
            ledger.read()
        return ledger.entries

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "history.jsonl").read_text().splitlines()]

    def check_epsilon(self) -> None:
        """After each reply as the accountant has it for so many, and at the end what the run was given."""
        agreed = Agreed(PrivateSums(), settle(PrivateSums(), PRIVACY)[0])
        expected = [Policy.read(self.folder / "policy.toml").epsilon(agreed, n + 1) for n in range(ROUNDS)]
        for number in range(2):
            assert [e.epsilon for e in self.ledger(number) if e.what == "reply"] == expected
        assert expected[-1] == pytest.approx(8.0, abs=1e-3)

    def rounds(self, number: int) -> list[int]:
        return [entry.round for entry in self.ledger(number) if entry.what == "reply"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    try:
        for name in ("link", "0", "1"):
            made.start(name)
        yield made
    finally:
        for name in made.processes:
            made.kill(name)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_supernode_killed_before_its_reply_leaves_goes_on_with_its_ledger(fleet: Fleet) -> None:
    fleet.run()
    fleet.until(lambda: fleet.rounds(1) == [1])
    (fleet.folder / "hold-1").touch()
    fleet.until(lambda: fleet.rounds(1) == [1, 2])
    fleet.kill("1")
    (fleet.folder / "hold-1").unlink()
    fleet.start("1")
    fleet.until((fleet.folder / "run.done").exists)
    assert all(fleet.rounds(number) == [1, 2, 3, 4] for number in range(2))  # the lost reply counts, and none twice
    assert [len(r.get("failed", ())) for r in fleet.history()] == [0, 1, 1, 1]  # Flower asks the dead node for a while
    fleet.check_epsilon()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_superlink_killed_in_a_round_is_followed_by_a_run_that_goes_on(fleet: Fleet) -> None:
    """Flower's state was in memory: its run is gone, and its SuperNodes end. What is done is on the disk."""
    fleet.run()
    fleet.until(lambda: fleet.rounds(0) == fleet.rounds(1) == [1])
    for number in range(2):
        (fleet.folder / f"hold-{number}").touch()
    fleet.until(lambda: fleet.rounds(0) == fleet.rounds(1) == [1, 2])
    fleet.kill("link")
    for number in range(2):
        (fleet.folder / f"hold-{number}").unlink()
    fleet.start("link")
    for name in "01":
        fleet.until(lambda name=name: fleet.processes[name].poll() is not None)  # type: ignore[misc]
        fleet.start(name)
    fleet.run()
    fleet.until((fleet.folder / "run.done").exists)
    assert [r["round"] for r in fleet.history()] == [1, 2, 3, 4]  # round 2 with the replies that were kept
    assert not any(r.get("failed") for r in fleet.history())
    assert all(fleet.rounds(number) == [1, 2, 3, 4] for number in range(2))
    fleet.check_epsilon()
    fleet.run("another")
    fleet.until((fleet.folder / "another.done").exists)
    for number in range(2):
        entries = fleet.ledger(number)
        assert len({entry.run for entry in entries}) == 2
        assert spent_in_year(entries, time.time()) == pytest.approx(16.0, abs=1e-3)
