"""A SuperLink and SuperNodes as processes on loopback, asked by `flwr run`: the same weights as in one process; and a
consortium of five with a shuffler and a key server.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import load_file, save_file
from torch import nn

from ntkfl.flower import Shuffler, Strategy, reply
from ntkfl.methods import CPNTKFL, Privacy
from tests.flower.cases import SEED, THREE, difference, in_process, samples
from tests.flower.superlink import Fleet
from tests.services.federation import federation

FIVE = 5
PRIVACY = Privacy(projected_dim=6, projection="gaussian", subsample_rate=0.8, sparsity=0.5)
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """One method of each kind of reply after the other; or CP-NTK-FL, where the run names the aggregator's folder."""
    out, folder = Path(str(context.run_config["out"])), str(context.run_config["folder"])
    if folder:
        sampling = {"min_train_nodes": FIVE, "min_available_nodes": FIVE, "fraction_evaluate": 0.0}
        strategy = Strategy(CPNTKFL(), net(), privacy=PRIVACY, through=Shuffler(folder), **sampling)
        result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=1, timeout=300)
        save_file(dict(result.arrays.to_torch_state_dict()), out)
        out.with_suffix(".done").touch()
        return
    for case, (method, make, _, rounds) in enumerate(THREE):
        strategy = Strategy(method, make(), robust=None, fraction_evaluate=0.0)
        arrays, config = ArrayRecord(make().state_dict()), ConfigRecord({"case": case})
        result = strategy.start(grid, arrays, rounds, timeout=100, train_config=config)
        save_file(dict(result.arrays.to_torch_state_dict()), out / method.name)
    out.with_suffix(".done").touch()


@client.train()
def train(msg: Message, context: Context) -> Message:
    number = int(context.node_config["partition-id"])
    if "ntkfl-folder" in context.node_config:
        return reply(msg, context, net(), pairs()[number], through=Shuffler.from_config(context))
    _, make, shape, _ = THREE[int(msg.content["config"]["case"])]
    return reply(msg, context, make(), samples(2, shape)[number], seed=SEED)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    xs = [torch.randn(12, 12, generator=drawn) for _ in range(FIVE)]
    return [(x, x[:, :3].argmax(1)) for x in xs]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_supernodes_end_where_one_process_does(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    with Fleet(tmp_path, "test_superlink") as fleet:
        for number in range(2):
            fleet.start_node(number)
        fleet.run(out=out)
        fleet.until(out.with_suffix(".done").exists)
    for method, make, shape, rounds in THREE:
        found = load_file(out / method.name)
        assert difference(found, in_process(method, make, samples(2, shape), rounds)) < 1e-6, method.name


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_five_clients_play_two_runs(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    with federation(tmp_path, FIVE) as made, Fleet(home, "test_superlink") as fleet:
        for number in range(FIVE):
            fleet.start_node(number, f'ntkfl-folder="{made.folder / "clients" / f"client-{number}"}"')
        for name in ("first", "second"):
            fleet.run(folder=made.folder / "aggregator", out=tmp_path / name)
            fleet.until((tmp_path / f"{name}.done").exists)
        assert len(list((made.folder / "shuffler").glob("run-*.sqlite"))) == 2
    first, second = load_file(tmp_path / "first"), load_file(tmp_path / "second")
    assert not all(torch.equal(first[name], net().state_dict()[name]) for name in first)
    assert not all(torch.equal(first[name], second[name]) for name in first)  # another ρ, other samples
