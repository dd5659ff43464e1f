"""Simulated Byzantine clients: which they are, what they send and a server receives, and what defences make of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ATTACKS, Byzantine, ByzantineClients
from ntkfl.federation.client import honest
from ntkfl.federation.config import SUITED, RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import Simulation, execute
from ntkfl.methods import METHODS, NTKFL, FedAvg, Method, Privacy, Robust, SumNTKFL, Task
from ntkfl.methods.base import settle
from ntkfl.methods.ntk_fl import candidates_question
from ntkfl.methods.replies import Reply
from ntkfl.wire import Message
from tests.federation.rounds import small_client, small_task

ANY = {"wrong-labels", "scaled-inputs"}  # of clients of any method


def answers(
    method: Method, kind: str, scale: float = 1.0, privacy: Privacy | None = None
) -> tuple[Task, list[Reply], list[Reply]]:
    """What three clients send, honest, and what they send where the second is Byzantine."""
    task = small_task(method, privacy)
    byzantine = ByzantineClients(Byzantine(kind=kind, scale=scale), frozenset({1}))
    asked = Message("weights", 1, {"weights": task.like})
    true, said = (
        [respond(method, task, asked, small_client(i, 6)) for i in range(3)] for respond in (honest, byzantine.answer)
    )
    for reply in (*true, *said) if kind in ("sign-flip", "random") else ():
        reply.check(task)  # decodes rows
    return task, true, said


def same(one: Reply, other: Reply) -> bool:
    return one.message(1).encode() == other.message(1).encode()


def drawn(attack: Byzantine, seed: int, clients: int) -> frozenset[int]:
    byzantine = ByzantineClients.of(attack, NTKFL(), seed, clients)
    assert byzantine is not None
    return byzantine.ids


def test_byzantine_clients_are_drawn_from_the_seed() -> None:
    attack = Byzantine(kind="sign-flip", fraction=0.2)
    assert len(drawn(attack, 0, 300)) == 60
    assert drawn(attack, 0, 300) == drawn(Byzantine(kind="flood", fraction=0.2), 0, 300)
    assert drawn(attack, 0, 300) != drawn(attack, 1, 300)
    assert len(drawn(Byzantine(kind="flood", fraction=0.01), 0, 5)) == 1


CODECS: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), ({"form": "dense"}, {}), ({}, {"sparsity": 0.5})]


@pytest.mark.parametrize(("options", "privacy"), [*CODECS, ({}, {"sparsity": 0.5, "values": "8bit"})])
def test_jacobians_turned_round(options: Any, privacy: Any) -> None:
    _, honest, said = answers(NTKFL(**options), "sign-flip", 5.0, Privacy(**privacy))
    assert same(said[0], honest[0])
    assert same(said[2], honest[2])
    true, false = (reply[1].J.dense() for reply in (honest, said))  # type: ignore[attr-defined]
    assert torch.allclose(false, -5 * true, rtol=1e-6)
    assert torch.equal(said[1].arrays["outputs"], honest[1].arrays["outputs"])


TURNED = ["fedavg", "fedadam", "fednova", "scaffold", "qsgd", "fedcom"]


@pytest.mark.parametrize("name", TURNED)
def test_updates_turned_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server makes of one client's corrupted reply is −3 times the step it makes of the truth."""
    kind = METHODS[name]
    if name in ("qsgd", "fedcom"):  # with so many levels that rounding does not show
        fine = type("Fine", (kind.replies["weights"],), {"bits": 16})
        monkeypatch.setattr(kind, "replies", {"weights": fine})
    method = kind(local_steps=2)
    task = small_task(method)
    byzantine = ByzantineClients(Byzantine(kind="sign-flip", scale=3.0), frozenset({0}))
    steps = []
    for respond in (honest, byzantine.answer):
        conversation = method.round(task, method.start(task, task.like), 1, [0])
        asked = next(conversation)
        assert isinstance(asked, Message)
        with pytest.raises(StopIteration) as end:
            conversation.send([respond(method, task, asked, small_client(0, 6))])
        steps.append(end.value.value.state["weights"] - task.like)
    if name == "fedadam":  # Adam keeps the sign, not the length
        assert torch.equal(steps[0].sign(), -steps[1].sign())
    else:
        assert torch.allclose(steps[1], -3 * steps[0], atol=1e-3 * float(steps[0].abs().max()))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("kind", ["sign-flip", "random"])
def test_sums_with_another_gradient(secure: bool, kind: str) -> None:
    """As long as the attack says; curvature, samples and losses stay the client's own."""
    _, honest, said = answers(SumNTKFL(), kind, 5.0, Privacy(secure_sum=secure))
    assert same(said[0], honest[0])
    assert same(said[2], honest[2])
    gradient, turned = (reply[1].arrays["gradient"] for reply in (honest, said))
    if kind == "sign-flip":
        assert torch.allclose(turned, -5 * gradient, rtol=1e-3)
    assert float(turned.norm()) == pytest.approx(5 * float(gradient.norm()), rel=1e-3)
    assert all(torch.equal(a, said[1].arrays[n]) for n, a in honest[1].arrays.items() if n != "gradient")


