"""Byzantine clients: which they are, what they send and a server receives, and what defences make of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.client import honest
from ntkfl.federation.config import SUITED, RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import Simulation, execute
from ntkfl.methods import NTKFL, FedAvg, Method, Privacy, Robust, SumNTKFL
from ntkfl.methods.base import settle
from ntkfl.methods.replies import Reply
from ntkfl.wire import Message
from tests.federation.rounds import CODECS, small_client, small_task
from tests.methods.known import METHODS


def answers(
    method: Method, kind: str, scale: float = 1.0, privacy: Privacy | None = None
) -> tuple[list[Reply], list[Reply]]:
    """What three clients send, honest, and what they send where the second is Byzantine."""
    task, attack = small_task(method, privacy), Byzantine(kind=kind, scale=scale)
    asked = Message("weights", 1, {"weights": task.like})
    responses = honest, functools.partial(attack.reply, {1})
    true, false = ([respond(method, task, asked, small_client(i, 6)) for i in range(3)] for respond in responses)
    for reply in (*true, *false):
        reply.check(task)  # decodes rows
    for i in (0, 2):
        assert true[i].message(1).encode() == false[i].message(1).encode()
    return true, false


def test_byzantine_clients_are_drawn_from_the_seed() -> None:
    attack = Byzantine(kind="sign-flip", fraction=0.2)
    assert len(attack.drawn(0, 300)) == 60
    assert attack.drawn(0, 300) == Byzantine(kind="wrong-labels", fraction=0.2).drawn(0, 300) != attack.drawn(1, 300)
    assert len(Byzantine(kind="sign-flip", fraction=0.01).drawn(0, 5)) == 1


@pytest.mark.parametrize(("options", "privacy"), CODECS)
def test_jacobians_turned_round(options: Any, privacy: Any) -> None:
    true, false = answers(NTKFL(**options), "sign-flip", 5.0, Privacy(**privacy))
    before, after = (replies[1].J.dense() for replies in (true, false))  # type: ignore[attr-defined]
    assert torch.allclose(after, -5 * before, rtol=1e-6)
    assert torch.equal(false[1].arrays["outputs"], true[1].arrays["outputs"])


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fednova", "scaffold", "qsgd", "fedcom"])
def test_updates_turned_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server makes of one client's corrupted reply is −3 times the step it makes of the truth."""
    kind = METHODS[name]
    if name in ("qsgd", "fedcom"):  # with so many levels that rounding does not show
        fine = type("Fine", (kind.replies["weights"],), {"bits": 16})
        monkeypatch.setattr(kind, "replies", {"weights": fine})
    method = kind(local_steps=2)
    task, attack = small_task(method), Byzantine(kind="sign-flip", scale=3.0)
    steps = []
    for respond in (honest, functools.partial(attack.reply, {0})):
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
def test_sums_with_another_gradient(secure: bool) -> None:
    """Curvature, samples and losses stay the client's own."""
    true, false = answers(SumNTKFL(), "sign-flip", 5.0, Privacy(secure_sum=secure))
    assert torch.allclose(false[1].arrays["gradient"], -5 * true[1].arrays["gradient"], rtol=1e-3)
    assert all(torch.equal(a, false[1].arrays[n]) for n, a in true[1].arrays.items() if n != "gradient")


def test_wrong_labels() -> None:
    true, false = answers(NTKFL(), "wrong-labels")
    assert torch.equal(false[1].arrays["labels"], (true[1].arrays["labels"] + 1) % 3)
    assert torch.equal(false[1].arrays["outputs"], true[1].arrays["outputs"])


def test_an_attack_is_refused_where_clients_cannot_mount_it() -> None:
    with pytest.raises(ConfigError, match="clients of centralized have no way to mount 'sign-flip'"):
        Byzantine(kind="wrong-labels+sign-flip").check(METHODS["centralized"]())
    with pytest.raises(ConfigError, match="unknown kind of attack 'flood'"):
        Byzantine(kind="wrong-labels+flood")


def config(**changes: Any) -> RunConfig:
    values = {
        "rounds": 2, "clients_per_round": 6, "data": {"dataset": "digits", "clients": 20}, "model": {"hidden": (12,)},
        "method": {"name": "ntk-fl"}, "byzantine": {"kind": "sign-flip", "fraction": 0.2, "scale": 2.0},
    }  # fmt: skip
    return RunConfig(**(values | changes))


