"""What a run promises, and who sees what of it: the table `privacy` in the settings that its folder keeps."""

from __future__ import annotations

from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.methods import Method
from ntkfl.methods.inspection import Participation

_REPLIES = {
    "rows": "rows of samples (Jacobian, outputs, label)",
    "updates": "a client's update",
    "sums": "sums over a client's samples",
    "samples": "samples themselves",
}


def privacy_statement(
    method: Method, run: Participation, floor: int | None = None, evaluation: str = "", uncovered: str = ""
) -> dict[str, Any]:
    """The method's own guarantees for such a run, each with what it assumes; whether replies are summed under masks;
    the `floor`, fewer clients than which nothing is released of; and a line for each role on what it sees. What the
    aggregator has of an `evaluation`, where others measure, is part of its line. `uncovered` are samples that no
    guarantee is for, such as those the server measures on.
    """
    sees = _sees(method)
    if evaluation:
        sees["aggregator"] += f"; of evaluations {evaluation}"
    said: dict[str, Any] = {"secure_sum": method.secure_sum, "sees": sees}
    if line := sum_promise(method):
        said["sums"] = line
    if floor is not None:
        said["floor"] = floor
    try:
        found = method.guarantees(run)
    except ConfigError as error:  # dp-accounting is an extra
        return said | {"guarantees": [], "note": str(error)} | ({"uncovered": uncovered} if uncovered else {})
    said |= {"uncovered": uncovered} if uncovered and found else {}
    fields = ("epsilon", "delta", "unit", "against", "assumptions", "simulated")
    return said | {"guarantees": [{name: getattr(one, name) for name in fields} for one in found]}


def hides_clients(method: Method) -> bool:
    """Whether the server is not to see what a single client's data are."""
    return method.shuffle or method.secure_sum or getattr(method, "clip", None) is not None


def sum_promise(method: Method) -> str:
    """What masks promise, and that a total without noise has no ε, in a line; empty where replies are not summed."""
    if not method.secure_sum:
        return ""
    noised = getattr(method, "noise", 0) or getattr(method, "epsilon", None) is not None
    return f"secure sums: only totals are seen unless server and shuffler collude{'' if noised else '; no ε'}"


def stated(said: dict[str, Any]) -> list[str]:
    """A statement's promises as lines for a log."""
    lines = [
        f"promised: ε = {one['epsilon']:.3g} at δ = {one['delta']:.0e} for a {one['unit']}, against {one['against']}"
        for one in said["guarantees"]
    ]
    return [*lines, *([said["sums"]] if "sums" in said else [])]


def _sees(method: Method) -> dict[str, str]:
    """By role, in the order of what it sees."""
    reply = _REPLIES[method.shows]
    if not (method.secure_sum or method.shuffle):
        return {"aggregator": f"{reply}, under the client's name", "others": "the model"}
    if method.secure_sum:
        aggregator = "the total over a round's clients and how many they are; of a single client nothing"
        shuffler = "who takes part; sealed vectors and seeds of masks; the model"
    else:
        aggregator = f"{reply}, without senders"
        shuffler = "who takes part; sealed rows, equally many of each client; the model"
    return {"aggregator": aggregator, "shuffler": shuffler, "key server": "who is enrolled", "others": "the model"}
