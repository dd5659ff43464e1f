"""A run inside Flower is the run in one process: weights, rounds, resuming, failures. ClientApps are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from ntkfl_experiments.rivals.qsgd import QSGD
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError, ModelError, RunFolderError
from ntkfl.flower import Strategy
from ntkfl.methods import NTKFL, DataShare, FedAdam, FedAvg, Privacy, PrivateSums, Scaffold, SumNTKFL, SumRidge
from tests.flower.cases import (
    CLIENTS,
    convolution,
    difference,
    federated,
    grid_of,
    in_process,
    normalised,
    perceptron,
    run,
    samples,
    train,
    weights,
)
from tests.flower.grids import LocalGrid


def questions(grid: LocalGrid) -> list[list[tuple[int, int]]]:
    """(round, exchange) of each node's questions, in order."""
    from ntkfl.flower.messages import note, payload_of
    from ntkfl.wire import Message

    asked = [m for m in grid.asked if "ntkfl" in m.content]
    nodes = sorted({m.metadata.dst_node_id for m in asked})
    at = {node: [m for m in asked if m.metadata.dst_node_id == node] for node in nodes}
    return [[(Message.decode(payload_of(m)).round, note(m, "exchange", int)) for m in at[node]] for node in nodes]


def test_of_a_simulations_traceback_the_message_is_kept() -> None:
    from ntkfl.federation.transport import Traffic
    from ntkfl.flower.transport import fail

    fail(
        7,
        "Exception ClientAppException\n  ^^^^^ File 'actor.py', line 65\nMessage: no such column",
        traffic := Traffic(),
    )
    fail(8, "no answer", traffic)
    assert traffic.failed == {"7": "no such column", "8": "no answer"}


def test_a_strategy_that_asks_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="fraction_train=0 asks no node"):
        Strategy(FedAvg(), perceptron(), fraction_train=0.0)


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 3).double()


