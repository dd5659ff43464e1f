"""Work done many times over: on a CUDA device recorded once as a graph and replayed, elsewhere called as it is.

A step of a small network is a dozen kernels of microseconds, each of which Python takes longer to launch than the
device to run. A CUDA graph launches them all at once: the same kernels on the same tensors, and so the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORTH = 6  # steps from which recording pays: it costs about as much as two or three

# The graph of a `repeated` step recorded last on each device: its pool of memory stays alive for the next one.
_last: dict[torch.device, torch.cuda.CUDAGraph] = {}


def capture(
    device: torch.device, *work: Callable[[], None], pool: Any = None, called: bool = False
) -> list[torch.cuda.CUDAGraph]:
    """Each of the pieces of work as a graph, which does it again whenever it is replayed. `pool` is memory of a graph
    that they take over; `called`: the work was done before.

    `torch.cuda.graph` would collect garbage and empty caches first: milliseconds, several times an evolution.
    """
    graphs = []
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for piece in work:
            if not called:
                piece()  # libraries make their workspaces at a first call, which a capture forbids
            graphs.append(torch.cuda.CUDAGraph())
            # Only this thread's calls are watched: other threads may use the device meanwhile.
            graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                piece()
            finally:
                graphs[-1].capture_end()
    here.wait_stream(side)
    return graphs


def replayed(function: Callable[..., Tensor], *like: Tensor) -> Callable[..., Tensor]:
    """`function` of tensors such as these: on a GPU as a graph, where one can hold it, for it to be called often."""
    if like[0].device.type != "cuda":
        return function
    rooms, results = [torch.zeros_like(t) for t in like], list[Tensor]()
    try:
        (graph,) = capture(like[0].device, lambda: results.append(function(*rooms)))
    except RuntimeError:
        torch.cuda.synchronize(like[0].device)
        return function

    def replay(*values: Tensor) -> Tensor:
        for room, value in zip(rooms, values, strict=True):
            room.copy_(value)
        graph.replay()
        return results[-1].clone()  # the graph's, which was called once before

    return replay


def recordable(model: nn.Module) -> bool:
    """Whether a step through `model` launches the same kernels each time: known of PyTorch's own layers alone."""
    return all(type(m).__module__.startswith("torch.nn.") for m in model.modules())


def repeated(step: Callable[[], None], times: int, device: torch.device) -> Callable[[], None]:
    """A function whose every call does what step() does: in place, on tensors that are the same at every call.

    What `step` writes must be tensors made outside it; it must not read a number back from the device.
    """
    if device.type != "cuda" or times < WORTH:
        return step
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            step()
            return
        if calls == 2:
            before = _last.get(device)
            (_last[device],) = capture(device, step, pool=None if before is None else before.pool(), called=True)
            graphs.append(_last[device])
        graphs[0].replay()

    graphs: list[torch.cuda.CUDAGraph] = []
    return call
