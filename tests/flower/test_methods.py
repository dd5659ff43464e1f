"""Every method through ServerApp and ClientApps ends where it ends in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ntkfl.federation.server import remarks
from ntkfl.flower.apps import client_app
from ntkfl.flower.server import FlowerServer
from ntkfl.methods import METHODS
from ntkfl.wire import Message
from tests.flower.federations import NODES, NTK, apps, deployed, digits, distance, member, settings, simulated
from tests.flower.local_grid import LocalGrid

# A shuffler's, and those that are refused between machines.
ELSEWHERE = ("cp-ntk-fl", "private-sums", "private-ridge", "dp-fedavg")
CASES: dict[str, dict[str, Any]] = {name: {"name": name} for name in METHODS if name not in ELSEWHERE} | {
    "ntk-fl": NTK,
    "ntk-fl, subsampled and sparsified": NTK | {"subsample_rate": 0.5, "sparsity": 0.8, "values": "8bit"},
}


@pytest.mark.parametrize("case", CASES)
def test_every_method_ends_with_the_weights_of_one_process(case: str, tmp_path: Path) -> None:
    """Also those with memory at the clients (scaffold), random codes (qsgd), and messages by client (data-share)."""
    run = settings(CASES[case])
    server = deployed(LocalGrid(apps(run, tmp_path)), run, tmp_path / "run")
    history = server.run().history
    here = simulated(run)
    assert distance(here.model, load_file(tmp_path / "run" / "model.safetensors")) < 1e-6
    for there, record in zip(history, here.history, strict=True):
        assert there["clients"] == [f"client-{i}" for i in record["clients"]]
        for key in ("steps", "uplink", "downlink"):
            assert there[key] == record[key]
        assert there["test_accuracy"] == pytest.approx(record["test_accuracy"])
        assert "failed" not in there


def test_batch_normalisation_travels_with_the_weights(tmp_path: Path) -> None:
    run = settings({"name": "fedavg", "local_steps": 3}, model={"name": f"{__name__}:normalised"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ntkfl.federation.build.find_factory", lambda name: normalised)
        server = deployed(LocalGrid(apps(run, tmp_path)), run, tmp_path / "run")
        server.run()
        here = simulated(run)
        assert distance(here.model, load_file(tmp_path / "run" / "model.safetensors")) < 1e-6
        # Without a test set the round's clients count: the averaged weights with their own statistics.
        nodes = {f"client-{i}": node for i, node in enumerate(NODES)}
        counted = FlowerServer(server.transport.grid, nodes, run, tmp_path / "counted", allow_code=True)
        record = counted.run().history[-1]
    fed, seen = digits(), [int(name[-1]) for name in record["clients"]]
    x, y = (torch.cat(part) for part in zip(*(fed.client(i) for i in seen), strict=True))
    with torch.no_grad():
        right = here.model.eval()(x.double()).argmax(1) == y
    assert record["evaluated_samples"] == len(y)
    assert record["test_accuracy"] == pytest.approx(float(right.double().mean()))


def normalised(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, outputs))


def test_a_server_that_stops_in_a_round_goes_on_with_the_same_result(tmp_path: Path) -> None:
    """Scaffold's clients have already changed their memory in the round that is played again."""
    run = settings({"name": "scaffold", "local_steps": 3}, clients_per_round=4)
    grid = LocalGrid(apps(run, tmp_path))
    server = deployed(grid, run, tmp_path / "run")
    original, played = server.server._record, []

    def stops(number: int, *rest: Any) -> Any:
        played.append(number)
        if played.count(2) == 1 and number == 2:
            raise KeyboardInterrupt  # after the clients' answers, before the round is kept
        return original(number, *rest)

    server.server._record = stops  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        server.run()
    said: list[str] = []
    again = deployed(grid, run, tmp_path / "run", said.append)
    again.run()
    assert said == ["goes on after round 1"]
    assert distance(simulated(run).model, load_file(tmp_path / "run" / "model.safetensors")) < 1e-9


def test_who_fails_is_named_and_the_round_goes_on_with_the_rest(tmp_path: Path) -> None:
    """Client 2 never answers, client 1 has a label that is no class: clients 0 and 3 make the round."""
    run = settings(NTK, clients_per_round=4, rounds=1)
    x, y = digits().client(1)
    programs = apps(run, tmp_path)
    programs[NODES[1]] = client_app(member(run, tmp_path, 1, lambda: (x, y + 100)))
    said: list[str] = []
    grid = LocalGrid(programs, silent=[NODES[2]])
    finished = deployed(grid, run, tmp_path / "run", said.append).run()
    (record,), (timing,) = finished.history, finished.timings
    assert set(record["failed"]) == {"client-1", "client-2"}
    assert record["failed"]["client-1"] == "labels must be whole numbers from 0 to 9, one per sample"
    assert record["failed"]["client-2"] == "no answer within 1 s"
    assert f"client-1: {record['failed']['client-1']}" in said
    assert (record["asked"], record["answered"]) == (4, 2)
    assert 0.5 < timing["waited_seconds"] < timing["seconds"]
    (line,) = remarks(record, timing)
    assert re.fullmatch(r"2 of 4 clients answered; waited \d+ s for client-1, client-2", line)
    # Whoever failed is not asked again in the round, nor to measure the model: it would be waited for once more.
    assert [m.metadata.dst_node_id for m in grid.sent].count(NODES[2]) == 1
    sizes = digits().sizes
    assert record["samples"] == sizes[0] + sizes[3]
    assert json.loads((tmp_path / "run" / "history.jsonl").read_text())["failed"] == record["failed"]


@pytest.mark.parametrize("method", [NTK, {"name": "fedavg", "local_steps": 3}])
def test_what_one_client_sends_that_is_not_finite_is_left_out(method: dict[str, Any], tmp_path: Path) -> None:
    """A row of it, or all of its update; the record and the log say so, and the training goes on without."""
    run = settings(method, rounds=1, clients_per_round=4)
    liar = member(run, tmp_path, 2)
    honest = liar.answer

    def lie(payload: bytes, name: str) -> bytes:
        reply = Message.decode(honest(payload, name))
        for array in ("outputs", "weights"):
            if array in reply.arrays:
                reply.arrays[array][0] = float("nan")
        return reply.encode()

    liar.answer = lie  # type: ignore[method-assign]
    grid = LocalGrid(apps(run, tmp_path) | {NODES[2]: client_app(liar)})
    (record,) = deployed(grid, run, tmp_path / "run").run().history
    assert record["rejected"] == {"not finite": 1}
    assert record["rejected_clients"] == 1
    assert remarks(record) == ["rejected: 1 not finite"]
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    before = dict(run.build_model(run.seed).named_parameters())
    assert not any(torch.equal(value, before[name]) for name, value in weights.items())
