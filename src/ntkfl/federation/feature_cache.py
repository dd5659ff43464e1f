"""Features of a frozen backbone: computed once, kept in memory and on this machine's disk, never sent.

What is cached is found by content: a file's name is a digest of the backbone's weights and of the samples, so that
other weights or other samples never meet it. A row of every file that is read is computed anew: other code is noticed.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ntkfl.atomic import write_atomically
from ntkfl.data.catalog import cache_folder
from ntkfl.models import digest
from ntkfl.models.backbone import Adapted
from ntkfl.privacy.settings import Privacy

_NAME = "features"
_AGREE = 1e-3  # how far the row computed anew may be off, relative: other batch sizes and threads round otherwise


def feature_folder() -> Path | None:
    """Where features are kept: $NTKFL_FEATURES, else the user's cache; None (memory alone) where it is `off`."""
    own = os.environ.get("NTKFL_FEATURES")
    return None if own == "off" else Path(own) if own else cache_folder() / _NAME


class FeatureCache:
    """x [N, …] → backbone(x) [N, …] on x's device. At most `memory` bytes of features are held, and a pass takes
    `batch` rows; with a `folder`, what was computed is found again by the next process.
    """

    def __init__(
        self,
        backbone: nn.Module,
        folder: Path | None,
        *,
        memory: int = 1 << 30,
        batch: int = 64,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.backbone, self.memory, self.batch, self.say = backbone.eval(), memory, batch, say
        # What pools or resizes has no weights: `repr` tells it.
        self.digest = hashlib.sha256(f"{digest(backbone)} {backbone!r} {_settings(backbone)}".encode()).hexdigest()
        self.folder = None if folder is None else folder / self.digest[:32]
        self._held: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, x: Tensor) -> Tensor:
        key = self._key(x)
        found = self._held.get(key)
        if found is None:
            found = self._read(key, x)
        if found is None:
            found = self._compute(x)
            self._write(key, found)
        self._hold(key, found)
        return found

    def _key(self, x: Tensor) -> str:
        content = x.detach().cpu().contiguous()
        key = hashlib.sha256(f"{self.digest} {content.dtype} {list(content.shape)};".encode())
        key.update(content.reshape(-1).view(torch.uint8).numpy().data)
        return key.hexdigest()

    @torch.no_grad()
    def _compute(self, x: Tensor) -> Tensor:
        out: Tensor | None = None
        for at in range(0, len(x), self.batch):
            part = self.backbone(x[at : at + self.batch])
            out = part.new_empty(len(x), *part.shape[1:]) if out is None else out
            out[at : at + len(part)] = part
        assert out is not None
        return out

    def _hold(self, key: str, features: Tensor) -> None:
        self._held[key] = features
        self._held.move_to_end(key)
        while len(self._held) > 1 and sum(f.numel() * f.element_size() for f in self._held.values()) > self.memory:
            self._held.popitem(last=False)

    def _read(self, key: str, x: Tensor) -> Tensor | None:
        """From the disk; None where nothing is there, or it is not what this backbone computes."""
        if self.folder is None:
            return None
        try:
            found = load((self.folder / f"{key}.safetensors").read_bytes())[_NAME].to(x.device)
        except (OSError, KeyError, safetensors.SafetensorError):
            return None
        with torch.no_grad():
            first = self.backbone(x[:1])
        same = found.dtype == first.dtype and found.shape == (len(x), *first.shape[1:])
        return found if same and bool((found[:1] - first).norm() <= _AGREE * first.norm()) else None

    def _write(self, key: str, features: Tensor) -> None:
        """For its owner alone. A disk that is full or read-only costs time, not the run."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            write_atomically(self.folder / f"{key}.safetensors", save({_NAME: features.cpu().contiguous()}))
        except OSError as error:
            self.say(f"features are not kept: cannot write to {self.folder}: {error.strerror}")
            self.folder = None


def split_frozen(
    model: nn.Module,
    privacy: Privacy,
    folder: Path | None,
    device: torch.device | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> tuple[nn.Module, FeatureCache | None]:
    """(what trains, the cache of what it takes): the head behind a frozen backbone; any other model whole, and None.

    The trained weights are the same numbers in the same order either way. Where inputs are projected, what the backbone
    gets changes with the run's secret: nothing is cached.
    """
    if not isinstance(model, Adapted) or not model.frozen or privacy.projected_dim is not None:
        return model, None
    front = model.backbone
    held = (*front.parameters(), *front.buffers())  # some backbones have buffers alone
    if device is not None and any(tensor.device != device for tensor in held):
        front = copy.deepcopy(front).to(device)
    return model.head, FeatureCache(front, folder, say=say)


def _settings(backbone: nn.Module) -> str:
    return str(getattr(backbone, "pool", ""))
