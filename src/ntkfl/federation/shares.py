"""What a run of `sum-ridge` that kept its clients' sums can still do: forget a client.

The solution is a function of the sums alone, and the others' are at hand: leaving a client out is solving again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, RunFolderError, unknown
from ntkfl.federation.run_folder import Record, RunFolder, called, names_in
from ntkfl.methods import State, SumRidge
from ntkfl.methods.sums.sum_ridge import COLUMNS, FORGOTTEN, PENALTY, SHARE, shares_of
from ntkfl.tangent.ridge import total

RECORDS = "forgotten.jsonl"
_SCORES = ("test_accuracy", "test_loss", "last_accuracy", "validation_accuracy", "validation_loss", "train_loss")
_NEEDS = f"train with --method {SumRidge.name} --set keep_shares=true"


class SharesOfRun:
    """The folder of a finished run, and the clients' sums in its checkpoint."""

    def __init__(self, path: Path | str) -> None:
        self.folder = RunFolder(path)
        self.config = self.folder.config()
        options = self.config.get("method")
        if not isinstance(options, dict) or options.get("name") != SumRidge.name:
            raise RunFolderError(
                f"{self.folder.path} was not trained by {SumRidge.name}, and only what is linear in its weights can be "
                f"solved again for other clients: {_NEEDS}, or retrain without it"
            )
        self.method = SumRidge(**{name: value for name, value in options.items() if name != "name"})
        if not self.method.keep_shares:
            raise RunFolderError(f"{self.folder.path} kept the total of its clients' sums alone: {_NEEDS}")
        self.names = names_in(self.config, "clients")  # by number, where the data named them
        self.round, self.tensors = self.folder.load_checkpoint()
        self.state: State = {n.removeprefix("state/"): t for n, t in self.tensors.items() if n.startswith("state/")}
        self.shares = shares_of(self.state)
        if not self.shares or any(name not in self.state for name in (COLUMNS, PENALTY, "weights")):
            raise RunFolderError(f"{self.folder.path} holds no client's sums yet: the first round has not ended")

    def find(self, who: int | str) -> int:
        """The number of a client, given it or the client's name. Where a name is a number, numbers are names."""
        if isinstance(who, int):
            return who
        if who in self.names:
            return self.names.index(who)
        if who.isdecimal() and len(who) < 10 and not any(name.isdecimal() for name in self.names):
            return int(who)
        raise unknown("client", who, self.names or map(str, self.shares))

    def flat(self, weights: Tensor) -> Tensor:
        """The run's flat weights with the last layer's (W; bᵀ) [p, d2] in their place."""
        w0, w1, b0, b1 = self.state[COLUMNS].tolist()
        out = self.state["weights"].clone()
        out[w0:w1], out[b0:b1] = weights[:-1].mT.reshape(-1).to(out), weights[-1].to(out)
        return out

    def model(self, weights: Tensor) -> dict[str, Tensor]:
        """The tensors of the run's model with this last layer: the only one of its shape that has a bias."""
        tensors, W = self.folder.load_model(), weights[:-1].mT
        layers = [
            name.removesuffix("weight")
            for name, t in tensors.items()
            if name.endswith("weight") and t.shape == W.shape and name.removesuffix("weight") + "bias" in tensors
        ]
        if len(layers) != 1:
            raise RunFolderError(f"{self.folder.path} has {len(layers)} layers of shape {list(W.shape)}: which is it?")
        weight, bias = f"{layers[0]}weight", f"{layers[0]}bias"
        return {**tensors, weight: W.contiguous().to(tensors[weight]), bias: weights[-1].to(tensors[bias])}


def forget(path: Path | str, who: int | str) -> Record:
    """Take a client, by number or name, out of a finished run, as if it had never taken part. The record of it.

    The last layer, and λ where the run chose it, are solved for again from the others' sums; the client's own are
    deleted, and should it come back in a resumed run, it is not counted. The history's last record loses its scores,
    which were of the old model; the record of forgetting keeps them.
    """
    with SharesOfRun(path).folder.locked():
        run = SharesOfRun(path)
        client = run.find(who)
        name = called(run.config, [client])
        if client not in run.shares:
            raise ConfigError(f"no sums of client {name} are here: it was in no round, or is forgotten")
        others = [share for number, share in sorted(run.shares.items()) if number != client]
        if not others:
            raise ConfigError(f"client {name} is the only one: without it there is no model")
        if run.config.get("standardization"):
            raise ConfigError(
                f"inputs of {run.folder.path} were standardised by all clients' sums, those of client {name} among "
                "them: forgetting would not be exact; train again without it"
            )
        solved, penalty = run.method.solve(others, total(others))
        flat, before = run.flat(solved), run.state["weights"]
        run.folder.save_model(run.model(solved))
        scores = _unscore(run, client, penalty, int(total(others).samples))
        gone = (f"state/{SHARE}{client}/", f"client/{client}/")
        kept = {key: t for key, t in run.tensors.items() if not key.startswith(gone)} | {
            "state/weights": flat,
            "averaged": flat.clone(),
            f"state/{PENALTY}": torch.tensor(penalty, dtype=torch.float64),
            f"state/{FORGOTTEN}": torch.cat([run.state[FORGOTTEN], torch.tensor([client])]),
        }
        run.folder.save_checkpoint(run.round, kept)
        record: Record = {
            "client": client,
            "name": name,
            "round": run.round,
            "samples": int(run.shares[client].samples),
            "clients_left": len(others),
            "penalty": penalty,
            "relative_change": float((flat - before).double().norm() / before.double().norm()),
            **scores,
        }
        run.folder.append(RECORDS, record)
    return record


def _unscore(run: SharesOfRun, client: int, penalty: float, samples: int) -> Record:
    """Write the last record without its scores, which are returned."""
    records = run.folder.records()
    last = records[run.round - 1]
    scores = {f"{name}_before": last[name] for name in _SCORES if last.get(name) is not None}
    last |= {name: None for name in _SCORES if name in last}
    last |= {"samples": samples, "penalty": penalty, "forgotten": [*last.get("forgotten", []), client]}
    run.folder.write_records("history.jsonl", records)
    return scores
