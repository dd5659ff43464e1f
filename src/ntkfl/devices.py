"""Where to compute: a device by name, checked before anything is moved there."""

from __future__ import annotations

from collections.abc import Sequence

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