def test_wrong_labels() -> None:
    _, honest, said = answers(NTKFL(), "wrong-labels")
    assert torch.equal(said[1].arrays["labels"], (honest[1].arrays["labels"] + 1) % 3)
    assert torch.equal(said[1].arrays["outputs"], honest[1].arrays["outputs"])


def test_lies_about_losses_speak_for_one_candidate() -> None:
    for privacy in (Privacy(), Privacy(shuffle=True)):
        method, client = NTKFL(), small_client(1, 6)
        task = small_task(method, privacy)
        asked = candidates_question(1, torch.stack([task.like, 30 * task.like, task.like]))
        for kind, favourite in (("shortest-flow", 0), ("longest-flow", 2)):
            byzantine = ByzantineClients(Byzantine(kind=kind), frozenset({1}))
            said = byzantine.answer(method, task, asked, client)
            said.check(task)  # nothing that a check could tell
            losses = said.arrays["losses"].flatten()
            assert [i for i in range(3) if losses[i] == 0] == [favourite]
            assert sorted(losses.tolist())[1:] == [1e30, 1e30]


def test_a_flood_is_a_clients_samples_over_and_over() -> None:
    """As often as asked for; through a shuffler as often as makes the rows that every client sends."""
    _, true, said = answers(NTKFL(), "flood+wrong-labels", 3.0)
    assert len(said[0]) == 6
    assert torch.equal(said[1].arrays["labels"], ((true[1].arrays["labels"] + 1) % 3).repeat(3))
    method = NTKFL()
    task, byzantine = (
        small_task(method, Privacy(shuffle=True)),
        ByzantineClients(Byzantine(kind="flood", scale=3.0), frozenset({1}), rows=8),
    )
    assert len(byzantine.answer(method, task, Message("weights", 1, {"weights": task.like}), small_client(1, 6))) == 8


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("ntk-fl", set(ATTACKS) - {"random"}),
        ("scaffold", ANY | {"random", "sign-flip"}),
        ("sum-ntk-fl", ANY | {"random", "sign-flip", "flood"}),
        ("centralized", ANY),
    ],
)
def test_an_attack_is_refused_where_clients_cannot_mount_it(name: str, kinds: set[str]) -> None:
    method = METHODS[name]()
    for kind in ATTACKS:
        if kind in kinds:
            Byzantine(kind=kind).check(method)
        else:
            with pytest.raises(ConfigError, match=f"clients of {name} have no way to mount '{kind}': "):
                Byzantine(kind=f"wrong-labels+{kind}").check(method)


def config(**changes: Any) -> RunConfig:
    values = {
        "rounds": 2, "clients_per_round": 6, "data": {"dataset": "digits", "clients": 20}, "model": {"hidden": (12,)},
        "method": {"name": "ntk-fl"}, "byzantine": {"kind": "sign-flip", "fraction": 0.2, "scale": 2.0},
    }  # fmt: skip
    return RunConfig(**(values | changes))


def test_a_byzantine_run_says_so_and_repeats(tmp_path: Path) -> None:
    run = execute(config(), out=tmp_path / "a")
    assert run.config["byzantine"] == {"kind": "sign-flip", "fraction": 0.2, "scale": 2.0}
    byzantine = drawn(Byzantine(kind="sign-flip", fraction=0.2), 0, 20)
    for record in run.history:
        assert record["byzantine"] == [i for i in record["clients"] if i in byzantine]
    again = execute(RunConfig.read(tmp_path / "a" / "config.toml"), out=tmp_path / "b")
    assert again.history == run.history
    assert RunFolder(tmp_path / "b").config() == RunFolder(tmp_path / "a").config()
    honest = execute(config(byzantine=None))
    assert "byzantine" not in honest.config
    assert honest.history != run.history


# -- Defences ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=40, alpha=1.0), seed=0)


def accuracy(
    fed: ntkfl.data.Federated,
    method: Method,
    attack: Byzantine | None,
    rounds: int,
    privacy: Privacy | None = None,
    **robust: Any,
) -> float:
    torch.manual_seed(0)
    inputs = settle(method, privacy)[0].projected_dim or 64
    model, how = (
        ntkfl.models.mlp(inputs, 24, 10, **SUITED.get(method.name, {})),
        {"privacy": privacy, "byzantine": attack},
    )
    simulation = Simulation(model, fed, method, clients_per_round=10, robust=Robust(**robust), **how)  # type: ignore[arg-type]
    return float(simulation.run(rounds, callbacks=[]).history[-1]["test_accuracy"])


