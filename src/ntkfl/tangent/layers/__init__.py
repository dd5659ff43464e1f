"""The layers whose derivatives have a factored form, one file a family.

A layer is a function `run(module, tape, *inputs)` that computes what the module would, and taps every output that is
linear in its weights; `NotImplemented`, before any tap, where the module is used in a way it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ntkfl.tangent.blocks import FactoredBlock
from ntkfl.tangent.layers.convolution import ConvolutionBlock, run_convolution
from ntkfl.tangent.layers.embedding import EmbeddingBlock, run_embedding
from ntkfl.tangent.layers.linear import LinearBlock, run_attention, run_linear, run_recurrent
from ntkfl.tangent.layers.scale import ScaleBlock, run_norm

# By exact type: a subclass may compute something else.
LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: run_linear,
    nn.Conv1d: run_convolution,
    nn.Conv2d: run_convolution,
    nn.Embedding: run_embedding,
    nn.LayerNorm: run_norm,
    nn.RMSNorm: run_norm,
    nn.GroupNorm: run_norm,
    nn.BatchNorm1d: run_norm,
    nn.BatchNorm2d: run_norm,
    nn.BatchNorm3d: run_norm,
    nn.RNN: run_recurrent,
    nn.GRU: run_recurrent,
    nn.LSTM: run_recurrent,
    nn.MultiheadAttention: run_attention,
}

# Factored blocks by their number on the wire.
BLOCKS: tuple[type[FactoredBlock], ...] = (LinearBlock, ConvolutionBlock, EmbeddingBlock, ScaleBlock)

__all__ = ["BLOCKS", "LAYERS", "ConvolutionBlock", "EmbeddingBlock", "LinearBlock", "ScaleBlock"]
