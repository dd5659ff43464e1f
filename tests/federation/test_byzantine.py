"""Simulated Byzantine clients: which they are, what they send and a server receives, and what defences make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.config import ATTACKS, Byzantine, RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import Simulation, execute
from ntkfl.methods import METHODS, NTKFL, ClientRound, FedAvg, Method, SumNTKFL, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from ntkfl.wire.span import pack_span

ANY = {"wrong-labels", "scaled-inputs", "not-finite", "extreme"}  # of clients of any method


def answers(method: Method, kind: str, scale: float = 1.0) -> tuple[Task, list[Message], list[Message]]:
    """What three clients send, honest, and what they send where the second is Byzantine."""
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(5, 4, 3).double(), 3, "ce")
    clients = [
        ClientRound(i, torch.randn(6, 5).double(), torch.arange(6) % 3, Randomness.simulated(i)) for i in range(3)
    ]
    byzantine = ByzantineClients(Byzantine(kind=kind, scale=scale), frozenset({1}))
    asked = Message("weights", 1, {"weights": task.like})
    return task, method.answer(task, asked, clients), byzantine.answer(method, task, asked, clients)


def drawn(attack: Byzantine, seed: int, clients: int) -> frozenset[int]:
    byzantine = ByzantineClients.of(attack, NTKFL(), seed, clients)
    assert byzantine is not None
    return byzantine.ids


def test_byzantine_clients_are_drawn_from_the_seed() -> None:
    attack = Byzantine(kind="sign-flip", fraction=0.2)
    assert len(drawn(attack, 0, 300)) == 60
    assert drawn(attack, 0, 300) == drawn(Byzantine(kind="random", fraction=0.2), 0, 300)
    assert drawn(attack, 0, 300) != drawn(attack, 1, 300)
    assert len(drawn(Byzantine(kind="random", fraction=0.01), 0, 5)) == 1


@pytest.mark.parametrize("options", [{}, {"codec": "dense"}, {"sparsity": 0.5}, {"sparsity": 0.5, "values": "8bit"}])
def test_jacobians_turned_round(options: dict[str, Any]) -> None:
    method = NTKFL(**options)
    task, honest, said = answers(method, "sign-flip", 5.0)
    for i in (0, 2):
        assert said[i].encode() == honest[i].encode()
    true, false = (method.read_rows(task, m)[0].dense() for m in (honest[1], said[1]))
    assert torch.allclose(false, -5 * true, rtol=1e-6)
    assert torch.equal(said[1].arrays["outputs"], honest[1].arrays["outputs"])


@pytest.mark.parametrize("options", [{}, {"codec": "dense"}, {"sparsity": 0.5}])
def test_random_jacobians_are_as_long_as_the_true_ones(options: dict[str, Any]) -> None:
    method = NTKFL(**options)
    task, honest, said = answers(method, "random", 3.0)
    true, false = (method.read_rows(task, m)[0] for m in (honest[1], said[1]))
    assert torch.allclose(false.norms(), 3 * true.norms(), rtol=1e-5)
    cosine = (false.dense() * true.dense()).sum() / false.dense().norm() / true.dense().norm()
    assert abs(float(cosine)) < 0.5


TURNED = ["fedavg", "fedadam", "fednova", "scaffold", "qsgd", "fedcom"]


@pytest.mark.parametrize("name", TURNED)
def test_updates_turned_round(name: str) -> None:
    """What the server makes of one client's corrupted reply is −3 times the step it makes of the truth."""
    kind = METHODS[name]
    if name in ("qsgd", "fedcom"):  # with so many levels that rounding does not show
        kind = type("Fine", (kind,), {"__module__": __name__, "bits": 16})
    method = kind(local_steps=2)
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(5, 4, 3).double(), 3, "ce")
    x = torch.randn(6, 5).double()
    byzantine = ByzantineClients(Byzantine(kind="sign-flip", scale=3.0), frozenset({0}))
    steps = []
    for answer in (method.answer, byzantine.answer):
        client = ClientRound(0, x, torch.arange(6) % 3, Randomness.simulated(0))
        conversation = method.round(task, method.start(task, task.like), 1, [0])
        asked = next(conversation)
        assert isinstance(asked, Message)
        replies = answer(task, asked, [client]) if answer == method.answer else answer(method, task, asked, [client])
        with pytest.raises(StopIteration) as end:
            conversation.send(replies)
        steps.append(end.value.value.state["weights"] - task.like)
    if name == "fedadam":  # Adam keeps the sign, not the length
        assert torch.equal(steps[0].sign(), -steps[1].sign())
    else:
        assert torch.allclose(steps[1], -3 * steps[0], atol=1e-3 * float(steps[0].abs().max()))


