"""A run in Python: finished, saved, loaded, measured on other data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntkfl
from ntkfl.errors import DataError, ModelError, RunFolderError, TrustError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from ntkfl.safe_parse import read_toml

DIGITS = {"dataset": "digits", "partition": "iid", "clients": 4}
SMALL: dict[str, Any] = {"rounds": 2, "clients_per_round": 2, "data": DIGITS, "model": {"hidden": [6]}}
FEDAVG = {"name": "fedavg", "local_steps": 2, "average": 0.5}


def trained(**options: Any) -> ntkfl.Run:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=4), seed=0)
    torch.manual_seed(0)
    method = options.pop("method", None) or ntkfl.methods.FedAvg(local_steps=2)
    model = options.pop("model", None) or ntkfl.models.mlp(64, 8, 10)
    return ntkfl.train(model, fed, method, rounds=2, clients_per_round=2, seed=0, callbacks=[], **options)


def same(one: ntkfl.Run, other: ntkfl.Run) -> None:
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        (FEDAVG, {}),
        ({"name": "sum-ntk-fl"}, {}),
        ({"name": "ntk-fl", "steps": [50, 400]}, {"projected_dim": 20, "subsample_rate": 0.5}),
    ],
)
def test_a_loaded_run_is_the_run(method: dict[str, Any], privacy: dict[str, Any], tmp_path: Path) -> None:
    """Settings, history, weights and checkpoint; the test set gives what the last round's record says."""
    run = execute(RunConfig(**SMALL, method=method, privacy=privacy), out=tmp_path / "run")
    loaded = ntkfl.Run.load(tmp_path / "run")
    assert (loaded.history, loaded.timings) == (run.history, run.timings)
    assert loaded.config["method"]["name"] == method["name"]
    same(run, loaded)
    for name, value in run.checkpoint.items():
        assert torch.equal(loaded.checkpoint[name], value)
    test = ntkfl.data.load("digits").test_rows.take()
    last = run.history[-1]
    for one in (run, loaded):
        score = one.evaluate(*test)
        assert score.accuracy == last["test_accuracy"]
        assert score.loss == pytest.approx(last["test_loss"], rel=1e-6)
        assert score.samples == len(test[1])


def test_evaluation_by_hand_on_arrays_datasets_and_loaders() -> None:
    run = trained()
    x, y = torch.randn(30, 1, 8, 8), torch.arange(30) % 10
    with torch.no_grad():
        f = run.model(x)
    accuracy, loss = float((f.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(f.double(), y))
    data = TensorDataset(x, y)
    for score in (run.evaluate(x.numpy(), y.numpy()), run.evaluate(data), run.evaluate(DataLoader(data, batch_size=7))):
        assert (score.accuracy, score.samples) == (accuracy, 30)
        assert score.loss == pytest.approx(loss, rel=1e-5)
    with pytest.raises(DataError, match=r"x has inputs of shape \[8, 8\]; the run's have \[1, 8, 8\]"):
        run.evaluate(x[:, 0], y)
    with pytest.raises(DataError, match="labels run from"):
        run.evaluate(x, y + 5)


def test_a_run_made_from_python_takes_the_network_from_its_user(tmp_path: Path) -> None:
    run = trained(out=tmp_path / "run")
    history_alone = ntkfl.Run.load(tmp_path / "run")
    assert history_alone.history == run.history
    with pytest.raises(ModelError, match="load the run with model="):
        _ = history_alone.model
    loaded = ntkfl.Run.load(tmp_path / "run", model=ntkfl.models.mlp(64, 8, 10))
    x, y = ntkfl.data.load("digits").test_rows.take()
    assert loaded.evaluate(x, y) == run.evaluate(x, y)
    with pytest.raises(ModelError, match="do not fit the network: size mismatch"):
        ntkfl.Run.load(tmp_path / "run", model=ntkfl.models.mlp(64, 9, 10))


def test_a_run_that_was_cut_short_has_the_weights_of_its_last_whole_round(tmp_path: Path) -> None:
    run = execute(RunConfig(**SMALL, method=FEDAVG), out=tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()  # written at the end
    with open(tmp_path / "run/history.jsonl", "a") as lines:
        lines.write('{"round": 3}\n')  # of a round without a checkpoint
    loaded = ntkfl.Run.load(tmp_path / "run")
    assert loaded.history == run.history
    same(run, loaded)


def changed(folder: Path, **values: Any) -> Path:
    config = read_toml(folder / "config.toml")
    (folder / "config.toml").write_text(tomli_w.dumps(config | values))
    return folder


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        ntkfl.Run.load(tmp_path / "nothing")
    execute(RunConfig(**SMALL, method=FEDAVG), out=tmp_path / "run")
    original = read_toml(tmp_path / "run/config.toml")
    for changes, why in [
        ({"shape": {}}, "cannot be read: no 'inputs'"),
        ({"method": {"name": "fedavg", "tomorrow": 1}}, "cannot be read: unknown option 'tomorrow'"),
    ]:
        changed(tmp_path / "run", **(original | changes))
        with pytest.raises(RunFolderError, match=why):
            ntkfl.Run.load(tmp_path / "run")
    changed(tmp_path / "run", **original)
    (tmp_path / "run/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(RunFolderError, match=r"model\.safetensors cannot be read"):
        ntkfl.Run.load(tmp_path / "run")


def test_code_that_a_folder_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange_code.py").write_text(
        "import ntkfl\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
        "def factory(shape, outputs):\n    return ntkfl.models.mlp(64, 6, outputs)\n"
        "def loss(f, Y):\n    return (f - Y).square().sum(-1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    execute(RunConfig(**SMALL, method=FEDAVG), out=tmp_path / "run")
    original = read_toml(tmp_path / "run/config.toml")
    for changes in (
        {"model": {"name": "strange_code:factory"}},
        {"method": original["method"] | {"loss": "strange_code:loss"}},
    ):
        changed(tmp_path / "run", **(original | changes))
        with pytest.raises(TrustError, match="names code that would be imported and run here: strange_code:"):
            ntkfl.Run.load(tmp_path / "run")
        assert not (tmp_path / "ran").exists()
        x, y = ntkfl.data.load("digits").test_rows.take()
        assert ntkfl.Run.load(tmp_path / "run", allow_code=True).evaluate(x, y).samples == len(y)
        (tmp_path / "ran").unlink()
        monkeypatch.delitem(sys.modules, "strange_code")


def test_another_runs_projection_stays_secret(tmp_path: Path) -> None:
    method = {"name": "ntk-fl", "steps": [50]}
    run = execute(RunConfig(**SMALL, method=method, privacy={"projected_dim": 20}))
    run.config = dict(run.config) | {"simulation": False}
    with pytest.raises(TrustError, match="projection is secret"):
        run.evaluate(torch.zeros(3, 1, 8, 8), torch.arange(3))