BOOSTED = Byzantine(kind="sign-flip", fraction=0.2, scale=5.0)


@pytest.fixture(scope="module")
def ruined(digits: ntkfl.data.Federated) -> float:
    return accuracy(digits, FedAvg(local_steps=20), BOOSTED, 12)


@pytest.mark.parametrize("robust", ["clip", "median", "trimmed"])
def test_boosted_updates_ruin_a_mean_and_no_robust_one(
    robust: str, digits: ntkfl.data.Federated, ruined: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkfl.methods.robust.UPDATE_LIMIT", 1.0)
    assert ruined < 0.4
    assert accuracy(digits, FedAvg(local_steps=20), BOOSTED, 12, updates=robust) > 0.75


def test_rows_that_are_longer_than_others_are_cut_to_length(digits: ntkfl.data.Federated) -> None:
    """Honest rows lie within a factor of four of the median, turned ones of six times their length do not."""
    first = []
    for clip in (None, 4.0):
        torch.manual_seed(0)
        model, attack = ntkfl.models.mlp(64, 24, 10), Byzantine(kind="sign-flip", fraction=0.2, scale=6.0)
        simulation = Simulation(
            model, digits, NTKFL(), clients_per_round=10, byzantine=attack, robust=Robust(row_clip=clip)
        )
        run = simulation.run(1, callbacks=[])
        first.append(run.history[0])
    plain, clipped = first
    assert clipped["byzantine"]
    assert clipped["clipped_rows"] == sum(digits.sizes[i] for i in clipped["byzantine"])
    assert clipped["kernel_products"] < plain["kernel_products"]


def test_lies_about_losses_lose_their_veto(digits: ntkfl.data.Federated) -> None:
    attack, privacy = Byzantine(kind="shortest-flow", fraction=0.2), Privacy(projected_dim=30, sparsity=0.9)
    plain, trimmed = (
        accuracy(digits, METHODS["cp-ntk-fl"](), attack, 3, privacy, trim_losses=trim) for trim in (0.0, 0.4)
    )
    assert trimmed > plain + 0.1


# -- One Byzantine client of twenty, all bounds on: each attack costs a few points at most ----------------------------

RESISTED: dict[str, tuple[Method, Privacy | None, int]] = {
    "ntk-fl": (NTKFL(), None, 4),
    "cp-ntk-fl": (METHODS["cp-ntk-fl"](), Privacy(projected_dim=24, sparsity=0.9), 5),
    "fedavg": (FedAvg(lr=0.1, local_steps=50), None, 12),
}


@functools.cache
def resisted(name: str, kind: str = "", byzantine: int = 1, scale: float = 1.0) -> list[dict[str, Any]]:
    """Twenty clients of 72 samples, every one in every round."""
    method, privacy, rounds = RESISTED[name]
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.5), seed=0)
    torch.manual_seed(0)
    model = ntkfl.models.mlp(settle(method, privacy)[0].projected_dim or 64, 24, 10, **SUITED.get(method.name, {}))
    attack = Byzantine(kind=kind, fraction=byzantine / 20, scale=scale) if kind else None
    how = {"privacy": privacy, "robust": "on", "byzantine": attack}
    simulation = Simulation(model, fed, method, clients_per_round=20, **how)  # type: ignore[arg-type]
    return simulation.run(rounds, callbacks=[]).history


@pytest.mark.parametrize(
    ("name", "kind", "scale"),
    [
        ("ntk-fl", "shortest-flow", 1.0),
        ("ntk-fl", "wrong-labels+flood+shortest-flow", 14.0),
        ("ntk-fl", "sign-flip", 900.0),
        ("ntk-fl", "sign-flip", 7.0),
        ("cp-ntk-fl", "wrong-labels+flood+shortest-flow", 14.0),
        ("cp-ntk-fl", "sign-flip", 7.0),
        ("fedavg", "sign-flip", 5.0),
    ],
)
def test_one_of_twenty_costs_five_points_at_most(name: str, kind: str, scale: float) -> None:
    honest, attacked = (resisted(name, *how)[-1]["test_accuracy"] for how in ((), (kind, 1, scale)))
    assert honest > 0.85
    assert attacked > honest - 0.05


def test_four_liars_about_losses_of_twenty_cost_fifteen_points_at_most() -> None:
    assert resisted("ntk-fl", "shortest-flow", 4)[-1]["test_accuracy"] > resisted("ntk-fl")[-1]["test_accuracy"] - 0.15


def test_a_long_row_buys_no_time_of_the_solver() -> None:
    """Jacobians turned round and as long as passes for honest: a round's products stay what they were."""
    most = [max(r["kernel_products"] for r in resisted("ntk-fl", *how)) for how in ((), ("sign-flip", 1, 9.0))]
    assert most[1] < 2 * most[0]
