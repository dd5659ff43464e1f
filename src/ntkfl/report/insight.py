"""What a run's folder does not say outright but determines: who had which classes, and the kernel's spectrum.

Both are computed from configuration, data and checkpoint, and kept in `insight.json` beside them, so that the next
report of the same run need not compute them again. Where something is missing, they say what, and stay out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.data import Federated
from ntkfl.data.catalog import locate
from ntkfl.errors import NTKFLError, RunFolderError
from ntkfl.federation.build import build_method, build_model, load_data
from ntkfl.federation.config import RunConfig
from ntkfl.federation.local import SimulatedClients
from ntkfl.federation.run_folder import RunFolder, write_atomically
from ntkfl.methods import Task
from ntkfl.methods.batchnorm import NAME, load_statistics
from ntkfl.report.runs import FoundRun, history
from ntkfl.safe_parse import parse_json
from ntkfl.tangent import jacobian, jacobian_numbers
from ntkfl.tangent.parameters import load_flat
from ntkfl.threads import one_thread

KEPT = "insight.json"
ROWS = 256  # samples of a spectrum: its head is settled by then, and it takes a moment
_NUMBERS = 1 << 27  # of a Jacobian, at most: half a GiB


def insight(run: FoundRun, keep: bool = True) -> dict[str, Any]:
    """`clients` (counts by class) and `spectra`, or under `clients_missing` and `spectra_missing` why not."""
    found: dict[str, Any] = {}
    try:
        found["round"] = len(history(run))
        kept = _read(run.folder)
        if kept is not None and kept.get("round") == found["round"]:
            return kept
        config = _rebuildable(run.folder)
        data = _prepared(config.model_copy(update={"method": _data_options(config)}).model_dump_json())
        found["clients"] = _clients(config, data)
        with one_thread():
            found["spectra"] = _spectra(run, config, data)
    except Exception as error:  # records may name clients or rounds that there are not: the page goes on without these
        reason = str(error) if isinstance(error, NTKFLError) else f"the run's files do not fit together ({error})"
        for name in ("clients", "spectra"):
            if name not in found:
                found[f"{name}_missing"] = reason
    if keep and "spectra" in found:
        with suppress(OSError):  # somebody else's folder: it is computed again next time
            write_atomically(run.folder.path / KEPT, (json.dumps(found) + "\n").encode())
    return found


def _read(folder: RunFolder) -> dict[str, Any] | None:
    try:
        kept = parse_json((folder.path / KEPT).read_text())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def _rebuildable(folder: RunFolder) -> RunConfig:
    """The run's configuration, where names in it are enough to have its data and network again."""
    if not folder.holds_run:
        raise RunFolderError("the run has not begun")
    if not folder.config().get("simulation"):
        raise RunFolderError("a deployment's data are its clients' own")
    config = RunConfig.read(folder.path / "config.toml", allow_code=True)  # read, and refused below
    if config.code:
        raise RunFolderError(f"{' and '.join(config.code)} is code of its user's, which a report does not run")
    if locate(config.data.dataset) is None:
        name = config.data.dataset
        raise RunFolderError(f"{name} is not on this machine; with `ntkfl data fetch {name}` the next report has it")
    return config


def _data_options(config: RunConfig) -> dict[str, object]:
    """Of the method only what changes the data, so that equal data are prepared once."""
    shares = getattr(build_method(config.method), "shared_fraction", 0.0)
    return {"name": "data-share", "shared_fraction": shares} if shares else {"name": "fedavg"}


@lru_cache(maxsize=2)
def _prepared(config: str) -> Federated:
    return load_data(RunConfig.model_validate_json(config))


def _clients(config: RunConfig, data: Federated) -> dict[str, Any]:
    about = config.data
    split = f"Dirichlet α = {about.alpha:g}" if about.partition == "dirichlet" else about.partition
    return {"title": f"{about.dataset}, {split}, seed {config.seed}", "counts": data.counts().tolist()}


def _spectra(run: FoundRun, config: RunConfig, data: Federated) -> list[dict[str, Any]]:
    """Eigenvalues of the trace kernel H/N at the first round's weights and at the last, on those rounds' clients."""
    records = history(run)
    done, state = run.folder.load_checkpoint()
    if not records or not done:
        raise RunFolderError("no round is finished yet")
    model = build_model(config, data).eval()
    spectra = [{"label": "round 1", "values": _spectrum(model, _rows(config, data, 1, records[0]["clients"]))}]
    load_flat(model, state["state/weights"])
    if f"state/{NAME}" in state:
        load_statistics(model, state[f"state/{NAME}"])
    last = records[-1]
    rows = _rows(config, data, last["round"], last["clients"])
    spectra.append({"label": f"after round {done}", "values": _spectrum(model, rows)})
    return spectra


def _rows(config: RunConfig, data: Federated, round: int, clients: list[int]) -> Tensor:
    """Inputs of a round as its clients gave them to the network: subsampled, projected. At most `ROWS`, evenly."""
    method = build_method(config.method)
    fed = data.hold_out(config.hold_out, seed=config.seed)[0] if config.hold_out else data
    task = Task(build_model(config, data), fed.output_dim, method.loss)
    people = SimulatedClients(fed, task, method, config.seed)
    held = {i: fed.client(i)[0] for i in clients}
    x = torch.cat([held[i][people[i].drawn(round, len(held[i]))] for i in clients])
    x = x[:: -(-len(x) // ROWS)]
    return people.place((x, torch.zeros(len(x))))[0]


def _spectrum(model: nn.Module, x: Tensor) -> list[float]:
    """Eigenvalues of H/N, largest first; H_ij = (1/d2)⟨J_i, J_j⟩_F over the rows of x. float [N]"""
    fitting = max(16, _NUMBERS // max(1, jacobian_numbers(model, x[:1], "auto")))
    x = x[:fitting]
    kernel = jacobian(model, x).kernel().double() / len(x)
    values = torch.linalg.eigvalsh(kernel).flip(0).clamp_min(0)
    return [float(f"{v:.4g}") for v in values.tolist()]
