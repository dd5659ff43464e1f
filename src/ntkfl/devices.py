"""Where to compute: a device by name, checked before anything is moved there; and the processor's name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ntkfl.errors import ConfigError


def find_device(name: str | torch.device) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1", "mps"); `ConfigError` where it is none of this machine's."""
    try:
        found = torch.device(name)
        torch.ones(1, device=found).exp()
    except (RuntimeError, AssertionError, NotImplementedError):  # torch says each of these where a device is missing
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        here = ", ".join(["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])])
        raise ConfigError(f"no device {str(name)!r} can be used on this machine: there is {here}") from None
    return found


def processor_name() -> str:
    """As its maker calls it: `platform.processor()` says only the architecture on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