@pytest.mark.parametrize("options", [{"values": "float32"}, {"values": "float16"}, {"secure_sum": True}])
@pytest.mark.parametrize("kind", ["sign-flip", "random"])
def test_sums_with_another_gradient(options: dict[str, Any], kind: str) -> None:
    """As long as the attack says; curvature, samples and losses stay the client's own."""
    method = SumNTKFL(**options)
    task, honest, said = answers(method, kind, 5.0)
    for i in (0, 2):
        assert said[i].encode() == honest[i].encode()
    true, false = (method.read(task, m, task.like) for m in (honest[1], said[1]))
    gradient, turned = (reply.sums.arrays["gradient"] for reply in (true, false))
    if kind == "sign-flip":
        assert torch.allclose(turned, -5 * gradient, rtol=1e-3)
    assert float(turned.norm()) == pytest.approx(5 * float(gradient.norm()), rel=1e-3)
    assert all(torch.equal(a, false.sums.arrays[n]) for n, a in true.sums.arrays.items() if n != "gradient")
    assert torch.equal(true.losses, false.losses)


def test_labels() -> None:
    _, honest, said = answers(NTKFL(), "wrong-labels")
    assert torch.equal(said[1].arrays["labels"], (honest[1].arrays["labels"] + 1) % 3)
    assert torch.equal(said[1].arrays["outputs"], honest[1].arrays["outputs"])
    _, honest, said = answers(NTKFL(), "scaled-labels", 10.0)
    assert torch.equal(said[1].arrays["labels"].argmax(1), honest[1].arrays["labels"].long())
    assert float(said[1].arrays["labels"].sum()) == 60
    task, honest, said = answers(FedAvg(lr=0.01, local_steps=1), "scaled-labels", 10.0)
    w = task.like
    assert torch.allclose(said[1].arrays["weights"] - w, 10 * (honest[1].arrays["weights"] - w))


def test_lies_about_losses_speak_for_the_worst_candidate() -> None:
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(5, 4, 3), 3, "ce")
    client = ClientRound(1, torch.randn(6, 5), torch.arange(6) % 3, Randomness.simulated(0))
    byzantine = ByzantineClients(Byzantine(kind="false-losses"), frozenset({1}))
    asked = Message("candidates", 1, pack_span(torch.stack([task.like, 30 * task.like, task.like])))
    for method in (NTKFL(), NTKFL(shuffle=True)):
        (said,) = byzantine.answer(method, task, asked, [client])
        losses = said.arrays["losses" if method.shuffle else "sums"]
        assert bool((losses[..., 1] == 0).all())
        assert bool((losses[..., [0, 2]] == 1e30).all())
        method.check(task, said)  # nothing that a check could tell
        for kind, favourite in (("shortest-flow", 0), ("longest-flow", 2)):
            (said,) = ByzantineClients(Byzantine(kind=kind), frozenset({1})).answer(method, task, asked, [client])
            losses = said.arrays["losses" if method.shuffle else "sums"].flatten()
            assert [i for i in range(3) if losses[i] == 0] == [favourite]


def test_a_flood_is_a_clients_samples_over_and_over() -> None:
    """As often as asked for; through a shuffler as often as makes the rows that every client sends."""
    task, honest, said = answers(NTKFL(), "flood+wrong-labels", 3.0)
    assert len(said[0].arrays["labels"]) == 6
    assert torch.equal(said[1].arrays["labels"], ((honest[1].arrays["labels"] + 1) % 3).repeat(3))
    method = NTKFL(shuffle=True)
    byzantine = ByzantineClients(Byzantine(kind="flood", scale=3.0), frozenset({1}), rows=8)
    client = ClientRound(1, torch.randn(6, 5).double(), torch.arange(6) % 3, Randomness.simulated(1))
    (reply,) = byzantine.answer(method, task, Message("weights", 1, {"weights": task.like}), [client])
    assert len(method.split(reply)) == 8


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("ntk-fl", {}, set(ATTACKS)),
        ("ntk-fl", {"choose": "validation"}, set(ATTACKS) - {"false-losses", "shortest-flow", "longest-flow"}),
        ("scaffold", {}, ANY | {"random", "sign-flip", "scaled-labels"}),
        ("qsgd", {}, ANY | {"random", "sign-flip", "scaled-labels"}),
        ("sum-ntk-fl", {}, ANY | {"random", "sign-flip", "flood"}),
        ("centralized", {}, ANY),
    ],
)
def test_an_attack_is_refused_where_clients_cannot_mount_it(name: str, options: Any, kinds: set[str]) -> None:
    method = METHODS[name](**options)
    for kind in ATTACKS:
        if kind in kinds:
            Byzantine(kind=kind).check(method)
        else:
            with pytest.raises(ConfigError, match=f"clients of {name} have no way to mount '{kind}': valid are "):
                Byzantine(kind=f"extreme+{kind}").check(method)


