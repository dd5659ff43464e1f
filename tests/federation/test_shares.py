"""Unlearning is retraining without the client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.errors import NTKFLError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder, names_in
from ntkfl.federation.shares import find_client, forget
from ntkfl.federation.simulation import execute
from ntkfl.methods import FedAvg, SumRidge
from ntkfl.report.runs import find
from ntkfl.report.view import view

F, CLASSES = 5, 3


def samples(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return torch.randn(n, F, generator=generator) + 2 * nn.functional.one_hot(y, F), y


def federation(*clients: int) -> ntkfl.data.Federated:
    return ntkfl.data.from_clients([samples(10 + 3 * c, c) for c in clients], test=samples(50, 99), classes=CLASSES)


def trained(folder: Path | None, *clients: int, method: SumRidge | None = None) -> ntkfl.Run:
    method = method or SumRidge(keep_shares=True)
    model = ntkfl.models.head(nn.Sequential(nn.Linear(F, 8), nn.Tanh()).double(), CLASSES, features=8)
    state = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.backbone.parameters():
            p.copy_(torch.randn(p.shape, generator=state, dtype=p.dtype))
    fed = federation(*clients)
    return ntkfl.train(model, fed, method, rounds=1, clients_per_round=len(clients), out=folder, callbacks=[])


def head_of(run: ntkfl.Run) -> torch.Tensor:
    return torch.cat([run.model.head.weight.mT, run.model.head.bias.unsqueeze(0)]).detach()


def test_forgetting_is_retraining_without_the_client(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = trained(folder, 0, 1, 2, 3, 4, 5)
    without = trained(None, 0, 1, 3, 4, 5)
    record = forget(folder, 2)
    model = load_file(folder / "model.safetensors")
    assert (model["head.weight"] - without.model.head.weight).abs().max() < 1e-10
    assert (model["head.bias"] - without.model.head.bias).abs().max() < 1e-10
    assert (model["head.weight"] - before.model.head.weight).abs().max() > 1e-3
    assert torch.equal(model["backbone.network.0.weight"], before.model.backbone.network[0].weight)
    assert record["samples"] == 16
    assert record["clients_left"] == 5
    assert RunFolder(folder).records("forgotten.jsonl") == [record]
    _, tensors = RunFolder(folder).load_checkpoint()
    assert not [name for name in tensors if "share/2/" in name]


def test_a_forgotten_client_is_not_asked_again(tmp_path: Path) -> None:
    """The resumed run asks the others, and says so: the model stays theirs."""
    folder = tmp_path / "run"
    trained(folder, 0, 1, 2, 3)
    forget(folder, 1)
    fed = federation(0, 1, 2, 3)
    model = trained(None, 0, 1, 2, 3).model  # its backbone is that of the run
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    for rounds in (2, 3):  # resumed twice: later checkpoints know of it too
        how = {"rounds": rounds, "clients_per_round": 4, "out": folder, "resume": True, "callbacks": []}
        resumed = ntkfl.train(model, fed, SumRidge(keep_shares=True), **how)  # type: ignore[arg-type]
        assert (resumed.history[-1]["clients"], resumed.history[-1]["forgotten"]) == ([0, 2, 3], [1])
    assert (head_of(resumed) - head_of(trained(None, 0, 2, 3))).abs().max() < 1e-10


def test_where_forgetting_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "total", 0, 1, method=SumRidge())
    plain = ntkfl.models.mlp(F, CLASSES), federation(0, 1), FedAvg(local_steps=1)
    ntkfl.train(*plain, rounds=1, out=tmp_path / "averaged", callbacks=[])
    head, standardized = ntkfl.models.head(nn.Identity(), CLASSES, features=F), federation(0, 1, 2).standardized()
    keeping = SumRidge(keep_shares=True)
    ntkfl.train(head, standardized, keeping, rounds=1, out=tmp_path / "standardized", callbacks=[])
    trained(tmp_path / "run", 0, 1)
    for folder, client, why in [
        ("total", 0, r"kept the total .* keep_shares=true"),
        ("averaged", 0, r"only what is linear .* retrain without it"),
        ("standardized", 2, "standardised by all clients' sums"),  # mean and deviation would still know the client
        ("run", 7, "no sums of client 7 are here: it was in no round"),
    ]:
        with pytest.raises(NTKFLError, match=why):
            forget(tmp_path / folder, client)
    public = federation(0, 1, 2).standardized(mean=[0.0] * F, std=[2.0] * F)
    ntkfl.train(head, public, keeping, rounds=1, out=tmp_path / "public", callbacks=[])
    assert forget(tmp_path / "public", 2)["clients_left"] == 2
    forget(tmp_path / "run", 0)
    with pytest.raises(NTKFLError, match="the only one"):
        forget(tmp_path / "run", 1)


def by_name(folder: Path) -> RunConfig:
    """A run of the command line's kind, from a table with names of clients and classes."""
    file, lines = folder / "visits.csv", []
    for number, name in enumerate(("north", "south", "east")):
        x, y = samples(40, number)
        lines += [",".join([*(f"{v:.4f}" for v in row), "abc"[c], name]) for row, c in zip(x.tolist(), y, strict=True)]
    file.write_text("a,b,c,d,e,label,client\n" + "\n".join(lines))
    options = {"name": "sum-ridge", "keep_shares": True}
    return RunConfig(data={"dataset": str(file)}, rounds=1, model={"hidden": ()}, method=options)


def test_clients_by_the_names_in_their_file(tmp_path: Path) -> None:
    execute(by_name(tmp_path), out=tmp_path / "run")
    names = names_in(RunFolder(tmp_path / "run").config(), "clients")
    assert names == ["east", "north", "south"]
    assert [find_client(name, names, range(3)) for name in ("north", "1", 1)] == [1, 1, 1]
    with pytest.raises(NTKFLError, match=r"unknown client 'nroth': did you mean 'north'\?"):
        find_client("nroth", names, range(3))
    numbered = ["7", "1", "0"]
    assert [find_client(name, numbered, range(3)) for name in numbered] == [0, 1, 2]  # names first
    with pytest.raises(NTKFLError, match="unknown client '2'"):  # it could be meant as a name
        find_client("2", numbered, range(3))


def test_the_scores_of_the_old_model_leave_the_history(tmp_path: Path) -> None:
    before = execute(by_name(tmp_path), out=tmp_path / "run").history[-1]
    done = CliRunner().invoke(app, ["forget", str(tmp_path / "run"), "--client", "north"])
    assert done.exit_code == 0, done.output
    assert "forgot client north and its" in done.output
    last = ntkfl.Run.load(tmp_path / "run").history[-1]
    assert (last["forgotten"], last["test_accuracy"], last["test_loss"], last["train_loss"]) == ([1], None, None, None)
    kept = json.loads((tmp_path / "run" / "forgotten.jsonl").read_text())
    assert kept["test_accuracy_before"] == before["test_accuracy"]
    assert before["samples"] == last["samples"] + kept["samples"]
    shown = view(find([tmp_path / "run"])[0])
    assert shown["text"] == "finished: 1 round; 1 client forgotten since (north)"
    audited = CliRunner().invoke(app, ["audit", str(tmp_path / "run")])
    assert audited.exit_code == 0, audited.output  # settings are played anew
    forget(tmp_path / "run", "south")
    assert RunFolder(tmp_path / "run").records()[-1]["forgotten"] == [1, 2]
