"""What a run promises, what its folder keeps of training data under noise, and that failed rounds count for ε."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError, TooFew
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import Simulation, sum_promise
from ntkfl.federation.transport import Traffic
from ntkfl.methods import METHODS, FedAvg, Method, Privacy, PrivateSums
from ntkfl.methods.base import Outgoing, settle
from ntkfl.report.page import write_report
from ntkfl.wire import Message

SIZES = {"northern-site": 137, "southern-site": 141, "eastern-site": 153}


@pytest.fixture(scope="module")
def hospitals() -> ntkfl.data.Federated:
    draw = torch.Generator().manual_seed(0)
    sites = {n: (torch.randn(size, 3, generator=draw), torch.arange(size) % 2) for n, size in SIZES.items()}
    return ntkfl.data.from_clients(sites, test=(torch.randn(20, 3, generator=draw), torch.arange(20) % 2))


def simulation(fed: ntkfl.data.Federated, method: Method, privacy: Privacy, repeatable: bool = True) -> Simulation:
    torch.manual_seed(0)
    return Simulation(ntkfl.models.mlp(3, 4, 2), fed, method, privacy=privacy, repeatable=repeatable)


@pytest.mark.parametrize(
    ("name", "privacy", "line"),
    [
        ("fedavg", {}, ""),
        ("fedavg", {"secure_sum": True}, "unless server and shuffler collude; no ε"),
        ("private-sums", {"secure_sum": True}, "unless server and shuffler collude"),
        ("private-sums", {"secure_sum": True, "epsilon": None}, "unless server and shuffler collude; no ε"),
    ],
)
def test_the_line_says_what_masks_promise_and_that_they_are_no_noise(
    name: str, privacy: dict[str, object], line: str
) -> None:
    promise = sum_promise(settle(METHODS[name](), Privacy(**privacy))[0])
    assert promise == (f"secure sums: only totals are seen {line}" if line else "")


def test_a_run_says_it_first_and_keeps_it(hospitals: ntkfl.data.Federated, tmp_path: Path) -> None:
    notes: list[str] = []
    own = simulation(hospitals, FedAvg(local_steps=1), Privacy(secure_sum=True))
    own.run(1, out=tmp_path / "run", callbacks=[SimpleNamespace(on_start=notes.append)])
    assert RunFolder(tmp_path / "run").config()["promises"]["sums"] in notes


@pytest.mark.parametrize("noise", [True, False])
def test_under_noise_the_folder_and_its_report_know_no_client_and_no_size(
    hospitals: ntkfl.data.Federated, noise: bool, tmp_path: Path
) -> None:
    """Names and exact numbers of records are no noisy sums: with them, who is in the data could be told."""
    privacy = Privacy(epsilon=3.0 if noise else None, budget_rounds=2)
    simulation(hospitals, PrivateSums(), privacy).run(2, out=tmp_path / "run", callbacks=[])
    texts = [path.read_text() for path in (tmp_path / "run").glob("*") if path.suffix in (".toml", ".jsonl")]
    texts.append(write_report([tmp_path / "run"], tmp_path / "report.html").read_text())
    exact = [*SIZES, f"samples = {sum(SIZES.values())}", hospitals.fingerprint()]
    assert [word for word in exact if any(word in text for text in texts)] == ([] if noise else exact)
    assert noise == (not ntkfl.Run.load(tmp_path / "run").config.get("names"))


class Failing:
    """Round 2 fails once its replies are on their way, as long as there are `failures` left."""

    def __init__(self, own: Simulation, failures: int) -> None:
        self.real, self.failures = own.server.transport.exchange, failures
        own.server.transport.exchange = self.exchange  # type: ignore[method-assign]

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        messages = self.real(question, cohort, traffic)
        if messages[0].round == 2 and self.failures:
            self.failures -= 1
            raise TooFew("nobody was heard in time")
        return messages


@pytest.mark.parametrize("repeatable", [False, True])
def test_rounds_that_failed_after_noise_was_drawn_count_for_epsilon(
    hospitals: ntkfl.data.Federated, repeatable: bool, tmp_path: Path
) -> None:
    """Noise that is drawn anew releases more each time; noise that follows from the seed is sent again as it was."""
    privacy, method = Privacy(epsilon=3.0, budget_rounds=5), PrivateSums()
    whole = simulation(hospitals, method, privacy).run(4, callbacks=[])
    for resume in (False, True):
        own = simulation(hospitals, method, privacy, repeatable)
        Failing(own, 1)
        with pytest.raises(TooFew):
            own.run(3, out=tmp_path / "run", resume=resume, callbacks=[])
    own = simulation(hospitals, method, privacy, repeatable)
    run = own.run(3, out=tmp_path / "run", resume=True, callbacks=[])
    spent = [record["epsilon"] for record in run.history]
    expected = [record["epsilon"] for record in whole.history]
    if repeatable:
        assert spent == expected[:3]
        assert run.history == whole.history[:3]
        return
    assert spent[:2] == [expected[0], expected[3]]  # the second round is the fourth that drew noise
    assert spent[2] == pytest.approx(3.0, rel=1e-3)  # the fifth of five
    assert [record.get("failed_rounds") for record in run.history] == [None, 2, 2]
    assert run.config["promises"]["guarantees"][0]["epsilon"] == spent[2]
    with pytest.raises(ConfigError, match="round 6 with 2 that failed: ε was for 5 rounds"):
        simulation(hospitals, method, privacy, repeatable).run(4, out=tmp_path / "run", resume=True, callbacks=[])
