"""Low-rank adapters: exact at first, exact when merged, and the only thing that trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl import jacobian, models
from ntkfl.errors import ConfigError, ModelError
from ntkfl.tangent.parameters import flatten, load_flat, trainable


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_the_function_is_unchanged_at_first() -> None:
    x, model = torch.randn(9, 6, dtype=torch.float64), network()
    before = model(x)
    models.lora(model, 2, ["0", "2"], alpha=8)
    assert torch.equal(model(x), before)
    assert list(trainable(model)) == [f"{i}.lora_{part}.weight" for i in (0, 2) for part in ("down", "up")]
    assert flatten(model).numel() == 2 * (6 + 8) + 2 * (8 + 8)


def test_merged_it_computes_the_same() -> None:
    x, model = torch.randn(9, 6, dtype=torch.float64), models.lora(network(), 3, ["*"], alpha=2)
    load_flat(model, torch.randn_like(flatten(model)))
    merged = models.merge(model)
    assert [type(m) for m in merged] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    torch.testing.assert_close(merged(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(merged(x), network()(x))
    expected = model[2].base.weight + 2 / 3 * model[2].lora_up.weight @ model[2].lora_down.weight
    torch.testing.assert_close(merged[2].weight, expected)


def test_the_factored_jacobian_is_that_of_autograd() -> None:
    x, model = torch.randn(5, 6, dtype=torch.float64), models.lora(network(), 2, ["2", "4"])
    load_flat(model, torch.randn_like(flatten(model)))
    factored, dense = (jacobian(model, x, form=form).dense() for form in ("factored", "dense"))
    torch.testing.assert_close(factored, dense, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_adapted() -> None:
    with pytest.raises(ModelError, match=r"no linear layer is called nine: .* 2, 4"):
        models.lora(network(), 2, ["nine"])
    with pytest.raises(ConfigError, match="rank is at least 1"):
        models.lora(network(), 0)
    # Its fused kernel would pass the adapter by.
    with pytest.raises(ModelError, match="end with none"):
        models.lora(nn.TransformerEncoderLayer(8, 2, 8), 2)
