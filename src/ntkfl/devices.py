"""Where to compute: a device by name, checked before anything is moved there; and what the processor is called."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.errors import ConfigError


def find_device(name: str | torch.device) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1", "mps"); `ConfigError` where it is none of this machine's."""
    try:
        found = torch.device(name)
        torch.ones(1, device=found).exp()
    except (RuntimeError, AssertionError, NotImplementedError):  # torch says each of these where a device is missing
        here = ", ".join(devices_here())
        raise ConfigError(f"no device {str(name)!r} can be used on this machine: there is {here}") from None
    return found


def devices_here() -> list[str]:
    """Names of the devices this machine has."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def joined_on(device: torch.device, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each group, rows of all its parts as one tensor on `device`."""
    return [torch.cat(list(parts)).to(device) for parts in groups]


def processor_name() -> str:
    """As its maker calls it: `platform.processor()` says only the architecture on Linux."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
