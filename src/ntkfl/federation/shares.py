"""What a run of `sum-ridge` that kept its clients' sums can still do: forget a client.

The solution is a function of the sums alone, and the others' are at hand: leaving a client out is solving again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, RunFolderError, unknown
from ntkfl.federation.run_folder import Record, RunFolder, called, names_in
from ntkfl.federation.transport import FORGOTTEN
from ntkfl.methods import SumRidge
from ntkfl.methods.sums.sum_ridge import COLUMNS, PENALTY, SHARE, shares_of
from ntkfl.tangent.ridge import total

RECORDS = "forgotten.jsonl"
_SCORES = ("test_accuracy", "test_loss", "last_accuracy", "validation_accuracy", "validation_loss", "train_loss")
_NEEDS = f"train with --method {SumRidge.name} --set keep_shares=true"


def forget(path: Path | str, who: int | str) -> Record:
    """Take a client, by number or name, out of a finished run, as if it had never taken part. The record of it.

    The last layer, and λ where the run chose it, are solved for again from the others' sums; the client's own are
    deleted, and a resumed run draws its cohorts from the others. The history's last record loses its scores, which were
    of the old model; the record of forgetting keeps them.
    """
    folder = RunFolder(path)
    config = folder.config()
    method = _method_of(config, str(path))
    with folder.locked():
        done, tensors = folder.load_checkpoint()
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        shares = shares_of(state)
        if not shares or any(name not in state for name in (COLUMNS, PENALTY, "weights")):
            raise RunFolderError(f"{path} holds no client's sums yet: the first round has not ended")
        client = find_client(who, names_in(config, "clients"), shares)
        name, left = called(config, [client]), shares.pop(client, None)
        if left is None:
            raise ConfigError(f"no sums of client {name} are here: it was in no round, or is forgotten")
        if not shares:
            raise ConfigError(f"client {name} is the only one: without it there is no model")
        if (told := config.get("standardization")) and not told.get("public"):
            raise ConfigError(
                f"inputs of {path} were standardised by all clients' sums, those of client {name} among them: "
                "forgetting would not be exact; train again without it"
            )
        others = [share for _, share in sorted(shares.items())]
        solved, penalty = method.solve(others, whole := total(others))
        w0, w1, b0, b1 = state[COLUMNS].tolist()
        flat, before = state["weights"].clone(), state["weights"]
        flat[w0:w1], flat[b0:b1] = solved[:-1].mT.reshape(-1).to(flat), solved[-1].to(flat)
        folder.save_model(_with_layer(folder, solved))
        scores = _unscore(folder, done, {"samples": int(whole.samples), "penalty": penalty}, client)
        gone = (f"state/{SHARE}{client}/", f"client/{client}/")
        kept = {key: t for key, t in tensors.items() if not key.startswith(gone)} | {
            "state/weights": flat,
            "averaged": flat.clone(),
            f"state/{PENALTY}": torch.tensor(penalty, dtype=torch.float64),
            FORGOTTEN: torch.tensor([*tensors.get(FORGOTTEN, ()), client]),
        }
        folder.save_checkpoint(done, kept)
        record: Record = {
            "client": client,
            "name": name,
            "round": done,
            "samples": int(left.samples),
            "clients_left": len(others),
            "penalty": penalty,
            "relative_change": float((flat - before).double().norm() / before.double().norm()),
            **scores,
        }
        folder.append(RECORDS, record)
    return record


def find_client(who: int | str, names: Sequence[str], numbers: Iterable[int]) -> int:
    """The number of a client, given it or the client's name. Where a name is a number, numbers are names."""
    if isinstance(who, int):
        return who
    if who in names:
        return names.index(who)
    if who.isdecimal() and len(who) < 10 and not any(name.isdecimal() for name in names):
        return int(who)
    raise unknown("client", who, names or map(str, numbers))


def _method_of(config: Mapping[str, Any], path: str) -> SumRidge:
    """The run's method; `RunFolderError` where it kept no sums of single clients."""
    options = config.get("method")
    if not isinstance(options, dict) or options.get("name") != SumRidge.name:
        raise RunFolderError(
            f"{path} was not trained by {SumRidge.name}, and only what is linear in its weights can be solved again "
            f"for other clients: {_NEEDS}, or retrain without it"
        )
    method = SumRidge(**{name: value for name, value in options.items() if name != "name"})
    if not method.keep_shares:
        raise RunFolderError(f"{path} kept the total of its clients' sums alone: {_NEEDS}")
    return method


def _with_layer(folder: RunFolder, solved: Tensor) -> dict[str, Tensor]:
    """The tensors of the run's model with this last layer (W; bᵀ) [p, d2]: the only one of its shape with a bias."""
    tensors, W, b = folder.load_model(), solved[:-1].mT, solved[-1]
    names = [name.removesuffix("weight") for name, t in tensors.items() if name.endswith("weight")]
    layers = [name for name in names if tensors[f"{name}weight"].shape == W.shape and f"{name}bias" in tensors]
    if len(layers) != 1:
        raise RunFolderError(f"{folder.path} has {len(layers)} layers of shape {list(W.shape)}: which is it?")
    (layer,) = layers
    like = tensors[f"{layer}weight"]
    return {**tensors, f"{layer}weight": W.contiguous().to(like), f"{layer}bias": b.to(like)}


def _unscore(folder: RunFolder, done: int, now: Record, client: int) -> Record:
    """Write the last record without its scores, which are returned, and with what holds `now`."""
    records = folder.records()
    last = records[done - 1]
    scores = {f"{name}_before": last[name] for name in _SCORES if last.get(name) is not None}
    last |= {name: None for name in _SCORES if name in last}
    last |= now | {"forgotten": [*last.get("forgotten", []), client]}
    folder.write_records("history.jsonl", records)
    return scores
