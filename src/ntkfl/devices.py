"""Where to compute: a device by name, checked before anything is moved there, and made ready early; moving much to it
and back in few copies; and what the processor is called.
"""

from __future__ import annotations

import importlib
import platform
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.errors import ConfigError


def find_device(name: str | torch.device) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1", "mps"); `ConfigError` where it is none of this machine's."""
    try:
        found = torch.device(name)
        one = torch.ones(1, device=found, requires_grad=found.type == "cuda")
        if (made := one.exp()).requires_grad:  # on CUDA, unless gradients are off
            # PyTorch's thread for backward passes there warns if a matrix product is the first that it computes.
            made.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError, NotImplementedError):  # torch says each of these where a device is missing
        here = ", ".join(devices_here())
        raise ConfigError(f"no device {str(name)!r} can be used on this machine: there is {here}") from None
    return found


def warm_up(name: str | torch.device | None) -> None:
    """Begin to make a CUDA device ready, beside what follows: its context, its libraries for matrices and Triton take a
    second or two. A device that is not there is for `find_device` to tell.
    """
    if str(name).startswith("cuda"):
        threading.Thread(target=_use, args=(name,), daemon=True).start()


def _use(name: str | torch.device) -> None:
    with suppress(Exception):
        one = torch.ones(16, 16, device=name)
        (one @ one).sum().item()
        importlib.import_module("triton")


def devices_here() -> list[str]:
    """Names of the devices this machine has."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def joined_on(device: torch.device, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each group, rows of all its parts as one tensor on `device`, which is waited for once where parts are of this
    machine's memory. From pinned memory, which a GPU reads six times as fast as any other: each part from where it is
    if that is pinned, as the first is, else a group in one copy.
    """
    if device.type != "cuda" or any(parts[0].is_cuda for parts in groups):
        return [torch.cat(list(parts)).to(device) for parts in groups]
    there = []
    for parts in groups:
        counts = [len(part) for part in parts]
        shape, dtype = (sum(counts), *parts[0].shape[1:]), parts[0].dtype
        whole = torch.empty(shape, dtype=dtype, device=device)
        if parts[0].is_pinned():
            for place, part in zip(torch.split(whole, counts), parts, strict=True):
                place.copy_(part, non_blocking=True)
        else:
            whole.copy_(torch.cat(list(parts), out=torch.empty(shape, dtype=dtype, pin_memory=True)), non_blocking=True)
        there.append(whole)
    torch.cuda.current_stream(device).synchronize()  # from now on the parts may be let go
    return there


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in this machine's memory, the device waited for once; those that are there already as they are."""
    here = []
    for tensor in tensors:
        if tensor.device.type == "cuda":
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.append(room.copy_(tensor, non_blocking=True))
        else:
            here.append(tensor.cpu())
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return here


def processor_name() -> str:
    """As its maker calls it: `platform.processor()` says only the architecture on Linux."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
