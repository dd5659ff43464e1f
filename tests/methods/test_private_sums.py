"""private-sums: what leaves a client changes little with a record, the noise is as wide as ε says, and sums train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods import ClientRound, PrivateSums, Task
from ntkfl.methods.inspection import Participation
from ntkfl.methods.whitening import is_whitening, read_whitening
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import budget, spent
from ntkfl.privacy.sum_noise import COUNT, GRAINS, moment_change, vector_change
from ntkfl.wire import Message
from tests.methods.rounds import gradient, play, play_rounds, small_clients, small_task


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=6), seed=0)


def asked(task: Task, round: int = 1, asks: bool = True) -> Message:
    arrays = {"weights": task.like} | ({"asks": torch.tensor(1, dtype=torch.uint8)} if asks else {})
    return Message("weights", round, arrays)


def reply(method: PrivateSums, task: Task, client: ClientRound, round: int = 1) -> dict[str, torch.Tensor]:
    (answer,) = method.answer(task, asked(task, round, round == 1), [client])
    return {name: array.double() for name, array in answer.arrays.items()}


def as_vector(arrays: dict[str, torch.Tensor], moments: bool) -> torch.Tensor:
    return torch.cat([array for name, array in sorted(arrays.items()) if name.startswith("moments") == moments])


def test_a_record_changes_integers_by_no_more_than_the_noise_is_for() -> None:
    method, task = PrivateSums(epsilon=None, clip=0.2), small_task()
    (client,) = small_clients(40)
    whole = reply(method, task, client)
    changes, inputs = [], []
    for left_out in range(40):
        kept = [i for i in range(40) if i != left_out]
        less = reply(method, task, ClientRound(0, client.x[kept], client.y[kept], client.randomness))
        changes.append(float((as_vector(whole, False) - as_vector(less, False)).norm()))
        inputs.append(float((as_vector(whole, True) - as_vector(less, True)).norm()))
    numbers, moments = task.like.numel(), len(as_vector(whole, True))
    assert 0.9 * GRAINS < max(changes) <= vector_change(numbers, True)
    assert 0.5 * GRAINS < max(inputs) <= moment_change([moments])


def test_noise_has_the_width_that_the_budget_asks_for() -> None:
    """Of all clients together σ² = Δ² / 2ρ, each ρ a share of the budget; gradients and moments have their own."""
    rounds, honest = 10, 4
    options = {"budget_rounds": rounds, "noise_clients": honest, "input_share": 0.2}
    loud, task = PrivateSums(epsilon=2.0, delta=1e-6, **options), small_task()
    quiet = PrivateSums(epsilon=None, **options)
    (client,) = small_clients(20)
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for key in range(60):
        own = ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32))
        noisy, plain = reply(loud, task, own), reply(quiet, task, own)
        for moments in found:
            found[moments].append(as_vector(noisy, moments) - as_vector(plain, moments))
    rho = budget(2.0, 1e-6)
    assert spent([(rho, 1)], 1e-6) == pytest.approx(2.0)
    numbers = len(found[True][0])
    for moments, change, share in (
        (False, vector_change(task.like.numel(), True), 0.8 / rounds),
        (True, moment_change([numbers]), 0.2),
    ):
        drawn = torch.cat(found[moments])
        expected = change**2 / (2 * rho * share * honest)
        assert float(drawn.square().mean()) / expected == pytest.approx(1, abs=5 * math.sqrt(2 / len(drawn)))


def test_noise_is_new_for_every_question_and_client() -> None:
    method, task = PrivateSums(epsilon=2.0), small_task()
    (client,) = small_clients(20)
    one = ClientRound(0, client.x, client.y, Randomness(bytes(32)))
    first, again = reply(method, task, one, 2), reply(method, task, one, 2)
    assert torch.equal(first["gradient"], again["gradient"])
    assert not torch.equal(first["gradient"], reply(method, task, one, 3)["gradient"])
    other = ClientRound(0, client.x, client.y, Randomness(bytes([1]) * 32))
    assert not torch.equal(first["gradient"], reply(method, task, other, 2)["gradient"])


def test_at_client_level_a_client_changes_integers_by_no_more_than_the_noise_is_for() -> None:
    """Whatever its data: gradients far beyond `clip`, below it, and of many samples or one."""
    method, task = PrivateSums(unit="client", epsilon=None, clip=2.0), small_task()
    found = []
    for client in small_clients(1, 3, 40, 200):
        for scale in (1e-3, 1.0, 1e6):
            arrays = reply(method, task, ClientRound(0, scale * client.x, client.y, client.randomness))
            assert "samples" not in arrays
            found.append(float(as_vector(arrays, False).norm()))
            assert float(as_vector(arrays, True).norm()) <= moment_change([len(as_vector(arrays, True))])
    bound = vector_change(task.like.numel(), False)
    assert 0.99 * GRAINS < max(found) <= bound < GRAINS * 1.01
    assert min(found) < GRAINS / 2  # what is short enough is not scaled


def test_at_client_level_a_round_is_the_mean_of_clipped_client_gradients() -> None:
    task, clients = small_task(), small_clients(12, 9, 30)
    method = PrivateSums(unit="client", epsilon=None, clip=0.3, input_share=0, lr=2.0, label_smoothing=0)
    outcome, _ = play(method, task, clients)
    step = torch.zeros_like(task.like)
    for client in clients:
        g = gradient(task, task.like, client.x, client.y) / 0.3
        step += g / g.norm().clamp_min(1) / 3
    assert float((outcome.state["weights"] - (task.like - 2.0 * step)).abs().max()) < 2.0 / GRAINS


def test_noise_by_the_server_is_added_once_and_as_wide_as_that_of_all_clients() -> None:
    task, clients = small_task(), small_clients(20, 30)
    options = {"epsilon": 2.0, "budget_rounds": 4}
    ends = []
    for noise_by in ("clients", "server"):
        method = PrivateSums(noise_by=noise_by, **options)
        replies = method.answer(task, asked(task), clients)
        summed = sum(reply.arrays["gradient"].double() for reply in replies)
        ends.append(summed)
    quiet = PrivateSums(noise_by="server", epsilon=None, budget_rounds=4).answer(task, asked(task), clients)
    assert torch.equal(ends[1], sum(reply.arrays["gradient"].double() for reply in quiet))  # no noise has left them
    assert not torch.equal(ends[0], ends[1])
    drawn, numbers = [], task.like.numel()
    for key in range(60):
        task.randomness = lambda round, key=key: Randomness.simulated(key, round)  # type: ignore[misc]
        noisy = method.total(task, 1, method.answer(task, asked(task), clients))
        drawn.append(noisy["gradient"] - ends[1])
    width = method.widths({"gradient": numbers})["gradient"]
    together = torch.cat(drawn)
    assert float(together.square().mean()) / width**2 == pytest.approx(1, abs=5 * math.sqrt(2 / len(together)))
    assert width == pytest.approx(2 * PrivateSums(noise_clients=4, **options).widths({"gradient": numbers})["gradient"])
    assert "trusted" in method.promise(2, 4)[1]
    run = Participation(times=2, cohort=2, clients=2, rounds=2, simulated=False)
    assert any("trusted" in line for line in method.guarantees(run)[0].assumptions)


def test_the_servers_noise_is_the_operating_systems_unless_simulated(digits: ntkfl.data.Federated) -> None:
    task = small_task()
    assert task.randomness(1).seed("noise") != task.randomness(1).seed("noise")
    method, model = PrivateSums(noise_by="server", epsilon=30.0, budget_rounds=1), ntkfl.models.mlp(64, 16, 10)
    runs = [ntkfl.train(model, digits, method, rounds=1, seed=1, callbacks=[]) for _ in range(2)]
    assert runs[0].history == runs[1].history


def test_sampling_earns_credit_where_it_is_real() -> None:
    task, clients = small_task(total_clients=20), small_clients(3000, 3000)
    method = PrivateSums(epsilon=3.0, budget_rounds=10, noise_clients=2, sampling_rate=0.1)
    plain = PrivateSums(epsilon=3.0, budget_rounds=10, noise_clients=2)
    sizes = {"gradient": 100, "moments/0-35+35-42": 21}
    assert all(method.widths(sizes)[name] < 0.8 * plain.widths(sizes)[name] for name in sizes)
    outcome, _ = play(method, task, clients)
    assert outcome.diagnostics["epsilon"] < outcome.diagnostics["epsilon_always_drawn"]
    run = Participation(times=2, cohort=2, clients=20, rounds=10, simulated=True)
    sampled, always = method.guarantees(run)
    assert sampled.epsilon == pytest.approx(3.0, rel=1e-3)
    assert always.epsilon > 4.5
    assert any("at random" in line for line in sampled.assumptions)
    assert any("no credit" in line for line in always.assumptions)
    with pytest.raises(ConfigError, match="more than sampling_rate"):
        play(method, small_task(total_clients=19), clients)
    assert "drawn at random" in method.promise(2, 10)[1]


def test_without_noise_a_round_is_a_clipped_step_with_momentum() -> None:
    task, clients = small_task(), small_clients(12, 9)
    method = PrivateSums(epsilon=None, clip=1e3, input_share=0, lr=2.0, momentum=0.5, label_smoothing=0)
    state = play_rounds(method, task, clients, 2)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    w, v = task.like.clone().requires_grad_(), torch.zeros_like(task.like)
    for _ in range(2):
        f = torch.func.functional_call(task.model, ntkfl.tangent.parameters.unflatten(task.model, w), (x,))
        (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(f, y), w)
        v = 0.5 * v + g / 1e3
        w = (w - 2.0 * v).detach().requires_grad_()
    assert (
        float((state["weights"] - w.detach()).abs().max()) < 2 * 2 * 2 / GRAINS
    )  # steps · lr · what rounding may change


def test_inputs_are_whitened_by_their_moments() -> None:
    """After the first round P² (A/mean + damping) = 1, with A of inputs at one norm."""
    task, clients = small_task(), small_clients(300, 200)
    method = PrivateSums(epsilon=None, damping=0.05)
    outcome, _ = play(method, task, clients)
    (name,) = [name for name in outcome.state if name.startswith("whitening/")]
    (P,) = read_whitening({k: a for k, a in outcome.state.items() if is_whitening(k)}, task.like, 0.05).values()
    x = torch.cat([c.x for c in clients])
    rows = torch.cat([x / x.square().mean(1, keepdim=True).sqrt(), torch.ones(len(x), 1).double()], dim=1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    A = rows.T @ rows
    A = A / A.trace() * len(A)
    assert torch.allclose(P @ P @ (A + 0.05 * torch.eye(6)), torch.eye(6).double(), atol=1e-3)
    second, later = play(method, task, clients, outcome.state, 2)
    assert name in later[0].message.arrays
    assert not any(part.startswith("moments") for sent in later for part in sent.message.arrays)
    assert torch.equal(second.state[name], outcome.state[name])


def test_the_record_and_the_guarantee_say_what_was_spent() -> None:
    task, clients = small_task(), small_clients(3000, 3000)
    method = PrivateSums(epsilon=3.0, budget_rounds=2, noise_clients=2)
    first, _ = play(method, task, clients)
    second, _ = play(method, task, clients, first.state, 2)
    assert 0 < first.diagnostics["epsilon"] < second.diagnostics["epsilon"] == pytest.approx(3.0)
    assert second.diagnostics["epsilon"] <= 3.0 + 1e-9
    assert (second.diagnostics["delta"], second.diagnostics["unit"]) == (1e-5, "record")
    assert second.train_loss is None
    run = Participation(times=2, cohort=2, clients=2, rounds=2, simulated=True)
    (told,) = method.guarantees(run)
    assert told.epsilon == pytest.approx(3.0, rel=1e-3)
    assert "those who see the models" in told.against
    (hidden,) = PrivateSums(secure_sum=True, budget_rounds=2, noise_clients=2).guarantees(run)
    assert "aggregator" in hidden.against
    assert PrivateSums(epsilon=None).guarantees(run) == []


def test_what_would_void_the_promise_is_refused() -> None:
    task, clients = small_task(), small_clients(20, 20)
    method = PrivateSums(budget_rounds=2, noise_clients=3)
    with pytest.raises(TooFew, match="noise of 2 clients"):
        play(method, task, clients)
    with pytest.raises(TooFew, match="sum of 2 clients"):
        method.from_total(task, asked(task), {}, 2)
    with pytest.raises(ConfigError, match="ε was for 2 rounds"):
        method.answer(task, asked(task, 3, False), clients)
    with pytest.raises(ConfigError, match="ε was for 2 rounds"):
        next(method.round(task, method.start(task, task.like), 3, [0, 1]))
    with pytest.raises(MessageError, match="first round, once"):
        method.answer(task, asked(task, 2, True), clients)
    with pytest.raises(ConfigError, match="3 clients per round"):
        method.promise(2, 2)
    with pytest.raises(ConfigError, match="the run has 3"):
        method.promise(3, 3)
    for options in (
        {"noise": 1.0}, {"clip": None}, {"unit": "site"}, {"noise_by": "nobody"},
        {"noise_by": "server", "noise_clients": 2},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            PrivateSums(**options)
    with pytest.raises(ConfigError, match="no privacy"):
        PrivateSums(epsilon=1e9, noise_clients=10**4).widths({"gradient": 10})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("gradient", torch.zeros(3, dtype=torch.int32)),
        ("samples", torch.zeros(2, dtype=torch.int32)),
        ("losses", torch.zeros(1)),
        ("moments/0-35+35-42", torch.zeros(20, dtype=torch.int32)),
        ("moments/0-3500+35-42", torch.zeros(21, dtype=torch.int32)),
    ],
)
def test_other_replies_are_refused(name: str, array: torch.Tensor) -> None:
    method, task = PrivateSums(), small_task()
    (answer,) = method.answer(task, asked(task), small_clients(5))
    method.check(task, answer)
    with pytest.raises(MessageError):
        method.check(task, Message("update", 1, dict(answer.arrays) | {name: array}))


def test_masked_sums_are_the_plain_ones(digits: ntkfl.data.Federated) -> None:
    """The same noise, the same weights: sums of so few clients lose nothing under a mask."""
    model, ends = ntkfl.models.mlp(64, 16, 10), []
    for secure in (False, True):
        method = PrivateSums(epsilon=100.0, budget_rounds=3, noise_clients=6, secure_sum=secure, sum_samples=500)
        run = ntkfl.train(model, digits, method, rounds=3, seed=1, callbacks=[])
        assert run.history[-1]["epsilon"] == pytest.approx(100.0)
        assert run.history[-1].get("bounded_clients", 0) == 0
        ends.append(ntkfl.tangent.parameters.flatten(run.model))
    assert float((ends[0] - ends[1]).norm()) < 1e-3 * float(ends[0].norm())
    assert COUNT < GRAINS


@pytest.mark.parametrize(("features", "whitens"), [(1023, True), (1024, False)])
def test_where_nothing_is_whitened_all_of_the_budget_goes_to_gradients(
    features: int, whitens: bool, tmp_path: Path
) -> None:
    """A layer of at most 1,024 inputs, the bias's 1 among them, is whitened; beyond, noise is as narrow as without."""
    generator = torch.Generator().manual_seed(0)
    sites = [(torch.randn(200, features, generator=generator), torch.arange(200) % 2) for _ in range(3)]
    fed, method = ntkfl.data.from_clients(sites[:2], test=sites[2]), PrivateSums(epsilon=2.0, budget_rounds=2)
    heard: list[str] = []

    class Heard(ntkfl.Callback):
        def on_start(self, note: str) -> None:
            heard.append(note)

    run = ntkfl.train(
        ntkfl.models.mlp(features, 2, 2), fed, method, rounds=2, out=tmp_path / "run", callbacks=[Heard()]
    )
    assert any("inputs are not whitened" in line and "1,024" in line for line in heard) != whitens
    assert run.method.input_share == (0.1 if whitens else 0.0)
    assert run.config["method"]["input_share"] == run.method.input_share
    assert any(is_whitening(name.removeprefix("state/")) for name in run.checkpoint) == whitens
    assert run.history[-1]["epsilon"] == pytest.approx(2.0, rel=1e-3)  # all of it is spent, either way
    sizes, without = {"gradient": 100, "samples": 1}, PrivateSums(epsilon=2.0, budget_rounds=2, input_share=0.0)
    wider = run.method.widths(sizes)["gradient"] / without.widths(sizes)["gradient"]
    assert wider == pytest.approx(0.9**-0.5 if whitens else 1.0, rel=1e-6)
    assert any("not covered: the 200 test samples: the server measures on them" in line for line in heard)
