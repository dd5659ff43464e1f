"""What a client keeps between rounds (SCAFFOLD's control variate, a share of common data), in a folder of its own.

Flower would carry it in a `Context`, which ends with the run and with the SuperNode. Here it outlives both, and is kept
as it was after each of the last two rounds, so that a round that is played again begins from what it began from before.

    FOLDER/3.safetensors    after round 3
"""

from __future__ import annotations

from pathlib import Path

import safetensors
from safetensors.torch import load, save

from ntkfl.errors import RunFolderError
from ntkfl.federation.run_folder import write_atomically
from ntkfl.methods import State


class ClientMemory:
    """One client's memory in one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self, round: int) -> State:
        """As it was when this round began."""
        past = [number for number in self._rounds() if number < round]
        if not past:
            return {}
        path = self._path(max(past))
        try:
            return load(path.read_bytes())
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
            raise RunFolderError(f"{path} is damaged: this client's memory of the run is lost; delete it") from None

    def keep(self, round: int, memory: State) -> None:
        """As it is after this round; nothing is written for a client that keeps nothing."""
        if not memory:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in memory.items()}
        write_atomically(self._path(round), save(tensors))
        past = sorted(number for number in self._rounds() if number < round)
        for number in past[:-1]:
            self._path(number).unlink(missing_ok=True)

    def _rounds(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdecimal()]

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"
