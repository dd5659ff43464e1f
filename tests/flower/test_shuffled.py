"""CP-NTK-FL and secure sums through Flower, with a real shuffler and key server: the same end as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from ntkfl.errors import ConfigError, TooFew
from ntkfl.flower import Shuffler
from ntkfl.flower.messages import content
from ntkfl.methods import CPNTKFL, Method, Privacy, SumNTKFL
from ntkfl.privacy.projection import RunSecret
from tests.flower import cases
from tests.flower.cases import convolution, difference, in_process, perceptron, samples, weights
from tests.flower.grids import LocalGrid
from tests.services.federation import Federation, federation

CLIENTS, ROUNDS = 3, 2
SUMS = SumNTKFL(), Privacy(secure_sum=True)


def rows(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """As many of each client as the federation's terms let it send."""
    return [(x[:20], y[:20]) for x, y in samples(CLIENTS, shape)]


def grid_of(made: Federation, make: Callable[[], nn.Module] = perceptron, shape: tuple[int, ...] = (6,)) -> LocalGrid:
    ways = [Shuffler(made.folder / "clients" / f"client-{number}") for number in range(CLIENTS)]
    apps = [cases.train(make, data, through=way) for data, way in zip(rows(*shape), ways, strict=True)]
    return LocalGrid({10 * number: app for number, app in enumerate(apps, 1)})


def run(
    made: Federation,
    grid: LocalGrid,
    rounds: int = ROUNDS,
    method: Method = SUMS[0],
    privacy: Privacy = SUMS[1],
    make: Callable[[], nn.Module] = perceptron,
) -> Result:
    sampling = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS, "start": {"timeout": 60}}
    through: Any = Shuffler(made.folder / "aggregator")
    return cases.run(grid, method, make, rounds, privacy=privacy, through=through, **sampling)


@pytest.mark.parametrize(("make", "shape"), [(perceptron, (6,)), (convolution, (1, 6, 6))])
def test_a_secure_sum_ends_where_the_simulation_ends(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Factors of a convolution are rough: its step is measured in a second exchange, by the clients of the first."""
    with federation(tmp_path, CLIENTS) as made:
        result = run(made, grid_of(made, make, shape), make=make)
    assert list(result.train_metrics_clientapp) == [1, 2]
    expected = in_process(SUMS[0], make, rows(*shape), ROUNDS, privacy=SUMS[1])
    assert difference(weights(result), expected) < 1e-6


def test_shuffled_rows_with_a_projection_end_where_the_simulation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ρ is the key server's; the simulation is given the same."""
    privacy = Privacy(projected_dim=6, projection="gaussian", subsample_rate=1.0, sparsity=0.5)
    with federation(tmp_path, CLIENTS) as made:
        result = run(made, grid_of(made, perceptron, (12,)), ROUNDS, CPNTKFL(), privacy)
        (name,) = (path.stem[4:] for path in (made.folder / "shuffler").glob("run-*.sqlite"))
        secret = made.client("client-0").identity.run_secret(name)
        assert secret.seed.reveal() == made.client("client-1").identity.run_secret(name).seed.reveal()
    monkeypatch.setattr(RunSecret, "simulated", lambda seed: secret)
    expected = in_process(CPNTKFL(), perceptron, rows(12), ROUNDS, privacy=privacy)
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert difference(weights(result), expected) < 1e-9


def test_a_client_that_fails_costs_the_round_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one client's part missing there is no sum: it would differ from the others' by that part alone."""
    with federation(tmp_path, CLIENTS) as made:
        grid = grid_of(made)
        honest, asked = grid.apps[20], {"round": 0}

        def sometimes(msg: Message, context: Context) -> Message:
            """Sends nothing in round 2, and hands back a receipt that it made up."""
            if "ntkfl" in msg.content.array_records:
                asked["round"] += 1
                if asked["round"] == 2:
                    return Message(content({}, bytes(64)), reply_to=msg)
            return honest(msg, context)

        grid.apps[20] = sometimes  # type: ignore[assignment]
        assert list(run(made, grid, 3).train_metrics_clientapp) == [1, 3]
        assert "a receipt that the shuffler did not sign" in caplog.text
        assert "clients that have sent rows: 2; release needs at least 3" in caplog.text


def test_a_shuffler_that_is_killed_in_a_round_is_waited_for(tmp_path: Path) -> None:
    with federation(tmp_path, CLIENTS) as made:
        grid, asked = grid_of(made), {"times": 0}
        honest = grid.apps[20]

        def slow(msg: Message, context: Context) -> Message:
            """Between two submissions of the round the shuffler dies, and comes back at its address."""
            if "ntkfl" in msg.content.array_records:
                asked["times"] += 1
                if asked["times"] == 1:
                    made.kill("shuffler")
                    made.start("shuffler")
            return honest(msg, context)

        grid.apps[20] = slow  # type: ignore[assignment]
        assert list(run(made, grid).train_metrics_clientapp) == [1, 2]
        assert asked["times"] == 2


def test_what_is_missing_is_said_in_a_line(tmp_path: Path) -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ConfigError, match="ntkfl-folder"):
        Shuffler.from_config(context)
    with pytest.raises(ConfigError, match="no role's folder"):
        Shuffler(tmp_path)
    few = "has 4 clients per round, and Flower sampled 3: connect 4, and give"
    with federation(tmp_path, CLIENTS + 1) as made, pytest.raises(TooFew, match=few):
        run(made, grid_of(made), 1)
