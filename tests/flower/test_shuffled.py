"""CP-NTK-FL and secure sums through Flower, with a real shuffler and key server: the same end as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.flower import Shuffler, Strategy, reply
from ntkfl.flower.messages import content
from ntkfl.methods import CPNTKFL, Method, Privacy, SumNTKFL
from ntkfl.privacy.projection import RunSecret
from tests.flower.grids import LocalGrid
from tests.services.federation import Federation, federation

pytest.importorskip("flwr")
CLIENTS, ROUNDS = 3, 2


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def pairs(samples: int = 10) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    found = []
    for _ in range(CLIENTS):
        x = torch.randn(samples, 12, generator=drawn)
        found.append((x, (x[:, :3]).argmax(1)))
    return found


def grid_of(made: Federation, model: Callable[[], nn.Module] = net) -> LocalGrid:
    data = pairs()

    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        through = Shuffler(made.folder / "clients" / f"client-{number}")
        return reply(msg, context, model(), data[number], seed=5, through=through)

    return LocalGrid({100 + number: app for number in range(CLIENTS)})


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def played(made: Federation, method: Method, privacy: Privacy, model: Callable[[], nn.Module] = net) -> torch.Tensor:
    strategy = Strategy(
        method,
        model(),
        privacy=privacy,
        robust=None,
        through=Shuffler(made.folder / "aggregator"),
        min_train_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
        fraction_evaluate=0.0,
    )
    result = strategy.start(grid_of(made, model), ArrayRecord(model().state_dict()), num_rounds=ROUNDS)
    assert [len(m) > 0 for m in result.train_metrics_clientapp.values()] == [True] * ROUNDS
    ended = model()
    ended.load_state_dict(result.arrays.to_torch_state_dict())
    return weights(ended)


def simulated(method: Method, privacy: Privacy, model: Callable[[], nn.Module] = net) -> torch.Tensor:
    data = ntkfl.data.from_clients(pairs(), test=pairs()[0], classes=3)
    run = ntkfl.train(model(), data, method, privacy=privacy, rounds=ROUNDS, seed=5, callbacks=[])
    return weights(run.model)


def test_a_secure_sum_ends_where_the_simulation_ends(tmp_path: Path) -> None:
    how = SumNTKFL(), Privacy(secure_sum=True)
    with federation(tmp_path, CLIENTS) as made:
        assert torch.allclose(played(made, *how), simulated(*how), atol=1e-6)


def test_a_second_sum_of_the_same_clients_ends_there_too(tmp_path: Path) -> None:
    """Factors of a convolution are rough: its step is measured in a second exchange, by the clients of the first."""
    how = SumNTKFL(), Privacy(secure_sum=True), convolution
    with federation(tmp_path, CLIENTS) as made:
        assert torch.allclose(played(made, *how), simulated(*how), atol=1e-6)


def convolution() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    ).double()


def test_shuffled_rows_with_a_projection_end_where_the_simulation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ρ is the key server's; the simulation is given the same."""
    privacy = Privacy(projected_dim=6, projection="gaussian", subsample_rate=1.0, sparsity=0.5)

    def small() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    with federation(tmp_path, CLIENTS) as made:
        found = played(made, CPNTKFL(), privacy, small)
        (run,) = (path.stem[4:] for path in (made.folder / "shuffler").glob("run-*.sqlite"))
        secret = made.client("client-0").identity.run_secret(run)
        assert secret.seed.reveal() == made.client("client-1").identity.run_secret(run).seed.reveal()
    monkeypatch.setattr(RunSecret, "simulated", lambda seed: secret)
    assert torch.allclose(found, simulated(CPNTKFL(), privacy, small), atol=1e-9)


def strategy_of(made: Federation, **how: object) -> Strategy:
    through = Shuffler(made.folder / "aggregator")
    sampling = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS, "fraction_evaluate": 0.0}
    privacy = Privacy(secure_sum=True)
    return Strategy(SumNTKFL(), net(), privacy=privacy, through=through, **(sampling | how))  # type: ignore[arg-type]


def rounds_played(strategy: Strategy, grid: LocalGrid, rounds: int) -> list[int]:
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds, timeout=60)
    return sorted(number for number, metrics in result.train_metrics_clientapp.items() if metrics)


def test_a_client_that_fails_costs_the_round_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one client's part missing there is no sum: it would differ from the others' by that part alone."""
    with federation(tmp_path, CLIENTS) as made:
        grid = grid_of(made)
        honest, asked = grid.apps[101], {"round": 0}

        def sometimes(msg: Message, context: Context) -> Message:
            """Sends nothing in round 2, and hands back a receipt that it made up."""
            if "ntkfl" in msg.content.array_records:
                asked["round"] += 1
                if asked["round"] == 2:
                    return Message(content({}, bytes(64)), reply_to=msg)
            return honest(msg, context)

        grid.apps[101] = sometimes  # type: ignore[assignment]
        assert rounds_played(strategy_of(made), grid, 3) == [1, 3]
        assert "a receipt that the shuffler did not sign" in caplog.text
        assert "2 clients have sent rows; release needs at least 3" in caplog.text


def test_a_shuffler_that_is_killed_in_a_round_is_waited_for(tmp_path: Path) -> None:
    with federation(tmp_path, CLIENTS) as made:
        grid, asked = grid_of(made), {"times": 0}
        honest = grid.apps[101]

        def slow(msg: Message, context: Context) -> Message:
            """Between two submissions of the round the shuffler dies, and comes back at its address."""
            if "ntkfl" in msg.content.array_records:
                asked["times"] += 1
                if asked["times"] == 1:
                    made.kill("shuffler")
                    made.start("shuffler")
            return honest(msg, context)

        grid.apps[101] = slow  # type: ignore[assignment]
        assert rounds_played(strategy_of(made), grid, 2) == [1, 2]
        assert asked["times"] == 2


def test_what_is_missing_is_said_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ConfigError, match="ntkfl-folder"):
        Shuffler.from_config(context)
    with pytest.raises(ConfigError, match="no such file"):
        Shuffler(tmp_path)
    with federation(tmp_path, CLIENTS + 1) as made:
        assert rounds_played(strategy_of(made), grid_of(made), 1) == []
        assert "asks 4 clients, and Flower sampled 3" in caplog.text
