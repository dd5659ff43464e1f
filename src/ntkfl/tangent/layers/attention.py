"""`nn.MultiheadAttention`: linear projections in and out, and between them nothing that trains."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.layers.tape import Slot, Tape


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
    plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn and not module.training
    if not plain or query.ndim != 3 or query.is_nested:
        return NotImplemented
    q, k, v = (_heads(t, module) for t in _project_in(module, tape, query, key, value))  # [N, heads, L, E/heads]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:  # [L, S] or [N·heads, L, S]; `is_causal` only says that it is the causal one
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.view(scores.shape)
        scores = scores + _additive(mask, scores)
    if key_padding_mask is not None:  # [N, S]
        scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
    weights = scores.softmax(dim=-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)  # [N, L, E]
    if not module.batch_first:
        mixed = mixed.transpose(0, 1)
    layer = module.out_proj
    out = F.linear(mixed, tape.value(layer.weight), tape.optional(layer.bias))
    bias = None if layer.bias is None else "out_proj.bias"
    out = tape.tap(LinearBlock, mixed, out, "out_proj.weight", bias)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


def _project_in(module: nn.MultiheadAttention, tape: Tape, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values. Self-attention is one layer of three times the width, its input stored once."""
    E, bias = module.embed_dim, tape.optional(module.in_proj_bias)
    if module.in_proj_weight is not None:
        weight = tape.value(module.in_proj_weight)
        if inputs[0] is inputs[1] is inputs[2]:
            out = F.linear(inputs[0], weight, bias)
            name = None if bias is None else "in_proj_bias"
            return list(tape.tap(LinearBlock, inputs[0], out, "in_proj_weight", name).chunk(3, dim=-1))
        weights = list(torch.split(weight, E))
        slots = [Slot("in_proj_weight", i * E, (i + 1) * E) for i in range(3)]
    else:
        slots = [Slot(f"{letter}_proj_weight") for letter in "qkv"]
        weights = [tape.value(getattr(module, slot.name)) for slot in slots]
    outs = []
    for i, (x, weight, slot) in enumerate(zip(inputs, weights, slots, strict=True)):
        out = F.linear(x, weight, None if bias is None else bias[i * E : (i + 1) * E])
        used = None if bias is None else Slot("in_proj_bias", i * E, (i + 1) * E)
        outs.append(tape.tap(LinearBlock, x, out, slot, used))
    return outs


def _heads(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    x = x if module.batch_first else x.transpose(0, 1)
    return x.reshape(*x.shape[:-1], module.num_heads, -1).transpose(1, 2)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
