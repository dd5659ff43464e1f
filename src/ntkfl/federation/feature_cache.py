"""Features of a frozen backbone: computed once per batch of samples, kept in this process's memory, never sent."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict

import torch
from torch import Tensor, nn

from ntkfl.models.backbone import Adapted
from ntkfl.privacy.settings import Privacy

_MEMORY = 1 << 30  # bytes of features that are held: the batches used last
_BATCH = 64  # rows of one pass through the backbone


class FeatureCache:
    """x [N, …] → backbone(x) [N, …] on x's device, found again by the content of x."""

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone.eval()
        self._held: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        key = hashlib.sha256(f"{x.dtype} {list(x.shape)};".encode())
        key.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if (found := self._held.pop(key.digest(), None)) is None:
            found = torch.cat([self.backbone(part) for part in torch.split(x, _BATCH)])
        self._held[key.digest()] = found
        while len(self._held) > 1 and sum(f.numel() * f.element_size() for f in self._held.values()) > _MEMORY:
            self._held.popitem(last=False)
        return found


def split_frozen(
    model: nn.Module, privacy: Privacy, device: torch.device | None = None
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
    return model.head, FeatureCache(front)
