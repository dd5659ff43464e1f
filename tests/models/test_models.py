"""The networks that come with the package: shapes, sizes, and first weights as their fields have them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from ntkfl_experiments.networks import gru, transformer
from torch import nn

from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, build_network
from ntkfl.models import MODELS, cnn, mlp

NETWORKS = MODELS | {"gru": gru, "transformer": transformer}
SHAPES = dict.fromkeys(NETWORKS, (1, 28, 28)) | {"resnet": (3, 32, 32)}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_a_batch_to_outputs_a_sample_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name](SHAPES[name], 7).double().eval()  # float32 products differ with the size of a batch
    x = torch.randn(5, *SHAPES[name], dtype=torch.float64)
    f = model(x)
    assert f.shape == (5, 7)
    assert torch.allclose(model(x[2:3]), f[2:3], atol=1e-12, rtol=0)
    assert bool(f.isfinite().all())
    other = NETWORKS[name](SHAPES[name], 7).double()  # nothing that clients could differ in
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_a_perceptrons_first_layer() -> None:
    torch.manual_seed(0)
    plain = mlp(200, 50, 3)
    torch.manual_seed(0)
    lean = mlp(200, 50, 3, gain=0.5, bias=-1.0)
    assert torch.equal(lean[1].weight, 0.5 * plain[1].weight)
    assert torch.equal(lean[3].weight, plain[3].weight)
    assert bool((lean[1].bias == -1).all())
    assert bool((lean[3].bias == 0).all())


def test_convolutions_begin_as_he_says() -> None:
    torch.manual_seed(0)
    layer = cnn((1, 28, 28), 10, channels=(64, 64))[2]
    assert isinstance(layer, nn.Conv2d)
    assert abs(float(layer.weight.std()) * math.sqrt(64 * 9 / 2) - 1) < 0.03


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cnn((1, 8, 8), 10), "at least 9 × 9"),
        (lambda: ModelConfig(name="cnn", hidden=(3,)), "are of an mlp"),
        (lambda: build_network(ModelConfig(name="no_such:thing"), (3,), 2, 0), "cannot import 'no_such'"),
        (
            lambda: build_network(ModelConfig(name="math:sqr"), (3,), 2, 0),
            "has no function 'sqr'",
        ),
        (lambda: build_network(ModelConfig(name="builtins:dict"), (3,), 2, 0), "cannot be built"),
        (lambda: build_network(ModelConfig(name="cnn", options={"depth": 3}), (1, 28, 28), 2, 0), "unexpected keyword"),
    ],
)
def test_what_cannot_be_built_is_one_line(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_users_own_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets.py").write_text(
        "import math\nfrom torch import nn\n"
        "def tiny(inputs, outputs, width=4):\n"
        "    first = nn.Linear(math.prod(inputs), width)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(width, outputs))\n"
        "def wrong(inputs, outputs):\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    model = build_network(ModelConfig(name="mynets:tiny", options={"width": 6}), (1, 8, 8), 10, seed=0)
    assert model[1].weight.shape == (6, 64)  # type: ignore[index,union-attr]
    again = build_network(ModelConfig(name="mynets:tiny", options={"width": 6}), (1, 8, 8), 10, seed=0)
    assert torch.equal(model[1].weight, again[1].weight)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"must give an nn\.Module, not int"):
        build_network(ModelConfig(name="mynets:wrong"), (3,), 2, 0)
