"""Where to compute: a device by name, checked before anything is moved there."""

from __future__ import annotations

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
