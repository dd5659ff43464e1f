"""What a run of `sum-ridge` that kept its clients' sums can still do: forget a client.

The solution is a function of the sums alone, and the others' are at hand: leaving a client out is solving again.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from ntkfl.errors import ConfigError, RunFolderError, unknown
from ntkfl.federation.run_folder import Record, RunFolder, names_in
from ntkfl.methods import State, SumRidge
from ntkfl.methods.sums.sum_ridge import COLUMNS, FORGOTTEN, PENALTY, SHARE, shares_of
from ntkfl.privacy.ledger import sha256
from ntkfl.tangent.ridge import total

RECORDS = "forgotten.jsonl"
_SCORES = ("test_accuracy", "test_loss", "last_accuracy", "validation_accuracy", "validation_loss", "train_loss")


class SharesOfRun:
    """The folder of a finished run, and the clients' sums in its checkpoint."""

    def __init__(self, path: Path | str) -> None:
        self.folder = RunFolder(path)
        self.config = self.folder.config()
        options = self.config.get("method")
        needs = f"forgetting a client needs its sums; train with --method {SumRidge.name} --set keep_shares=true"
        if not isinstance(options, dict) or options.get("name") != SumRidge.name:
            raise RunFolderError(
                f"{self.folder.path} was not trained by {SumRidge.name}, and only what is linear in its weights can be "
                f"solved again for other clients: {needs}, or retrain without it"
            )
        method = SumRidge(**{name: value for name, value in options.items() if name != "name"})
        if not method.keep_shares:
            raise RunFolderError(f"{self.folder.path} kept the total of its clients' sums alone: {needs}")
        self.method, self.names = method, names_in(self.config, "clients")  # by number, where the data named them
        self.round, self.tensors = self.folder.load_checkpoint()
        self.state: State = {n.removeprefix("state/"): t for n, t in self.tensors.items() if n.startswith("state/")}
        self.shares = shares_of(self.state)
        if not self.shares or any(name not in self.state for name in (COLUMNS, PENALTY, "weights")):
            raise RunFolderError(f"{self.folder.path} holds no client's sums yet: the first round has not ended")

    def called(self, client: int) -> str:
        """A client's name, or its number."""
        return self.names[client] if 0 <= client < len(self.names) else str(client)

    def find(self, who: int | str) -> int:
        """The number of a client, given it or the client's name. Where a name is a number, numbers are names."""
        if isinstance(who, int):
            return who
        names = self.names
        if who in names:
            return names.index(who)
        if who.isdecimal() and len(who) < 10 and not any(name.isdecimal() for name in names):
            return int(who)
        if not names:
            raise ConfigError(f"clients of {self.folder.path} have no names: give a client's number, not {who!r}")
        raise unknown("client", who, names)

    def flat(self, weights: Tensor) -> Tensor:
        """The run's flat weights with the last layer's (W; bᵀ) [p, d2] in their place."""
        w0, w1, b0, b1 = self.state[COLUMNS].tolist()
        out = self.state["weights"].clone()
        out[w0:w1], out[b0:b1] = weights[:-1].mT.reshape(-1).to(out), weights[-1].to(out)
        return out

    def model(self, weights: Tensor) -> dict[str, Tensor]:
        """The tensors of the run's model with this last layer."""
        path = self.folder.path / "model.safetensors"
        try:
            tensors = load_tensors(path.read_bytes())
        except Exception as error:
            raise RunFolderError(f"{path} cannot be read: the run has not ended, or it is damaged") from error
        W, b = weights[:-1].mT, weights[-1]
        fitting = [
            name.removesuffix("weight")
            for name, t in tensors.items()
            if name.endswith("weight") and t.shape == W.shape and name.removesuffix("weight") + "bias" in tensors
        ]
        if len(fitting) != 1:
            raise RunFolderError(f"{path} has {len(fitting)} layers of shape {list(W.shape)}: which one is the last?")
        weight, bias = f"{fitting[0]}weight", f"{fitting[0]}bias"
        return {**tensors, weight: W.contiguous().to(tensors[weight]), bias: b.to(tensors[bias])}


def forget(path: Path | str, who: int | str) -> Record:
    """Take a client, by number or name, out of a finished run, as if it had never taken part. The record of it.

    The last layer, and λ where the run chose it, are solved for again from the others' sums; the client's own are
    deleted, and should it come back in a resumed run, it is not counted. The history's last record loses its scores,
    which were of the old model; the record of forgetting keeps them.
    """
    with SharesOfRun(path).folder.locked():
        run = SharesOfRun(path)
        client = run.find(who)
        if client not in run.shares:
            raise ConfigError(f"no sums of client {run.called(client)} are here: it was in no round, or is forgotten")
        samples = int(run.shares[client].samples)
        others = [run.shares[c] for c in sorted(run.shares) if c != client]
        if not others:
            raise ConfigError(f"client {run.called(client)} is the only one: without it there is no model")
        if run.config.get("standardization"):
            raise ConfigError(
                f"inputs of {run.folder.path} were standardised by all clients' sums, those of client "
                f"{run.called(client)} among them: forgetting would not be exact; train again without it"
            )
        solved, penalty = run.method.solve(others, total(others))
        flat, model = run.flat(solved), run.model(solved)
        before = run.state["weights"]
        state = {name: t for name, t in run.state.items() if not name.startswith(f"{SHARE}{client}/")}
        state |= {
            "weights": flat,
            PENALTY: torch.tensor(penalty, dtype=torch.float64),
            FORGOTTEN: torch.cat([run.state[FORGOTTEN], torch.tensor([client])]),
        }
        kept = {name: t for name, t in run.tensors.items() if not name.startswith(("state/", f"client/{client}/"))}
        run.folder.save_model(model)
        scores = _unscore(run, client, penalty, int(total(others).samples))
        run.folder.save_checkpoint(
            run.round, kept | {f"state/{n}": t for n, t in state.items()} | {"averaged": flat.clone()}
        )
        record: Record = {
            "client": client,
            "round": run.round,
            "samples": samples,
            "clients_left": len(others),
            "penalty": penalty,
            "weights_before": _digest(before),
            "weights_after": _digest(flat),
            "relative_change": float((flat - before).double().norm() / before.double().norm()),
            **({"name": run.called(client)} if run.names else {}),
            **scores,
        }
        run.folder.append(RECORDS, record)
    return record


def _unscore(run: SharesOfRun, client: int, penalty: float, samples: int) -> Record:
    """Write the last record without its scores, which are returned."""
    records = run.folder.records()
    last = records[run.round - 1]
    gone = [*last.get("forgotten", []), client]
    scores = {name: last[name] for name in _SCORES if last.get(name) is not None}
    records[run.round - 1] = {
        **{name: None if name in _SCORES else value for name, value in last.items()},
        "samples": samples,
        "penalty": penalty,
        "forgotten": gone,
    }
    run.folder.write("history.jsonl", "".join(json.dumps(r, allow_nan=False) + "\n" for r in records).encode())
    return {f"{name}_before": value for name, value in scores.items()}


def _digest(weights: Tensor) -> str:
    return sha256(weights.detach().cpu().contiguous().numpy().tobytes())
