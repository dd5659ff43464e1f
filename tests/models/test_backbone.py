"""A head on a frozen backbone: what trains, what it computes, and that every method trains it."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ntkfl import jacobian, models
from ntkfl.errors import ModelError
from ntkfl.methods import METHODS, ClientRound, Task
from ntkfl.methods.base import fitted, privacy_of
from ntkfl.methods.task import statistics
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent.parameters import flatten, load_flat, trainable
from tests.methods.rounds import play

OUTPUTS = 3


def convolutional() -> nn.Module:
    """A tiny network like those of torchvision: convolutions with batch normalisation, blocks, a classifier `fc`."""
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
            layer4=nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            dropout=nn.Dropout(0.9),
            fc=nn.Linear(5, 1000),
        )
    )


class Sequence(nn.Module):
    """A tiny network like those of transformers: tokens' states [N, T, F] in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.query(x), pooler_output=None)


def images(n: int = 8) -> Tensor:
    return torch.randn(n, 1, 8, 8)


def test_the_head_alone_trains() -> None:
    backbone = convolutional()
    model = models.head(backbone, OUTPUTS, inputs=(1, 8, 8), drop="fc")
    assert list(trainable(model)) == ["head.weight", "head.bias"]
    assert flatten(model).shape == (5 * OUTPUTS + OUTPUTS,)
    assert torch.equal(model(images()), torch.zeros(8, OUTPUTS))  # it begins at zero
    x = images()
    load_flat(model, torch.randn(5 * OUTPUTS + OUTPUTS))
    expected = model.head(backbone.eval()(x))
    assert torch.equal(model(x), expected)
    assert jacobian(model, x).shape == (8, OUTPUTS, 5 * OUTPUTS + OUTPUTS)


def test_the_backbone_stays_in_eval_mode() -> None:
    model = models.head(convolutional(), OUTPUTS, features=5, drop="fc")
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.train()
    load_flat(model, torch.randn(18))
    x = images()
    assert torch.equal(model(x), model(x))  # dropout is off
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    assert statistics(model) == {}  # nothing to send of it
    assert len(statistics(convolutional())) == 2


def test_patterns() -> None:
    model = models.head(convolutional(), OUTPUTS, features=5, drop="fc", trainable=["head", "layer4.*"])
    assert [name.removeprefix("backbone.network.") for name in trainable(model)] == [
        "layer4.0.weight", "layer4.0.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert not model.frozen
    models.freeze(model, ["*.bias"])
    assert all(name.endswith("bias") for name in trainable(model))
    with pytest.raises(ModelError, match=r"no weight is called 'layer9'.*head\.bias"):
        models.freeze(model, ["head", "layer9"])


@pytest.mark.parametrize(("pool", "features"), [("mean", 6), ("first", 6)])
def test_sequences(pool: str, features: int) -> None:
    backbone, x = Sequence(), torch.randn(3, 5, 4)
    model = models.head(backbone, OUTPUTS, inputs=(5, 4), pool=pool)
    states = backbone(x).last_hidden_state
    expected = {"mean": states.mean(1), "first": states[:, 0]}[pool]
    assert torch.equal(model.backbone(x), expected)
    assert model.head.in_features == features


def test_digest_sees_weights_and_statistics() -> None:
    torch.manual_seed(0)
    first = convolutional()
    torch.manual_seed(0)
    same = convolutional()
    assert models.digest(first) == models.digest(same)
    same.stem[1].running_mean[0] += 1e-6
    assert models.digest(first) != models.digest(same)


@pytest.mark.parametrize("what", ["head", "last block"])
@pytest.mark.parametrize("name", ["ntk-fl", "sum-ntk-fl", "sum-ridge", "private-sums", "fedavg"])
def test_each_kind_of_method_trains_what_trains(name: str, what: str) -> None:
    """Two rounds lower the loss, the weights that travel are those that train, and nothing else changes."""
    torch.manual_seed(1)
    small = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))
    model = models.head(small, OUTPUTS, inputs=(1, 4, 4), trainable=["head"] if what == "head" else ["head", "4"])
    if name == "sum-ridge" and what != "head":
        pytest.skip("not linear in what trains: refused, see test_sum_ridge.py")
    clients = []
    for i in range(3):
        y = torch.arange(12) % OUTPUTS
        x = torch.randn(12, 1, 4, 4) + y.view(-1, 1, 1, 1)
        clients.append(ClientRound(i, x, y, Randomness.simulated(i)))
    method = fitted(METHODS[name](), model, OUTPUTS, everyone=True)
    task = Task(model, OUTPUTS, "ce", privacy=privacy_of(method, Privacy(epsilon=None)), total_clients=3)
    task.example = clients[0].x[:1], clients[0].y[:1]
    state = method.start(task, task.like)
    frozen = {n: p.clone() for n, p in task.model.named_parameters() if not p.requires_grad}
    assert len(state["weights"]) == sum(p.numel() for p in trainable(model).values())
    for number in (1, 2):
        state = play(method, task, clients, state, number)[0].state
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    before, after = (task.losses(task.predict(w, x), y).mean() for w in (task.like, state["weights"]))
    assert after < before
    assert all(torch.equal(p, frozen[n]) for n, p in task.model.named_parameters() if n in frozen)
