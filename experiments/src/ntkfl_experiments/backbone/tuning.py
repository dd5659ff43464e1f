"""Fine-tuning the last block with `sum-ntk-fl`: 10 rounds, all of its 1 × 1 convolutions or low-rank adapters.

Everything below the last block is frozen, so that its inputs [192, 4, 4] are computed once and are the clients' data.
Batch normalisation is part of the layers here (its statistics stay), and a 1 × 1 convolution is a linear layer at every
position. The first round solves for the head (`sum-ridge`), the other nine train the block and the head.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.data import Federated
from ntkfl.methods import SumNTKFL, SumRidge
from ntkfl_experiments.backbone.features import BATCH, lite0
from ntkfl_experiments.backbone.trials import CLIENTS, HELD_OUT, PARTITIONS, SEEDS

PARTITION, ROUNDS, PER_ROUND = "α = 0.1", 10, 20
LAYERS = ("expand", "project", "last")
SETTINGS: dict[str, dict[str, Any]] = {
    f"{what} μ {mu:g} δ {delta:g}": {"what": what, "mu": mu, "delta": delta}
    for delta in (1e-2, 1e-3)
    for mu in (4.0,)
    for what in ("block", "LoRA")
}


class LastBlock(nn.Module):
    """[N, 192, 4, 4] → [N, outputs]: the last block, the last convolution, pooling and a head."""

    def __init__(self, net: nn.Module, outputs: int) -> None:
        super().__init__()
        block: Any = net.get_submodule("_blocks.15")
        self.expand = folded(block._expand_conv, block._bn0)
        self.depthwise = nn.Sequential(block._depthwise_conv, block._bn1).eval()
        self.project = folded(block._project_conv, block._bn2)
        self.last = folded(net.get_submodule("_conv_head"), net.get_submodule("_bn1"))
        self.head = nn.Linear(self.last.out_features, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.expand(x.permute(0, 2, 3, 1)))
        x = nn.functional.relu6(self.depthwise(x.permute(0, 3, 1, 2)))
        x = self.project(x.permute(0, 2, 3, 1))
        out: Tensor = self.head(nn.functional.relu6(self.last(x)).mean((1, 2)))
        return out

    def train(self, mode: bool = True) -> LastBlock:
        super().train(mode)
        self.depthwise.eval()
        return self


@torch.no_grad()
def folded(conv: Any, norm: Any) -> nn.Linear:
    """A 1 × 1 convolution and the batch normalisation after it, as a linear layer over channels."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    layer = nn.Linear(conv.in_channels, conv.out_channels)
    layer.weight.copy_(conv.weight[:, :, 0, 0] * scale[:, None])
    layer.bias.copy_(norm.bias - norm.running_mean * scale)
    return layer


class LowRank(nn.Module):
    """base(x) + B A x with A [rank, n_in] and B [n_out, rank], which is zero at first (LoRA, Hu et al. 2021)."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_up(self.lora_down(x))
        return out


def block_inputs(network: nn.Module, images: Tensor, device: str) -> Tensor:
    """What the last block gets: float32 [N, 192, 4, 4], on the CPU."""
    seen: list[Tensor] = []
    block = network.get_submodule("net._blocks.15")
    hook = block.register_forward_pre_hook(lambda _, given: seen.append(given[0].cpu()))
    with torch.inference_mode():
        for at in range(0, len(images), BATCH):
            network(images[at : at + BATCH].to(device).float())
    hook.remove()
    return torch.cat(seen)


def federation(x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], seed: int, held: bool) -> Federated:
    shares = PARTITIONS[PARTITION].assign(y.numpy(), None, np.random.default_rng(seed))
    pairs = [(x[index], y[index]) for index in map(torch.from_numpy, shares)]
    if held:
        out = torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(seed)).tolist()
        others = [pairs[i] for i in out[:HELD_OUT]]
        test = torch.cat([x for x, _ in others]), torch.cat([y for _, y in others])
        pairs = [pairs[i] for i in out[HELD_OUT:]]
    return ntkfl.data.from_clients(pairs, test=test, classes=10)


def play(
    network: nn.Module, fed: Federated, setting: dict[str, Any], seed: int, device: str, rounds: int
) -> dict[str, Any]:
    """Accuracy of every round in percent."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    model: nn.Module = LastBlock(network.get_submodule("net").cpu(), 10)
    cohort = min(PER_ROUND, len(fed))
    common: dict[str, Any] = {"seed": seed, "device": device, "callbacks": [], "clients_per_round": cohort}
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head."))
    run = ntkfl.train(model, fed, SumRidge(), rounds=1, **common)
    accuracies = [record["test_accuracy"] for record in run.history]
    model = run.model.cpu()
    if setting["what"] == "LoRA":
        model.requires_grad_(False)
        for layer in LAYERS:
            model.set_submodule(layer, LowRank(model.get_submodule(layer), 8))
    for name, p in model.named_parameters():
        own = "lora" in name if setting["what"] == "LoRA" else name.split(".")[0] in LAYERS
        p.requires_grad_(own or name.startswith("head."))
    method = SumNTKFL(
        mu=setting["mu"], delta=setting["delta"], time=None, label_smoothing=0.0, average=0.0, largest=1500,
        values="float32",
    )  # fmt: skip
    run = ntkfl.train(model, fed, method, rounds=rounds - 1, **common)
    accuracies += [record["test_accuracy"] for record in run.history]
    return {
        "accuracy": [round(100 * a, 2) for a in accuracies],
        "bytes_up": run.history[0]["uplink_bytes"] // cohort,
        "seconds": round(time.perf_counter() - began),
        "mu": [round(record["mu"], 1) for record in run.history],
    }


def tune(source: Path, out: Path, device: str, limit: float = 80.0) -> None:
    """A search on held-out clients of seed 10 for at most `limit` seconds, then the best settings on three seeds.

    `source` are the features: images are enlarged as they were for them.
    """
    began, data = time.perf_counter(), ntkfl.data.load("cifar10")
    network = lite0(str(np.load(source)["resize"])).eval().to(device)
    y, test_y = data.rows.y.long(), data.test_rows.y.long()
    x, test_x = (block_inputs(network, images, device) for images in (data.rows.x, data.test_rows.x))
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        found[name] = value
        out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"{time.perf_counter() - began:4.0f} s  tune {name}: {value}", flush=True)

    fed = federation(x, y, (test_x, test_y), 10, held=True)
    scores: dict[str, float] = {}
    for name, setting in SETTINGS.items():
        if time.perf_counter() - began > limit:
            break
        try:
            value = play(network, fed, setting, 10, device, ROUNDS)
            scores[name] = value["accuracy"][-1]
        except ntkfl.NTKFLError as error:
            value = {"diverged": str(error)[:100]}
        add(f"held out / {name}", value)
    kinds = [[name for name in SETTINGS if name.startswith(what)] for what in ("block", "LoRA")]
    best = [max(names, key=lambda name: scores.get(name, 0.0)) for names in kinds]  # the first where none was tried
    for seed in SEEDS:
        fed = federation(x, y, (test_x, test_y), seed, held=False)
        for name in best:
            add(f"{name} / seed {seed}", play(network, fed, SETTINGS[name], seed, device, ROUNDS))
