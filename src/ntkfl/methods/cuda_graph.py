"""One step of a loop, taken many times: on a CUDA device recorded once and replayed, elsewhere called as it is.

A local step of a small network is a dozen kernels of microseconds, each of which Python takes longer to launch than the
device to run. A CUDA graph launches them all at once: the same kernels on the same tensors, and so the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WORTH = 6  # steps from which recording pays: it costs about as much as two or three
_EAGER = 1  # calls before recording: what libraries set up at their first call must not be recorded

# The graph recorded last on each device: its pool of memory stays alive for the next one, which takes it over.
_last: dict[torch.device, torch.cuda.CUDAGraph] = {}


def recordable(model: nn.Module) -> bool:
    """Whether a step through `model` launches the same kernels each time: known of PyTorch's own layers alone."""
    return all(type(m).__module__.startswith("torch.nn.") for m in model.modules())


def repeated(step: Callable[[], None], times: int, device: torch.device) -> Callable[[], None]:
    """A function whose every call does what step() does: in place, on tensors that are the same at every call.

    What `step` writes must be tensors made outside it; it must not read a number back from the device.
    """
    if device.type != "cuda" or times < WORTH:
        return step
    graph: torch.cuda.CUDAGraph | None = None
    calls = 0

    def call() -> None:
        nonlocal graph, calls
        calls += 1
        if calls <= _EAGER:
            step()
            return
        if graph is None:
            graph = _recorded(step, device)
        graph.replay()

    return call


def _recorded(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph, before = torch.cuda.CUDAGraph(), _last.get(device)
    here, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    apart.wait_stream(here)
    with torch.cuda.stream(apart):
        # Only this thread's calls are watched: other threads of a server may use the device meanwhile.
        graph.capture_begin(pool=None if before is None else before.pool(), capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    here.wait_stream(apart)
    _last[device] = graph
    return graph
