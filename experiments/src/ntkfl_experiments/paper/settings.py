"""The paper's experiments as comparisons: its data, network, methods and grids; what it leaves open is ours, and said.

Three hundred clients, 20 a round, one hidden layer of 100. η is searched over the paper's five values, local steps over
{1, 3, 5, 7, 9, 10, 20, …, 50}, by successive halving on 30 held-out clients up to the round that is reported: at least
three settings of every method go that far. Never on the test set.
"""

from __future__ import annotations

from typing import Any

from ntkfl.compare.spec import Comparison, Entry, Search
from ntkfl.data import load
from ntkfl.errors import DataError
from ntkfl.federation.config import DataConfig
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent import PAPER_STEPS
from ntkfl_experiments.paper.item import Context

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
LOCAL_STEPS = (1, 3, 5, 7, 9, 10, 20, 30, 40, 50)
SEEDS = (20, 21, 22, 23, 24)  # reported; what is chosen, is chosen with SEARCH_SEED
SEARCH_SEED = 10
BATCH = 200  # the paper's client batch; clients with no more samples than that take whole-batch steps

WARM_STEPS = 100  # of DataShare on its shared set: Zhao et al. begin from a model trained on it

PAPER, OURS = "NTK-FL (paper)", "NTK-FL (ours)"
CENTRAL, SHARE, NOVA, FEDAVG = "centralised", "DataShare", "FedNova", "FedAvg"
CHOICES = [
    "NTK-FL (paper): trace kernel, cross-entropy, residuals summed at whole steps, no averaging, t in {100, 200, …, "
    "2000}; its η searched as well",
    "NTK-FL (ours): full kernel, smoothed labels, flow times up to 40, running average of the rounds' weights",
    "every baseline's η and local steps are chosen on 30 held-out clients with a seed that is not reported, from the "
    "paper's grids alone, at the round that is reported",
    f"DataShare begins with {WARM_STEPS} steps on the shared set, as its paper does",
]
QUICK_CHOICE = "quick: one seed, fewer rounds, four settings a baseline; the paper's setting is --scale full"

FEDCOM, QSGD = "ntkfl_experiments.rivals.qsgd:FedCOM", "ntkfl_experiments.rivals.qsgd:QSGD"
LABELLED: dict[str, dict[str, Any]] = {
    PAPER: {
        "name": "ntk-fl",
        "kernel": "trace",
        "scheme": "paper",
        "average": 0,
        "label_smoothing": 0,
        "steps": list(PAPER_STEPS),
    },
    OURS: {"name": "ntk-fl"},
    CENTRAL: {"name": "centralized", "average": 0},
    SHARE: {"name": "data-share", "average": 0, "batch_size": BATCH, "warm_steps": WARM_STEPS},
    NOVA: {"name": "fednova", "average": 0},
    FEDAVG: {"name": "fedavg", "average": 0},
    "FedCOM": {"name": FEDCOM, "average": 0},
    "QSGD, 4 bit": {"name": QSGD, "average": 0},
}


def entry(
    label: str, context: Context, rounds: int | None = None, privacy: dict[str, Any] | None = None, **more: Any
) -> Entry:
    """One curve of the paper, with the grid it searches; `more` are options beside those the label stands for."""
    name, stop_at = more.pop("like", label), more.pop("stop_at", None)
    method = LABELLED[name] | more
    grid = grid_of(method, context.quick)
    privacy_ = Privacy(**privacy or {})
    return Entry(label=label, method=method, privacy=privacy_, grid=grid, rounds=rounds, stop_at=stop_at)


def grid_of(method: dict[str, Any], quick: bool) -> dict[str, tuple[float, ...]]:
    """The values searched for a method's options."""
    kind = method["name"]
    if kind in ("ntk-fl", "cp-ntk-fl"):
        # The flow depends on η·t alone and ours takes times as they come: η means something with the paper's t only.
        return {"lr": (0.01, 0.03) if quick else RATES} if "steps" in method else {}
    rates: tuple[float, ...] = (0.03, 0.1) if quick else RATES
    if kind == QSGD:
        return {"lr": rates}
    return {"lr": rates, "local_steps": (10, 50) if quick else LOCAL_STEPS}


def comparison(
    name: str, context: Context, data: DataConfig, entries: list[Entry], *, rounds: int, seeds: int, **more: Any
) -> Comparison:
    """The entries on these data; comparisons of one `name` share their searches and runs between items."""
    held_out = min(30, data.clients // 4)
    rungs = (5,) if context.quick else (*(r for r in (5, 20) if r < rounds), rounds)
    search = Search(hold_out=held_out, rounds=rungs, keep=0.15, keep_at_least=3, seed=(SEARCH_SEED,))
    return Comparison(
        name=name, data=data, methods=tuple(entries), rounds=rounds, seeds=SEEDS[:seeds], search=search,
        clients_per_round=min(20, data.clients // 3), **more,
    )  # fmt: skip


def fashion(alpha: float) -> tuple[str, DataConfig]:
    """Fashion-MNIST over 300 clients, and the name its comparisons share."""
    return f"fashion-mnist-{alpha:g}", DataConfig(dataset="fashion-mnist", clients=300, alpha=alpha)


def available(context: Context, name: str, data: DataConfig) -> tuple[str, DataConfig, list[str]]:
    """These data, and what is to be said of them: a quick run takes the built-in digits where it cannot download."""
    looked = [QUICK_CHOICE] if context.quick else []
    try:
        load(data.dataset)
    except DataError:
        if not context.quick:
            raise
        context.console.print(f"{data.dataset} could not be downloaded: the built-in digits serve instead")
        said = [f"the built-in digits, 60 clients: {data.dataset} could not be downloaded"]
        return f"digits-{data.alpha:g}", DataConfig(dataset="digits", clients=60, alpha=data.alpha), said + looked
    return name, data, looked
