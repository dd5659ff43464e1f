"""What is fuzzed: a decoder, inputs that real encoders made for it, and what must hold of whatever it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Target:
    """`check` decodes one input: it returns where the input was accepted (and asserts what then must hold), and raises
    an `NTKFLError` where it was refused. Anything else that it raises is a defect.
    """

    name: str
    seeds: tuple[bytes, ...]  # valid: every one is accepted
    check: Callable[[bytes], object]
    repair: Callable[[bytes], bytes] | None = None  # makes a checksum or signature fit again, as an attacker would
    twist: Callable[[Random, bytes], bytes] | None = None  # a change that knows the format
    words: tuple[bytes, ...] = ()  # what the format is made of
    share: float = 1.0  # of the cases, relative to other targets: less for what is slow


Targets = Callable[[Path], list[Target]]  # makes targets that may keep files in the folder given


def unforgeable(name: str, seeds: tuple[bytes, ...], decode: Callable[[bytes], object]) -> Target:
    """A target whose input is protected by a checksum, a seal or a signature: nothing but the seeds may be accepted."""

    def check(data: bytes) -> None:
        decode(data)
        assert data in seeds, "accepted, though it is not what was sent"

    return Target(name, seeds, check)
