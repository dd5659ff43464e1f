"""`kill -9` of a SuperNode and of the SuperLink in a round: every round is in the ledgers once, and ε is counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ntkfl.federation.policy import Agreed, Policy
from ntkfl.flower import Strategy, reply
from ntkfl.methods import Privacy, PrivateSums
from ntkfl.methods.base import settle
from ntkfl.privacy.ledger import Ledger, LedgerEntry, spent_in_year
from tests.flower.cases import perceptron, samples
from tests.flower.superlink import Fleet

ROUNDS, PRIVACY = 4, Privacy(epsilon=8.0, delta=1e-5, budget_rounds=4)
POLICY = 'methods = ["sums"]\n[privacy]\nepsilon_per_run = 9.0\nepsilon_per_year = 20.0\ndelta = 1e-5\n'
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    checkpoint = Path(str(context.run_config["out"]))
    how = {"min_train_nodes": 2, "min_available_nodes": 2, "fraction_evaluate": 0.0}
    strategy = Strategy(PrivateSums(), perceptron(), privacy=PRIVACY, checkpoint=checkpoint, **how)
    strategy.start(grid, ArrayRecord(perceptron().state_dict()), ROUNDS, timeout=20)
    checkpoint.with_suffix(".done").touch()


@client.train()
def train(msg: Message, context: Context) -> Message:
    """In round 2 held, as long as there is a file `hold`, once the reply is in the ledger and before it leaves."""
    number = int(context.node_config["partition-id"])
    hold = Path(str(context.node_config["policy"])).with_name(f"hold-{number}")
    answer, until = reply(msg, context, perceptron(), samples(2)[number]), time.monotonic() + 60
    while msg.content["config"]["server-round"] == 2 and hold.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return answer


class Sites(Fleet):
    """Two SuperNodes under a policy each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "test_kill")
        (folder / "policy.toml").write_text(POLICY)

    def start_node(self, number: int, config: str = "") -> None:
        super().start_node(number, f'policy="{self.folder / "policy.toml"}"')

    def replies(self, number: int) -> list[LedgerEntry]:
        ledger = Ledger(self.folder / "ledger" / str(number))
        if (ledger.folder / "ledger.jsonl").exists():
            ledger.read()
        return [entry for entry in ledger.entries if entry.what == "reply"]

    def answered(self, *rounds: int, nodes: tuple[int, ...] = (0, 1)) -> bool:
        return all([entry.round for entry in self.replies(number)] == [*rounds] for number in nodes)

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "history.jsonl").read_text().splitlines()]

    def check_ledgers(self) -> None:
        """Each round once, and ε after each as the accountant has it; at the end it is what the run was given."""
        assert self.answered(1, 2, 3, 4)
        agreed = Agreed(PrivateSums(), settle(PrivateSums(), PRIVACY)[0])
        expected = [Policy.read(self.folder / "policy.toml").epsilon(agreed, n) for n in range(1, ROUNDS + 1)]
        assert all([entry.epsilon for entry in self.replies(number)] == expected for number in range(2))
        assert expected[-1] == pytest.approx(8.0, abs=1e-3)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Sites]:
    with Sites(tmp_path) as made:
        for number in range(2):
            made.start_node(number)
        yield made


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_supernode_killed_before_its_reply_leaves_goes_on_with_its_ledger(fleet: Sites) -> None:
    (hold := fleet.folder / "hold-1").touch()
    fleet.run(out=fleet.folder / "run")
    fleet.until(lambda: fleet.answered(1, 2, nodes=(1,)))
    fleet.kill("1")
    hold.unlink()
    fleet.start_node(1)
    fleet.until((fleet.folder / "run.done").exists)
    fleet.check_ledgers()  # the reply that was lost counts
    assert [len(r.get("failed", ())) for r in fleet.history()][:2] == [0, 1]  # Flower asks the dead node for a while
    assert [r["round"] for r in fleet.history()] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_superlink_killed_in_a_round_is_followed_by_a_run_that_goes_on(fleet: Sites) -> None:
    """Flower's state was in memory: its run is gone, and its SuperNodes end. What is done is on the disk."""
    holds = [fleet.folder / f"hold-{number}" for number in range(2)]
    for hold in holds:
        hold.touch()
    fleet.run(out=fleet.folder / "run")
    fleet.until(lambda: fleet.answered(1, 2))
    fleet.kill("link")
    for hold in holds:
        hold.unlink()
    fleet.start_link()
    for number in range(2):
        fleet.until(lambda name=str(number): fleet.processes[name].poll() is not None)  # type: ignore[misc]
        fleet.start_node(number)
    fleet.run(out=fleet.folder / "run")
    fleet.until((fleet.folder / "run.done").exists)
    assert [r["round"] for r in fleet.history()] == [1, 2, 3, 4]  # round 2 with the replies that were kept
    assert not any(r.get("failed") for r in fleet.history())
    fleet.check_ledgers()
    fleet.run(out=fleet.folder / "another")
    fleet.until((fleet.folder / "another.done").exists)
    for number in range(2):
        assert len({entry.run for entry in fleet.replies(number)}) == 2
        assert spent_in_year(fleet.replies(number), time.time()) == pytest.approx(16.0, abs=1e-3)
