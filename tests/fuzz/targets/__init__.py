"""All targets, by the room of the package they are of."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.target import Target

from . import containers, data, folders, rounds, services, sums, texts, trust

ROOMS = (containers, rounds, sums, trust, services, folders, data, texts)


def make(scratch: Path, only: str = "") -> list[Target]:
    """Every target whose name holds `only`; their files are below `scratch`."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    targets = []
    for room in ROOMS:
        folder = scratch / room.__name__.rpartition(".")[2]
        folder.mkdir()
        targets += room.targets(folder)
    assert len({t.name for t in targets}) == len(targets)
    return [target for target in targets if only in target.name]
