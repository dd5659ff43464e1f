"""The spectrum of a run's tangent kernel, and what of it a run made in Python keeps for reports.

A report rebuilds a run from its settings; one made of its user's own data or network cannot be, so its classes and
spectra are computed when it ends, while both are at hand.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntkfl.atomic import write_atomically
from ntkfl.data import Federated
from ntkfl.federation.local import SimulatedClients
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.methods import State
from ntkfl.methods.batchnorm import STATISTICS, load_statistics
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl.tangent.parameters import load_flat
from ntkfl.threads import one_thread

KEPT = "insight.json"
ROWS = 256  # samples of a spectrum: its head is settled by then, and it takes a moment
_NUMBERS = 1 << 27  # of a Jacobian, at most: half a GiB


def keep_insight(
    folder: RunFolder,
    data: Federated,
    clients: SimulatedClients,
    first: Tensor,
    state: State,
    history: Sequence[Record],
    title: str,
) -> None:
    """Write `insight.json`: the classes of each client of `data`, and the spectra at the `first` weights and at the
    `state`'s. Without it a report says what it lacks, so whatever goes wrong with a user's network ends nothing.
    """
    found: dict[str, object] = {"round": len(history)}
    try:
        if data.classes is not None:
            names = {"names": data.client_names, "classes": data.class_names}
            found["clients"] = {"title": title, "counts": data.counts().tolist()} | names
        network = copy.deepcopy(clients.task.model).eval()
        with one_thread():
            found["spectra"] = spectra(network, clients, first, state, history, len(history))
    except Exception as error:  # of a network that is its user's own: out of memory, no derivative of an operation
        found["spectra_missing"] = f"could not be computed ({type(error).__name__})"
    write_atomically(folder.path / KEPT, (json.dumps(found) + "\n").encode())


def spectra(
    network: nn.Module, clients: SimulatedClients, first: Tensor, state: State, history: Sequence[Record], done: int
) -> list[dict[str, object]]:
    """Eigenvalues of the trace kernel H/N at the first weights, and at the state's after `done` rounds, on the clients
    of the first round and of the last one in the history.
    """
    load_flat(network, first)
    begun, last = history[0], history[-1]
    found: list[dict[str, object]] = [{"label": "round 1", "values": spectrum(network, inputs_of(clients, begun))}]
    load_flat(network, state["weights"])
    if STATISTICS in state:
        load_statistics(network, state[STATISTICS])
    values = spectrum(network, inputs_of(clients, last))
    return [*found, {"label": f"after round {done}", "values": values}]


def inputs_of(clients: SimulatedClients, record: Record) -> Tensor:
    """Inputs of a round as its clients gave them to the network: subsampled, projected. At most `ROWS`, evenly."""
    held = {i: clients.fed.client(i)[0] for i in record["clients"]}
    x = torch.cat([held[i][clients[i].drawn(record["round"], len(held[i]))] for i in record["clients"]])
    x = x[:: -(-len(x) // ROWS)]
    return clients.place((x, torch.zeros(len(x))))[0]


def spectrum(model: nn.Module, x: Tensor) -> list[float]:
    """Eigenvalues of H/N, largest first; H_ij = (1/d2)⟨J_i, J_j⟩_F over the rows of x. float [N]"""
    plan = plan_jacobian(model, x[:2])
    x = x[: max(16, _NUMBERS // plan.stored)]
    kernel = jacobian(model, x, plan=plan).kernel().double() / len(x)
    values = torch.linalg.eigvalsh(kernel).flip(0).clamp_min(0)
    return [float(f"{v:.4g}") for v in values.tolist()]
