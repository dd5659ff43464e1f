"""`nn.RNN`, `GRU` and `LSTM`, unrolled: at every step two linear layers, from the input and the state.

Unrolled because PyTorch's fused cells neither batch their backward pass nor have forward derivatives; the weights are
shared over time, so a layer's factors are those of a linear layer used once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.layers.tape import Tape

State = tuple[Tensor, ...]  # (h,) or, for an LSTM, (h, c)


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


def _project(module: nn.Module, tape: Tape, source: str, x: Tensor) -> Tensor:
    """W x + b for the weights whose names end in `source` ("ih_l0", "hh_l1_reverse")."""
    weight, bias = getattr(module, f"weight_{source}"), getattr(module, f"bias_{source}", None)
    out = F.linear(x, tape.value(weight), tape.optional(bias))
    return tape.tap(LinearBlock, x, out, f"weight_{source}", None if bias is None else f"bias_{source}")


def run_recurrent(
    module: nn.RNN | nn.GRU | nn.LSTM, tape: Tape, input: Any, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> Any:
    """Layer by layer and step by step: h_t = step(W_ih x_t + b_ih, W_hh h_{t−1} + b_hh); outputs and last states as
    PyTorch's.
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
            from_input = _project(module, tape, f"ih_{name}", x).unbind(time)
            state, states = start[len(last)], []
            for now in reversed(from_input) if suffix else from_input:
                state = _step(module.mode, now, _project(module, tape, f"hh_{name}", state[0]), state)
                states.append(state[0])
            last.append(state)
            directions.append(torch.stack(states[::-1] if suffix else states, dim=time))
        x = torch.cat(directions, dim=-1)
    ends = tuple(torch.stack(part) for part in zip(*last, strict=True))
    return x, ends if module.mode == "LSTM" else ends[0]
