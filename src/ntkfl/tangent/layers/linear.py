"""Layers made of linear maps alone: `nn.Linear`, recurrent layers, and attention of a sequence to itself."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.blocks import FactoredBlock, Factors, Settings, Tape, Tensors, joined, times_transposed

State = tuple[Tensor, ...]  # (h,) or, for an LSTM, (h, c)


class LinearBlock(FactoredBlock):
    """`out = W a + b` used T times a sample: rows Σ_t g_t ⊗ [a_t, 1].

    a: [N, T, n_in]; g: [N, d2, T·n_out]; W: [n_out, n_in].
    """

    kind = "linear"

    @classmethod
    def factors(cls, inputs: Tensors, sensitivities: Tensors, settings: Settings) -> Factors:
        a = joined([x.reshape(len(x), -1, x.shape[-1]) for x in inputs], dim=1)
        return a, joined([g.flatten(2) for g in sensitivities], dim=2), ()

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        if a.ndim != 3 or not a.is_floating_point() or settings or not a.shape[1] or g.shape[2] % a.shape[1]:
            return False
        n_out = g.shape[2] // a.shape[1]
        return weight == n_out * a.shape[2] and bias in (None, n_out)

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """δW a_t + δb at every position: all directions in one product, as so many more outputs."""
        lead, inputs = weight.shape[:-1], self.a.flatten(0, 1)
        moved = times_transposed(inputs, weight.reshape(-1, inputs.shape[1]), None if bias is None else bias.flatten())
        return moved.view(len(inputs), -1, self.n_out).transpose(0, 1).reshape(*lead, len(self.a), -1)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_nt X_nt ⊗ a_nt."""
        lead, inputs = cotangent.shape[:-2], self.a.flatten(0, 1)
        rows = cotangent.reshape(math.prod(lead), len(inputs), self.n_out).mT.flatten(0, 1)
        return times_transposed(rows, inputs.mT).reshape(*lead, -1)

    def seen(self) -> Tensor:
        """a itself, in one group."""
        return self.a.unsqueeze(1)

    def weight_values(self) -> Tensor:
        """Outer products where the layer is used once: they need no sum, and broadcasting no reordering."""
        if self.positions > 1:
            return super().weight_values()
        return (self.g.unsqueeze(3) * self.a.unsqueeze(1)).flatten(2)


def run_linear(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    """out = W x + b, over samples alone or over sequences of them."""
    return _project(tape, input, module.weight, module.bias)


def _project(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b, tapped."""
    return tape.tap(LinearBlock, x, F.linear(x, *tape.values(weight, bias)), weight, bias)


def run_recurrent(
    module: nn.RNN | nn.GRU | nn.LSTM, tape: Tape, input: Any, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> Any:
    """Layer by layer and step by step: h_t = step(W_ih x_t + b_ih, W_hh h_{t−1} + b_hh); outputs and last states as
    PyTorch's.

    Unrolled because PyTorch's fused cells neither batch their backward pass nor have forward derivatives. Weights are
    shared over time, so a layer's factors are those of a linear layer used once a step.
    """
    if not isinstance(input, Tensor) or input.ndim != 3 or module.proj_size:  # packed, unbatched, projected
        return NotImplemented
    time = 1 if module.batch_first else 0
    N, H = input.shape[1 - time], module.hidden_size
    if hx is None:
        zero = getattr(module, "weight_hh_l0").new_zeros(N, H)  # noqa: B009 (its type is not declared)
        start: list[State] = [(zero, zero) if module.mode == "LSTM" else (zero,)] * (2 * module.num_layers)
    else:
        parts = hx if isinstance(hx, tuple) else (hx,)
        start = list(zip(*(part.unbind(0) for part in parts), strict=True))
    x = input
    last: list[State] = []
    for layer in range(module.num_layers):
        directions = []
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            name = f"l{layer}{suffix}"
            of_input, of_state = (
                (getattr(module, f"weight_{kind}_{name}"), getattr(module, f"bias_{kind}_{name}", None))
                for kind in ("ih", "hh")
            )
            from_input = _project(tape, x, *of_input).unbind(time)
            state, states = start[len(last)], []
            for now in reversed(from_input) if suffix else from_input:
                from_state = _project(tape, state[0], *of_state)
                state = _step(module.mode, now, from_state, state)
                states.append(state[0])
            last.append(state)
            directions.append(torch.stack(states[::-1] if suffix else states, dim=time))
        x = torch.cat(directions, dim=-1)
    ends = tuple(torch.stack(part) for part in zip(*last, strict=True))
    return x, ends if module.mode == "LSTM" else ends[0]


def _step(mode: str, from_input: Tensor, from_state: Tensor, state: State) -> State:
    """The next state from the two pre-activations, [N, gates·H] each."""
    if mode == "GRU":
        (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        z, n = torch.sigmoid(z_x + z_h), torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        return (n + z * (state[0] - n),)
    if mode == "LSTM":
        i, f, g, o = (from_input + from_state).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    return (torch.relu(from_input + from_state) if mode == "RNN_RELU" else torch.tanh(from_input + from_state),)


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
    projected = _project(tape, query, module.in_proj_weight, module.in_proj_bias)
    q, k, v = (_heads(t, module) for t in projected.chunk(3, dim=-1))  # [N, heads, L, E/heads]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:  # [L, S] or [N·heads, L, S]; `is_causal` only says that it is the causal one
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.view(scores.shape)
        scores = scores + _additive(mask, scores)
    if key_padding_mask is not None:  # [N, S]
        scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
    weights = scores.softmax(dim=-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)  # [N, L, E]
    mixed = mixed if module.batch_first else mixed.transpose(0, 1)
    out = _project(tape, mixed, module.out_proj.weight, module.out_proj.bias)
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
