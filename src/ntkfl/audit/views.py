"""What each role sees of a round, taken from its messages: kinds, counts and sizes."""

from __future__ import annotations

from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import ROLES
from ntkfl.audit.received import sums_of
from ntkfl.wire import Message


def views(capture: Capture) -> dict[str, str]:
    """One sentence a role."""
    method = capture.method
    clients = len(capture.cohort)
    first = capture.exchanges[0]
    sealed = method.shuffle
    arrays = ", ".join(sorted({_plain(name) for upload in capture.uploads for name in upload.arrays}))
    samples = sum(len(y) for _, y in capture.truth)
    if method.shows in ("rows", "samples"):
        what = f"{samples} {method.shows} ({arrays})"
        what += " in random order" if sealed else f", by name of {clients} clients"
    else:
        what = f"{clients} {method.shows} ({arrays})" + ("" if sealed else ", by name of client")
    counts = f"{min(first.rows)} to {max(first.rows)}" if min(first.rows) < max(first.rows) else str(first.rows[0])
    traffic = f"{_size(capture.bytes_up)} up and {_size(capture.bytes_down)} down"
    projected = capture.projection is not None
    P = f"the matrix P ({method.projected_dim} of {capture.raw[0][0].numel()} features)"
    adds_up = all(sums_of(capture, upload) is not None for upload in capture.uploads)
    nothing = "nothing: what clients send here does not add up."
    weights = "; and, where the model is handed out between rounds, how far its weights moved" if adds_up else ""
    if capture.masked:
        what = f"one sum of {clients} replies ({arrays})"
    seen = {
        "aggregator": f"{what}{_second(capture)}.",
        "shuffler": (
            f"who sent how many sealed rows ({counts} a client of {first.row_bytes} bytes each) and the broadcast "
            "weights; it opens none."
            if sealed
            else "who took part, a sealed vector and the seed of a mask of each, and the broadcast weights."
            if capture.masked
            else "nothing: this configuration has no shuffler."
        ),
        "key-server": f"the names of clients, and {P}; no row."
        if projected
        else "the names of clients; no row, no key.",
        "aggregator+client": f"the rows, {P if projected else 'no secret matrix, as there is none'}, and own data.",
        "aggregator+shuffler": (
            "the rows, and who sent which."
            if sealed
            else "every client's reply, by name."
            if capture.unmasked_by_pair
            else "the total alone: second masks are the key server's."
            if capture.masked
            else "what the aggregator sees."
        ),
        "aggregator+key-server": f"the rows and {P}." if projected else "what the aggregator sees.",
        "secure-sum": f"one sum of {clients} updates, over {samples:,} samples." if adds_up else nothing,
        "secure-sum+clients": (
            f"that sum, and what {(clients - 1) // 2} of the {clients} clients put into it." if adds_up else nothing
        ),
        "outsider": f"connections under TLS: {clients} clients, {traffic} in this round, and when{weights}.",
    }
    return {role: seen[role] for role in ROLES}


def _second(capture: Capture) -> str:
    if not capture.losses:
        return ""
    message: Message = capture.losses[0]
    number = sum(len(m.arrays["losses"]) for m in capture.losses) if "losses" in message.arrays else len(capture.losses)
    return f", then {number} {'rows' if 'losses' in message.arrays else 'sums'} of candidate losses"


def _plain(name: str) -> str:
    """An array's name on the wire as what it is."""
    if "/" in name:
        return "factors of the curvature"
    if name.startswith("topk.") or name == "jacobian" or name[:1].isdigit():
        return "Jacobian"
    return name.split(".")[0]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