@pytest.mark.parametrize(
    ("method", "make", "shape", "how"),
    [
        (FedAvg(), perceptron, (6,), {}),
        (FedAvg(local_epochs=1, batch_size=8), normalised, (6,), {}),
        (Scaffold(), perceptron, (6,), {}),
        (NTKFL(), perceptron, (6,), {}),
        (NTKFL(), perceptron, (6,), {"privacy": Privacy(subsample_rate=0.5), "robust": "on"}),
        (SumNTKFL(), convolution, (1, 6, 6), {}),
        (SumNTKFL(), linear, (6,), {}),  # with options of its own, as only a last layer trains
        (SumRidge(), perceptron, (6,), {}),
        (PrivateSums(), perceptron, (6,), {"privacy": Privacy(epsilon=8.0, budget_rounds=3)}),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", None)),
)
def test_a_run_in_flower_ends_where_the_run_in_one_process_does(
    method: ntkfl.methods.Method, make: object, shape: tuple[int, ...], how: dict[str, object]
) -> None:
    clients = samples(shape=shape)
    result = run(grid_of(make, clients), method, make, **how)
    assert difference(weights(result), in_process(method, make, clients, **how)) < 1e-9
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[3]["clients"] == CLIENTS
    assert result.train_metrics_clientapp[3]["failures"] == 0


def test_losses_bytes_and_steps_are_those_of_the_run_in_one_process() -> None:
    clients = samples()
    result = run(grid_of(perceptron, clients), NTKFL(), perceptron)
    history = ntkfl.train(perceptron(), federated(clients), NTKFL(), rounds=3, seed=7, callbacks=[]).history
    for name in ("train_loss", "steps", "uplink_bytes", "downlink_bytes"):
        assert [m[name] for m in result.train_metrics_clientapp.values()] == [r[name] for r in history]


@pytest.mark.parametrize("method", [FedAdam(), Scaffold(), SumNTKFL()], ids=lambda m: m.name)
def test_a_run_that_goes_on_from_its_checkpoint_is_the_run_without_a_break(
    method: ntkfl.methods.Method, tmp_path: Path, said: list[str]
) -> None:
    clients, seen = samples(), list[int]()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(round)
        return MetricRecord({"norm": float(arrays["0.weight"].numpy().sum())})

    whole = run(grid_of(perceptron, clients), method, perceptron, 4)
    grid = grid_of(perceptron, clients)
    with pytest.raises(Stopped):
        run(grid, method, perceptron, 4, checkpoint=tmp_path / "run", start={"evaluate_fn": stop})
    result = run(grid, method, perceptron, 4, checkpoint=tmp_path / "run", start={"evaluate_fn": evaluate})
    assert difference(weights(result), weights(whole)) == 0.0  # to the bit
    assert seen == [2, 3, 4]
    assert list(result.evaluate_metrics_serverapp) == [2, 3, 4]
    assert list(result.train_metrics_clientapp) == [3, 4]
    assert [at for at in questions(grid)[0] if at[1] == 0] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert any("holds 2 rounds" in line for line in said)
    again = run(grid, method, perceptron, 4, checkpoint=tmp_path / "run")
    assert difference(weights(again), weights(whole)) == 0.0
    loaded = ntkfl.Run.load(tmp_path / "run", perceptron())
    assert difference(loaded.model.state_dict(), weights(whole)) == 0.0


class Stopped(Exception):
    pass


def stop(round: int, arrays: ArrayRecord) -> None:
    """The server dies after its second round."""
    if round == 2:
        raise Stopped


def test_more_rounds_go_on_and_another_method_or_network_is_refused(tmp_path: Path) -> None:
    clients = samples()
    grid, folder = grid_of(perceptron, clients), tmp_path / "run"
    run(grid, FedAvg(), perceptron, 2, checkpoint=folder)
    result = run(grid, FedAvg(), perceptron, 4, checkpoint=folder)
    assert difference(weights(result), in_process(FedAvg(), perceptron, clients, 4)) < 1e-9
    with pytest.raises(RunFolderError, match=r"another configuration: method\.lr is 0.1 there, 0.2 here"):
        run(grid, FedAvg(lr=0.2), perceptron, 4, checkpoint=folder)
    with pytest.raises(RunFolderError, match=r"another configuration: model\.digest"):
        run(grid_of(wider, clients), FedAvg(), wider, 4, checkpoint=folder)
    ntkfl.train(perceptron(), federated(clients), FedAvg(), rounds=1, out=tmp_path / "other", callbacks=[])
    with pytest.raises(RunFolderError, match="none of Flower's"):
        run(grid, FedAvg(), perceptron, 4, checkpoint=tmp_path / "other")


def wider() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def test_nodes_that_fail_are_left_out_and_said(said: list[str]) -> None:
    clients = samples(6)
    grid = grid_of(perceptron, clients)
    garbage = grid.apps[30]

    def broken() -> nn.Module:
        raise OSError("the disk of this site is gone")

    def mangled(*given: object) -> object:
        reply = garbage(*given)  # type: ignore[arg-type]
        if "ntkfl" in reply.content:
            reply.content["ntkfl"]["message"].data = b"no message of ours"
        return reply

    grid.apps[20], grid.apps[30] = train(broken, clients[1]), mangled  # type: ignore[assignment]
    grid.silent.add(40)
    result = run(grid, FedAvg(), perceptron, 1)
    assert result.train_metrics_clientapp[1]["failures"] == 2
    assert result.train_metrics_clientapp[1]["rejected_clients"] == 1
    for line in (
        "node 20: .*OSError.*the disk of this site is gone.*",
        "node 30: its reply is not used: .*",
        "node 40: no answer.*",
        "round 1: no answer: 20: .*",
    ):
        assert any(re.fullmatch(line, found) for found in said), (line, said)
    # The others alone: the same weights as of a federation of these three.
    others = LocalGrid({node: grid.apps[node] for node in (10, 50, 60)})
    for number, node in ((0, 10), (4, 50), (5, 60)):
        others.contexts[node].node_config["partition-id"] = number
    assert difference(weights(run(others, FedAvg(), perceptron, 1)), weights(result)) == 0.0


def test_a_client_that_failed_in_the_first_exchange_is_not_asked_in_the_second() -> None:
    grid = grid_of(convolution, samples(shape=(1, 6, 6)))
    grid.apps[20] = train(convolution, samples(shape=(1, 5, 5))[0])
    result = run(grid, SumNTKFL(), convolution, 1)
    assert questions(grid) == [[(1, 0), (1, 1)], [(1, 0)], [(1, 0), (1, 1)], [(1, 0), (1, 1)]]
    assert result.train_metrics_clientapp[1]["failures"] == 1


def test_a_round_that_nobody_answers_changes_nothing_and_the_run_goes_on(said: list[str]) -> None:
    clients = samples()
    grid = grid_of(perceptron, clients)
    grid.silent |= set(grid.apps)

    def wake(round: int, arrays: ArrayRecord) -> None:
        if round == 1:
            assert difference(arrays.to_torch_state_dict(), perceptron().state_dict()) == 0.0
            grid.silent.clear()

    result = run(grid, FedAvg(), perceptron, 2, start={"evaluate_fn": wake})
    assert list(result.train_metrics_clientapp) == [2]
    assert any("round 1 changed nothing: no node answered the first question" in line for line in said)


def test_what_a_user_puts_into_train_config_reaches_clients_with_the_number_of_the_round() -> None:
    grid = grid_of(perceptron, samples())
    run(grid, FedAvg(), perceptron, 2, start={"train_config": ConfigRecord({"colour": "blue"})})
    configs = [dict(m.content["config"]) for m in grid.asked]  # once more in round 1: what do samples look like?
    assert configs == [{"colour": "blue", "server-round": n} for n in (1, 1, 2) for _ in range(CLIENTS)]


def test_clients_without_a_seed_draw_from_the_system() -> None:
    """No two runs are the same, where the method draws."""
    first, second = (weights(run(grid_of(perceptron, samples(), seed=None), QSGD(), perceptron, 1)) for _ in "ab")
    assert difference(first, second) > 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"method": "fedavg"}, "method must be an instance"),
        ({"method": DataShare()}, "a baseline of simulations"),
        ({"method": FedAvg(), "privacy": Privacy(shuffle=True)}, "needs a shuffler"),
        ({"method": SumNTKFL(), "through": object()}, "sends nothing through one: give privacy="),
        ({"method": FedAvg(), "train_metrics_aggr_fn": max}, "nothing to aggregate"),
    ],
)
def test_a_strategy_that_cannot_work_says_so_when_it_is_made(how: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Strategy(model=perceptron(), **how)  # type: ignore[arg-type]


def test_clients_that_add_noise_are_not_asked_to_measure_the_model(said: list[str]) -> None:
    grid, asked = grid_of(perceptron, samples()), []
    for method in (PrivateSums(), FedAvg()):
        strategy = Strategy(method, perceptron())
        strategy._done = 0  # as `start` has it
        asked.append(list(strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid)))
    assert not asked[0]
    assert asked[1]
    assert sum(line.startswith("clients evaluate nothing: ") for line in said) == 1


def test_initial_arrays_of_another_network_are_refused() -> None:
    with pytest.raises(ModelError, match=r"initial_arrays does not fit the model: .*size mismatch for 0\.weight"):
        Strategy(FedAvg(), perceptron()).start(grid_of(perceptron, samples()), ArrayRecord(wider().state_dict()))
