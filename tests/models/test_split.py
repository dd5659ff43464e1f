"""A partly frozen backbone is cut where it safely can be, and nowhere else; runs end as without."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.federation.feature_cache import split_frozen
from ntkfl.methods import NTKFL
from ntkfl.models.split import Cut, cut_frozen


class Residual(nn.Module):
    """As torchvision's: blocks by attribute, a functional flatten, a classifier to drop. Rows are counted."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        x = self.layer1(torch.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(self.avgpool(self.layer2(x)).flatten(1))
        return out


class Scaled(Residual):
    """A weight of its own, zero at first: layers alone are not all of it."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.shift)


class Twice(Residual):
    """The last layers are used in another order than they were registered."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(torch.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc((self.avgpool(self.layer2(x)) + self.avgpool(self.layer2(x).square())).flatten(1))
        return out


def adapted(network: nn.Module, *trainable: str, **options: object) -> ntkfl.models.backbone.Adapted:  # type: ignore[name-defined]
    drop = "fc" if isinstance(network, Residual) else None
    return ntkfl.models.head(
        network, 10, inputs=(1, 8, 8), drop=drop, trainable=("head", *trainable), **options  # type: ignore[arg-type]
    )  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3)), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("network", "trainable", "shape"),
    [
        (plain, "2.2", (6, 4, 4)),
        (plain, "2.*", (4, 6, 6)),
        (Residual, "layer2.*", (6, 3, 3)),
        (Residual, "layer2.3", (6, 3, 3)),
    ],
)
def test_what_lies_before_the_cut(network: type[nn.Module], trainable: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = adapted(network(), trainable)
    cut = cut_frozen(model)
    assert isinstance(cut, Cut)
    x = torch.randn(5, 1, 8, 8)
    front = cut.front(x)
    assert front.shape == (5, *shape)
    torch.testing.assert_close(cut.rest(front), model(x))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    same = [p for p in cut.rest.parameters() if p.requires_grad]
    assert [id(p) for p in same] == [id(dict(model.named_parameters())[name]) for name in names]
    held = {id(p) for p in cut.front.parameters()}
    assert held <= {id(p) for p in model.backbone.parameters()}  # no copies
    assert not held & {id(p) for p in same}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: adapted(Scaled(), "layer2.*", "shift"), "not part of its layers in a row"),
        (lambda: adapted(Twice(), "layer2.*"), "more than follow one another"),
        (lambda: adapted(Residual(), "conv1"), "its first layer trains"),
        (lambda: adapted(Residual(), "layer2.*", also=("layer2",)), "also"),
        (
            lambda: ntkfl.models.head(Residual(), 10, features=8, drop="fc", trainable=("head", "layer2.*")),
            "give head",
        ),
    ],
)
def test_where_it_is_not_cut(model: object, said: str) -> None:
    torch.manual_seed(0)
    made = model()  # type: ignore[operator]
    assert said in str(cut_frozen(made))
    lines: list[str] = []
    assert split_frozen(made, NTKFL(), None, say=lines.append) == (made, None)
    assert len(lines) == (0 if "first layer" in said else 1)
    assert all(said in line and "in every round" in line for line in lines)


class Whole(nn.Module):
    """The same network, of which nobody knows that it has a backbone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize(
    "method",
    [ntkfl.methods.FedAvg(local_steps=3, lr=0.1), ntkfl.methods.SumNTKFL(), ntkfl.methods.NTKFL(steps=(50, 200))],
)  # fmt: skip
def test_a_run_ends_the_same(method: ntkfl.methods.Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NTKFL_FEATURES", str(tmp_path / "features"))
    torch.manual_seed(0)
    model = adapted(Residual(), "layer2.3")
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=4), seed=0)
    how = {"rounds": 3, "clients_per_round": 4, "callbacks": []}
    Residual.seen.clear()
    run = ntkfl.train(model, fed, method, **how)  # type: ignore[arg-type]
    assert sum(Residual.seen) == 1797 + 4  # every sample once, and two of them twice to try the cut
    monkeypatch.setenv("NTKFL_FEATURES", "off")
    whole = ntkfl.train(Whole(model), fed, method, **how)  # type: ignore[arg-type]
    for name in ("test_loss", "train_loss", "uplink_bytes", "downlink_bytes"):
        assert [r[name] for r in run.history] == pytest.approx([r[name] for r in whole.history], rel=1e-5), name
    for p, q in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert list((tmp_path / "features").rglob("*.safetensors"))
    again = ntkfl.train(model, fed, method, **how)  # type: ignore[arg-type]
    assert again.history == run.history
