"""One root seed, and a seed of its own for everything drawn from it."""

from __future__ import annotations

import hashlib


def derive(root: int, *labels: str | int) -> int:
    """A 63-bit seed bound to `root` and the labels: what one part of a run draws never shifts what another does."""
    text = "/".join(str(part) for part in (root, *labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
