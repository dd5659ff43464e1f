"""One root seed, and a seed of its own for everything drawn from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(root: int, *labels: str | int) -> int:
    """A 63-bit seed bound to `root` and the labels: what one part of a run draws never shifts what another does."""
    text = "/".join(str(part) for part in (root, *labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded_torch(device: torch.device, root: int, *labels: str | int) -> Iterator[None]:
    """Within it torch's global generators, of CPU and device, draw from this seed; after it they are as before.

    For a user's own code in simulations: ours draws from generators of its own.
    """
    seed, cuda = derive(root, "torch", *labels), device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
