"""Features of a frozen backbone: computed once, found again by content, the same as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.federation.client import FeatureCache
from ntkfl.federation.config import ModelConfig, RunConfig
from ntkfl.federation.simulation import execute


class Counted(nn.Module):
    """A network that counts the rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(64, 6), 0
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.factor * torch.relu(self.layer(x.flatten(1)))


def digits(clients: int = 4) -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=clients), seed=0)


def test_once_per_sample() -> None:
    backbone, x = Counted(), torch.randn(100, 1, 8, 8)
    cache = FeatureCache(backbone)
    first = cache(x)
    assert torch.equal(first, cache(x.clone()))
    assert backbone.rows == 100
    torch.testing.assert_close(first, backbone(x))
    assert not torch.equal(cache(x + 1), first)  # other samples


@pytest.mark.parametrize("method", [ntkfl.methods.NTKFL(), ntkfl.methods.SumNTKFL(), ntkfl.methods.FedAvg()])
def test_a_run_computes_them_once_and_ends_the_same(method: ntkfl.methods.Method) -> None:
    backbone, fed = Counted(), digits()
    model = ntkfl.models.head(backbone, 10, features=6)
    run = ntkfl.train(model, fed, method, rounds=3, clients_per_round=4, callbacks=[])
    assert backbone.rows == 1797  # every training and test sample once
    assert run.history[-1]["test_accuracy"] > 0.2
    whole = Whole(model)
    plain = ntkfl.train(whole, fed, method, rounds=3, clients_per_round=4, callbacks=[])
    for name in ("test_loss", "uplink_bytes", "downlink_bytes"):
        assert [r[name] for r in plain.history] == pytest.approx([r[name] for r in run.history], rel=1e-4), name
    x, y = fed.test
    assert float((run.model(x).argmax(1) == y).float().mean()) == pytest.approx(run.history[-1]["test_accuracy"])


class Whole(nn.Module):
    """The same network, of which nobody knows that it has a backbone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


BACKBONE = {"backbone": "tests.federation.test_feature_cache:Counted"}


def test_a_configuration(tmp_path: Path) -> None:
    config = RunConfig(
        rounds=1,
        clients_per_round=4,
        data={"dataset": "digits", "partition": "iid", "clients": 4},
        model=BACKBONE | {"head": [5], "trainable": ["head", "layer.bias"]},
        method={"name": "fedavg", "local_steps": 2},
    )
    assert config.code == [BACKBONE["backbone"]]
    run = execute(config, out=tmp_path / "run")
    names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    assert names == [
        "backbone.network.layer.bias", "head.1.weight", "head.1.bias", "head.3.weight", "head.3.bias",
    ]  # fmt: skip
    with pytest.raises(ntkfl.NTKFLError, match="names code"):
        RunConfig.read(tmp_path / "run" / "config.toml")
    again = RunConfig.read(tmp_path / "run" / "config.toml", allow_code=True)
    assert again.model == config.model
    other = config.model_copy(update={"model": ModelConfig(**BACKBONE, digest="0" * 64)})
    with pytest.raises(ntkfl.NTKFLError, match="differ from the agreed ones"):
        execute(other)