def test_attacks_on_an_update_are_combined() -> None:
    """What is trained on scaled labels is turned round as well."""
    method = FedAvg(lr=0.01, local_steps=1)
    task, _, scaled = answers(method, "scaled-labels", 3.0)
    *_, both = answers(method, "scaled-labels+sign-flip", 3.0)
    trained, turned = (m[1].arrays["weights"] - task.like for m in (scaled, both))
    torch.testing.assert_close(turned, -3.0 * trained)


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


def accuracy(fed: ntkfl.data.Federated, method: Method, attack: Byzantine | None, rounds: int) -> float:
    torch.manual_seed(0)
    model = ntkfl.models.mlp(method.projected_dim or 64, 24, 10, **method.model_defaults)
    run = Simulation(model, fed, method, clients_per_round=10, byzantine=attack).run(rounds)
    return float(run.history[-1]["test_accuracy"])


BOOSTED = Byzantine(kind="sign-flip", fraction=0.2, scale=5.0)


@pytest.fixture(scope="module")
def ruined(digits: ntkfl.data.Federated) -> float:
    return accuracy(digits, FedAvg(local_steps=20), BOOSTED, 12)


@pytest.mark.parametrize("robust", ["clip", "median", "trimmed"])
def test_boosted_updates_ruin_a_mean_and_no_robust_one(
    robust: str, digits: ntkfl.data.Federated, ruined: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkfl.methods.local_training.UPDATE_LIMIT", 1.0)
    assert ruined < 0.4
    assert accuracy(digits, FedAvg(robust=robust, local_steps=20), BOOSTED, 12) > 0.75


def test_rows_that_are_longer_than_others_are_cut_to_length(digits: ntkfl.data.Federated) -> None:
    """Honest rows lie within a factor of four of the median, six times random ones do not; short rows cost less."""
    first = []
    for clip in (None, 4.0):
        torch.manual_seed(0)
        model, attack = ntkfl.models.mlp(64, 24, 10), Byzantine(kind="random", fraction=0.2, scale=6.0)
        method = NTKFL(row_clip=clip, verify=False, drop_opposed=False)
        run = Simulation(model, digits, method, clients_per_round=10, byzantine=attack).run(1)
        first.append(run.history[0])
    plain, clipped = first
    assert clipped["byzantine"]
    assert clipped["clipped_rows"] == sum(digits.sizes[i] for i in clipped["byzantine"])
    assert clipped["kernel_products"] < plain["kernel_products"]


def test_rows_that_were_made_up_are_found_to_the_last(digits: ntkfl.data.Federated) -> None:
    for kind in ("sign-flip", "random"):
        torch.manual_seed(0)
        model, attack = ntkfl.models.mlp(64, 24, 10), Byzantine(kind=kind, fraction=0.2)
        method = NTKFL(verify=True)
        run = Simulation(model, digits, method, clients_per_round=10, byzantine=attack).run(2)
        for record in run.history:
            assert record["byzantine"]
            assert record["made_up_rows"] == sum(digits.sizes[i] for i in record["byzantine"])


def test_clients_that_call_everything_by_a_wrong_name_are_left_out() -> None:
    """Two cells of configs/poisoning/digits.toml, cut short."""
    attack = {"kind": "wrong-labels", "fraction": 0.2}
    data = {"dataset": "digits", "clients": 60, "alpha": 0.3}
    own = {"rounds": 5, "clients_per_round": 15, "data": data, "model": {"hidden": (48,)}, "byzantine": attack}
    plain, trimmed = (
        execute(config(**own, method={"name": "ntk-fl", "trim": trim})).history[-1] for trim in (0.0, 0.3)
    )
    assert trimmed["test_accuracy"] > plain["test_accuracy"] + 0.05
    assert trimmed["trimmed_rows"] > 0


def test_lies_about_losses_lose_their_veto(digits: ntkfl.data.Federated) -> None:
    attack, options = Byzantine(kind="false-losses", fraction=0.2), {"projected_dim": 30, "sparsity": 0.9}
    plain = accuracy(digits, METHODS["cp-ntk-fl"](trim_losses=0.0, **options), attack, 3)
    trimmed = accuracy(digits, METHODS["cp-ntk-fl"](**options), attack, 3)
    assert trimmed > plain + 0.1