def test_a_byzantine_run_says_so_and_repeats(tmp_path: Path) -> None:
    run = execute(config(), out=tmp_path / "a")
    assert run.config["byzantine"] == {"kind": "sign-flip", "fraction": 0.2, "scale": 2.0}
    byzantine = Byzantine(kind="sign-flip", fraction=0.2).drawn(0, 20)
    for record in run.history:
        assert record["byzantine"] == [i for i in record["clients"] if i in byzantine]
    again = execute(RunConfig.read(tmp_path / "a" / "config.toml"), out=tmp_path / "b")
    assert again.history == run.history
    assert RunFolder(tmp_path / "b").config() == RunFolder(tmp_path / "a").config()
    plain = execute(config(byzantine=None))
    assert "byzantine" not in plain.config
    assert plain.history != run.history


# -- Defences ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=40, alpha=1.0), seed=0)


def history(
    fed: ntkfl.data.Federated,
    method: Method,
    attack: Byzantine | None,
    rounds: int,
    robust: Robust | Literal["on"],
    clients_per_round: int = 10,
    privacy: Privacy | None = None,
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    inputs = settle(method, privacy)[0].projected_dim or 64
    model = ntkfl.models.mlp(inputs, 24, 10, **SUITED.get(method.name, {}))
    how = {"clients_per_round": clients_per_round, "privacy": privacy, "robust": robust, "byzantine": attack}
    return Simulation(model, fed, method, **how).run(rounds, callbacks=[]).history  # type: ignore[arg-type]


BOOSTED = Byzantine(kind="sign-flip", fraction=0.2, scale=5.0)


def test_boosted_updates_ruin_a_mean_and_no_clipped_one(
    digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accuracy(robust: Robust) -> float:
        return float(history(digits, FedAvg(local_steps=20), BOOSTED, 12, robust)[-1]["test_accuracy"])

    assert accuracy(Robust()) < 0.4
    monkeypatch.setattr("ntkfl.methods.robust.UPDATE_LIMIT", 1.0)
    assert accuracy(Robust(updates="clip")) > 0.75


def test_rows_that_are_longer_than_others_are_cut_to_length(digits: ntkfl.data.Federated) -> None:
    """Honest rows lie within a factor of four of the median, turned ones of six times their length do not."""
    attack = Byzantine(kind="sign-flip", fraction=0.2, scale=6.0)
    plain, clipped = (history(digits, NTKFL(), attack, 1, Robust(row_clip=clip))[0] for clip in (None, 4.0))
    assert clipped["byzantine"]
    assert clipped["clipped_rows"] == sum(digits.sizes[i] for i in clipped["byzantine"])
    assert clipped["kernel_products"] < plain["kernel_products"]


# -- One Byzantine client of twenty, all bounds on: each attack costs a few points at most ----------------------------

RESISTED: dict[str, tuple[Method, Privacy | None, int]] = {
    "ntk-fl": (NTKFL(), None, 4),
    "cp-ntk-fl": (METHODS["cp-ntk-fl"](), Privacy(projected_dim=24, sparsity=0.9), 5),
    "fedavg": (FedAvg(lr=0.1, local_steps=50), None, 12),
}


@functools.cache
def resisted(name: str, kind: str = "", scale: float = 1.0) -> list[dict[str, Any]]:
    """Twenty clients of 72 samples, every one in every round."""
    method, privacy, rounds = RESISTED[name]
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.5), seed=0)
    attack = Byzantine(kind=kind, fraction=1 / 20, scale=scale) if kind else None
    return history(fed, method, attack, rounds, "on", 20, privacy)


@pytest.mark.parametrize(
    ("name", "kind", "scale"),
    [
        ("ntk-fl", "wrong-labels+scaled-inputs", 3.0),
        ("ntk-fl", "sign-flip", 900.0),
        ("ntk-fl", "sign-flip", 7.0),
        ("cp-ntk-fl", "sign-flip", 7.0),
        ("fedavg", "sign-flip", 5.0),
    ],
)
def test_one_of_twenty_costs_five_points_at_most(name: str, kind: str, scale: float) -> None:
    honest, attacked = (resisted(name, *how)[-1]["test_accuracy"] for how in ((), (kind, scale)))
    assert honest > 0.85
    assert attacked > honest - 0.05


def test_a_long_row_buys_no_time_of_the_solver() -> None:
    """Jacobians turned round and as long as passes for honest: a round's products stay what they were."""
    most = [max(r["kernel_products"] for r in resisted("ntk-fl", *how)) for how in ((), ("sign-flip", 9.0))]
    assert most[1] < 2 * most[0]
