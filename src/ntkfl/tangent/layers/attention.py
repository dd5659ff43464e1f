"""`nn.MultiheadAttention` of a sequence to itself: linear projections in and out, and nothing between them trains."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.layers.tape import Tape


def run_attention(
    module: nn.MultiheadAttention,
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Queries, keys and values are one linear layer of three times the width, its input stored once.

    Attention to another sequence uses parts of that layer's weight with other inputs: it goes to `torch.func`.
    """
    alone = query is key is value and query.ndim == 3 and not query.is_nested
    plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn and not module.training
    if not alone or not plain or module.in_proj_weight is None:
        return NotImplemented
    bias = module.in_proj_bias
    out = F.linear(query, tape.value(module.in_proj_weight), tape.optional(bias))
    out = tape.tap(LinearBlock, query, out, "in_proj_weight", None if bias is None else "in_proj_bias")
    q, k, v = (_heads(t, module) for t in out.chunk(3, dim=-1))  # [N, heads, L, E/heads]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:  # [L, S] or [N·heads, L, S]; `is_causal` only says that it is the causal one
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.view(scores.shape)
        scores = scores + _additive(mask, scores)
    if key_padding_mask is not None:  # [N, S]
        scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
    weights = scores.softmax(dim=-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)  # [N, L, E]
    mixed = mixed if module.batch_first else mixed.transpose(0, 1)
    layer = module.out_proj
    out = F.linear(mixed, tape.value(layer.weight), tape.optional(layer.bias))
    out = tape.tap(LinearBlock, mixed, out, "out_proj.weight", None if layer.bias is None else "out_proj.bias")
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


def _heads(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    """[N, L, E] -> [N, heads, L, E/heads]."""
    x = x if module.batch_first else x.transpose(0, 1)
    return x.reshape(*x.shape[:-1], module.num_heads, -1).transpose(1, 2)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as what is added to scores: −∞ where a boolean one is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
