"""What a run promises, and who sees what of it: the table `promises` in the settings that its folder keeps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ntkfl.methods import Method, Task
from ntkfl.methods.base import kinds_of
from ntkfl.methods.sums.noisy_sums import guarantees
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_accounting import Participation

_REPLIES = {
    "rows": "rows of samples (per-sample Jacobian, outputs, label)",
    "update": "a client's update",
    "sums": "sums over a client's samples",
}


def privacy_statement(
    method: Method, task: Task, run: Participation, floor: int | None = None, uncovered: str = ""
) -> dict[str, Any]:
    """The guarantees for such a run, each with what it assumes; whether replies are summed under masks; the `floor`,
    fewest clients whose replies are released; and a line for each role on what it sees. `uncovered` are samples that no
    guarantee is for, such as those the server measures on.
    """
    found = [asdict(one) for one in guarantees(method, task, run)]
    said: dict[str, Any] = {"secure_sum": task.privacy.secure_sum, "sees": _sees(method, task.privacy)}
    said |= {"sums": sum_promise(task.privacy), "floor": floor}
    said |= {"uncovered": uncovered} if found else {}
    return {name: value for name, value in said.items() if value not in (None, "")} | {"guarantees": found}


def sum_promise(privacy: Privacy) -> str:
    """What masks promise, and that a total without noise has no ε, in a line; empty where replies are not summed."""
    if not privacy.secure_sum:
        return ""
    return f"secure sums: only totals are seen unless server and shuffler collude{'' if privacy.epsilon else '; no ε'}"


def _sees(method: Method, privacy: Privacy) -> dict[str, str]:
    """By role, in the order of what it sees."""
    reply = " and ".join(_REPLIES[kind] for kind in sorted(kinds_of(method)))
    if not (privacy.secure_sum or privacy.shuffle):
        return {"aggregator": f"{reply}, under the client's name", "others": "the model"}
    if privacy.secure_sum:
        aggregator = "the total over a round's clients and how many they are; of a single client nothing"
        shuffler = "who takes part; sealed vectors and seeds of masks; the model"
    else:
        aggregator = f"{reply}, without senders"
        shuffler = "who takes part; sealed rows, equally many of each client; the model"
    return {"aggregator": aggregator, "shuffler": shuffler, "key server": "who is enrolled", "others": "the model"}
