"""Canaries: train once on the real path, with m records in or out by coin flips, and guess the coins.

The attacker is the one that ε speaks of. It chose the canaries, knows all other data and the noise of all clients but
the `noise_clients` that ε counts on, and sees each round's broadcast and the total with noise. It knows what canary i
adds in round t, v_i,t, in units of the noise, so that

    r_t = total_t − (what is known)_t = Σ_i s_i v_i,t + N(0, τ² I),     s_i ∈ {0, 1},
    ŝ = ½ + (K + 4 τ² I)⁻¹ Σ_t V_t (r_t − V_tᵀ ½),                       K = Σ_t V_t V_tᵀ,

the linear estimate of least error; τ, the noise over what was promised, is measured. ŝ > ½ guesses "in". Two lower
bounds on ε share a confidence of 95 %: the one-run bound (Steinke, Nasr, Jagielski, Privacy Auditing with One (1)
Training Run, NeurIPS 2023), for any mechanism; and, where no credit for sampling is taken, that of Gaussian
differential privacy, which takes errors on different canaries as independent.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.data import Federated, from_clients
from ntkfl.errors import ConfigError
from ntkfl.extras import missing
from ntkfl.federation.client import honest
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.simulation import Simulation, simulation_of
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.replies import Reply
from ntkfl.methods.sums.noisy_sums import NoisySums
from ntkfl.privacy.randomness import Randomness
from ntkfl.progress import plural
from ntkfl.wire import Message

try:
    from scipy.optimize import brentq
    from scipy.stats import beta, binom, norm
except ImportError:
    raise missing("the audit", "audit") from None

CONFIDENCE = 0.95
_SCALE = 30.0  # inputs of canaries, in deviations of the data's: gradients beyond any clip
Batch = tuple[Tensor, Tensor]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Coins = NDArray[np.bool_]


@dataclass(frozen=True)
class CanaryFinding:
    """What was promised, and what an attacker showed. `correct` of `canaries` coins were guessed; `one_run` and
    `gaussian` are lower bounds on ε at δ, and `shown` is the larger one, at 95 %.
    """

    method: str
    rounds: int
    promised: float
    delta: float
    canaries: int
    correct: int
    one_run: float
    gaussian: float | None

    @property
    def shown(self) -> float:
        """The larger lower bound on ε: what an attacker proved."""
        return max(self.one_run, self.gaussian or 0.0)

    @property
    def holds(self) -> bool:
        """Whether the attacker proved no more than was promised."""
        return self.shown <= self.promised

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"shown": self.shown, "holds": self.holds}

    def __str__(self) -> str:
        verdict = "the promise is not refuted" if self.holds else "THE PROMISE IS BROKEN"
        return (
            f"promised ε = {self.promised:.2f} (simulated) at δ = {self.delta:g} for a record over "
            f"{plural(self.rounds, 'round')}; an attacker showed at least {self.shown:.2f} at {CONFIDENCE:.0%} "
            f"({self.correct} of {self.canaries} canaries guessed): {verdict}"
        )


def audit_canaries(config: RunConfig, canaries: int = 200, seed: int = 0) -> CanaryFinding:
    """Train the configuration once with canaries, and attack it. Costs the training three times over at most, a pass of
    every canary a round, and `canaries` × d numbers.
    """
    method, privacy = config.built_method, config.settled[0]
    if not isinstance(method, NoisySums) or privacy.epsilon is None:
        raise ConfigError(f"canaries test a promise of ε, and {method.name} makes none here: set epsilon")
    data = load_data(config)
    data = data.hold_out(config.hold_out, seed=config.seed)[0] if config.hold_out else data
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    planted, owners = _planted(data, canaries, seed), np.arange(canaries) % len(data)
    played = config.model_copy(update={"hold_out": 0, "byzantine": None, "repeatable": True})
    simulation = simulation_of(played, _with_canaries(data, planted, owners, coins))
    attacker = _Attacker(simulation, planted, owners, data.sizes)
    simulation.clients.respond, simulation.server.on_replies = attacker.respond, attacker.received
    simulation.run(config.rounds, callbacks=[])
    budget, scores, error = method.budget(simulation.task), attacker.scores(), (1 - CONFIDENCE) / 2
    assert budget is not None
    return CanaryFinding(
        method=method.name,
        rounds=config.rounds,
        promised=budget.spent(config.rounds),
        delta=privacy.delta,
        canaries=canaries,
        correct=int(((scores > 0) == coins).sum()),
        one_run=one_run_bound(scores, coins, privacy.delta, error),
        gaussian=gaussian_bound(scores, coins, privacy.delta, error) if privacy.sampling_rate == 1 else None,
    )


# -- Lower bounds on ε -------------------------------------------------------------------------------------------------


def one_run_bound(scores: Floats, coins: Coins, delta: float, error: float) -> float:
    """ε that (ε, δ)-differential privacy must exceed, wrong with chance `error`: by all guesses, and by the surest
    quarter of them. Scores above 0 guess "in"; their size says how sure.
    """
    m, found = len(scores), 0.0
    for guesses in (m, max(1, m // 4)):
        surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
        correct = int(((scores[surest] > 0) == coins[surest]).sum())

        def chance(epsilon: float, r: int = guesses, v: int = correct) -> float:
            """Bound on P(v of r guesses right) under (ε, δ): P(B ≥ v) + 2mδ max_i P(v > B ≥ v − i) / i."""
            q = 1 / (1 + math.exp(-epsilon))
            below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q)) / np.arange(1, v + 1)
            return float(binom.sf(v - 1, r, q) + 2 * m * delta * below.max(initial=0.0)) - error / 2

        if chance(0.0) < 0:
            found = max(found, float(brentq(chance, 0.0, 50.0)))
    return found


def gaussian_bound(scores: Floats, coins: Coins, delta: float, error: float) -> float:
    """ε at δ of the μ that μ-Gaussian differential privacy must exceed: μ = Φ⁻¹(hits) − Φ⁻¹(false alarms), from the
    Clopper-Pearson bounds of both.
    """
    said, ins, outs = scores > 0, int(coins.sum()), int((~coins).sum())
    hits, alarms = int((said & coins).sum()), int((said & ~coins).sum())
    low = float(beta.ppf(error / 2, hits, ins - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - error / 2, alarms + 1, outs - alarms)) if alarms < outs else 1.0
    mu = float(norm.ppf(low) - norm.ppf(high))
    if not mu > 0:
        return 0.0

    def excess(epsilon: float) -> float:
        above = math.exp(epsilon + float(norm.logcdf(-epsilon / mu - mu / 2)))
        return float(norm.cdf(-epsilon / mu + mu / 2)) - above - delta

    return float(brentq(excess, 0.0, mu**2 + 20 * mu + 1)) if excess(0.0) > 0 else 0.0


# -- Canaries, and what the attacker sees ------------------------------------------------------------------------------


def _planted(data: Federated, count: int, seed: int) -> Batch:
    """x [count, …] and y of records far from all others: signs at random, or tokens, with any label."""
    draws, (x, y) = torch.Generator().manual_seed(seed), data.test
    if x.is_floating_point():
        signs = 2.0 * torch.randint(0, 2, (count, *x.shape[1:]), generator=draws) - 1
        new = _SCALE * x.std().clamp_min(1e-3) * signs
    else:
        new = torch.randint(0, int(x.max()) + 1, (count, *x.shape[1:]), generator=draws)
    if data.classes is None:
        return new.to(x), _SCALE * torch.randn(count, *y.shape[1:], generator=draws).to(y)
    return new.to(x), torch.randint(0, data.classes, (count,), generator=draws)


def _with_canaries(data: Federated, planted: Batch, owners: Ids, coins: Coins) -> Federated:
    """The clients with the canaries that are in, after their own records."""
    clients, (x, y) = [], planted
    for number in range(len(data)):
        mine = torch.from_numpy((owners == number) & coins)
        own = data.client(number)
        clients.append((torch.cat([own[0], x[mine]]), torch.cat([own[1], y[mine]])))
    return from_clients(clients, test=data.test, classes=data.classes, tokens=not x.is_floating_point())


class _Attacker:
    """Answers for the clients, and hears each round's question and total. K [m, m] is Σ_t V_tᵀ V_t of canaries'
    contributions V_t, and b [m] is Σ_t V_tᵀ (r_t − V_t ½), of all rounds so far.
    """

    def __init__(self, simulation: Simulation, planted: Batch, owners: Ids, sizes: Sequence[int]) -> None:
        assert isinstance(simulation.method, NoisySums)
        self.method, self.task, self.owners, self.sizes = simulation.method, simulation.task, owners, sizes
        self.planted = simulation.clients.place(planted)
        self.quiet = copy.copy(self.task)  # the same network and settings without noise
        self.quiet.privacy = self.task.privacy.model_copy(update={"epsilon": None})
        self.K, self.b = np.zeros((len(owners), len(owners))), np.zeros(len(owners))
        self.square, self.numbers = 0.0, 0  # Σ_t ‖r_t − V_t ½‖², and how many numbers that is of
        self.heard = 0  # the last round whose total came
        self.known: dict[int, Tensor] = {}  # of each client of the round what the attacker knows of its contribution

    def in_noises(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """All numbers of a reply or a total, in deviations of the noise that ε counts on: float64 [numbers]."""
        wide = self.method.widths(self.task, {name: array.numel() for name, array in arrays.items()})
        shares = math.sqrt(self.task.privacy.noise_clients)
        return torch.cat([arrays[name].double().flatten() / (shares * wide[name]) for name in sorted(arrays)])

    def without_noise(self, client: ClientRound, records: Batch) -> Tensor:
        """What the client would contribute with these records."""
        own = ClientRound(client.id, *records, client.randomness, dict(client.memory))
        return self.in_noises(self.method.answer(self.quiet, self.question, own).arrays)

    def respond(self, method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        """A client's reply, and beside it what the attacker knows: what the client sends without canaries, with its
        noise where ε does not count on that.
        """
        if question.round == self.heard:
            raise ConfigError(f"{self.method.name} asks more than once a round: canaries know one question")
        self.question = question
        n = self.sizes[client.id]
        known = self.without_noise(client, (client.x[:n], client.y[:n]))
        with_all = self.without_noise(client, (client.x, client.y))
        reply = honest(method, task, question, client)
        if len(self.known) >= task.privacy.noise_clients:
            known = known + self.in_noises(reply.arrays) - with_all
        self.known[client.id] = known
        return reply

    def received(self, replies: list[Any]) -> None:
        """The round's total: add what it says of the canaries."""
        known, self.known, self.heard = self.known, {}, self.question.round
        (at,) = np.isin(self.owners, list(known)).nonzero()
        if not len(at):
            return
        (x, y), alone = self.planted, ClientRound(0, *self.planted, Randomness(bytes(32)))
        V = torch.stack([self.without_noise(alone, (x[i : i + 1], y[i : i + 1])) for i in at])
        rest = self.in_noises(self.method.total(self.task, replies)) - sum(known.values()) - V.sum(0) / 2
        self.K[np.ix_(at, at)] += (V @ V.T).numpy()
        self.b[at] += (V @ rest).numpy()
        self.square += float(rest.square().sum())
        self.numbers += len(rest)

    def scores(self) -> Floats:
        """ŝ − ½ [m]; τ² from what no canary explains."""
        values, vectors = np.linalg.eigh(self.K)
        there = values > 1e-9 * values[-1]
        c = vectors.T @ self.b
        explained = float((c[there] ** 2 / values[there]).sum())
        noise = max(0.0, self.square - explained) / max(1, self.numbers - int(there.sum()))
        found: Floats = vectors[:, there] @ (c[there] / (values[there] + 4 * noise))
        return found
