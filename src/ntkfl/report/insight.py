"""What a run's folder does not say outright but determines: who had which classes, and the kernel's spectrum.

Both are computed from configuration, data and checkpoint, and kept in `insight.json` beside them, so that the next
report of the same run need not compute them again; a run made in Python keeps them itself when it ends. Where
something is missing, they say what, and stay out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ntkfl.data import NAMES, Federated
from ntkfl.data.catalog import locate
from ntkfl.errors import NTKFLError, RunFolderError
from ntkfl.federation.build import build_method, build_model, load_data
from ntkfl.federation.config import RunConfig
from ntkfl.federation.insight import KEPT, spectra
from ntkfl.federation.local import SimulatedClients
from ntkfl.federation.run_folder import RunFolder, write_atomically
from ntkfl.methods import Task
from ntkfl.report.runs import FoundRun, history
from ntkfl.safe_parse import parse_json
from ntkfl.tangent.parameters import flatten
from ntkfl.threads import one_thread


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
        raise RunFolderError(f"the run's settings name code ({', '.join(config.code)}), and a report runs none")
    name = config.data.dataset
    if name not in NAMES:
        raise RunFolderError(f"{name} is its user's own data, which a report does not read")
    if locate(name) is None:
        raise RunFolderError(f"{name} is not on this machine; with `ntkfl data fetch {name}` the next report has it")
    return config


def _data_options(config: RunConfig) -> dict[str, object]:
    """Of the method only what changes the data, so that equal data are prepared once."""
    return {"name": "data-share" if hasattr(build_method(config.method), "shared_fraction") else "fedavg"}


@lru_cache(maxsize=2)
def _prepared(config: str) -> Federated:
    return load_data(RunConfig.model_validate_json(config))


def _clients(config: RunConfig, data: Federated) -> dict[str, Any]:
    title = f"{config.data.dataset}, {config.data.how().text}, seed {config.seed}"
    return {"title": title, "counts": data.counts().tolist()}


def _spectra(run: FoundRun, config: RunConfig, data: Federated) -> list[dict[str, Any]]:
    """At the first round's weights and at the last."""
    done, state = run.folder.load_checkpoint()
    records = history(run)
    if not records or not done:
        raise RunFolderError("no round is finished yet")
    method, model = build_method(config.method), build_model(config, data).eval()
    fed = data.hold_out(config.hold_out, seed=config.seed)[0] if config.hold_out else data
    clients = SimulatedClients(fed, Task(model, fed.output_dim, method.loss), method, config.seed)
    own = {name.removeprefix("state/"): value for name, value in state.items() if name.startswith("state/")}
    return spectra(model, clients, flatten(model), own, records, done)
