"""A guard for ordinary Flower apps: `app = ClientApp(mods=[ntkfl.flower.guard])`.

A reply leaves only as arrays of the names and shapes that were asked about, and single numbers that the site's policy
names; each is entered in the site's ledger first. What an app's errors say stays in the site's log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from flwr.app import Array, Context, Message, RecordDict

from ntkfl.errors import Refused
from ntkfl.federation.policy import Guarded, Site
from ntkfl.privacy.ledger import sha256

log = logging.getLogger("flwr")
_HEADER = 64  # bytes by which numpy's headers of equal arrays may differ


def guard(msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Flower's signature of a mod. A reply that the policy does not allow is an error, and nothing of it is sent."""
    site = Site.of(context.node_config, context.node_id)
    site.check_app()
    asked = dict(_arrays(msg.content))
    rounds = [value for record in msg.content.config_records.values() for value in [record.get("server-round")]]
    round = next((value for value in rounds if isinstance(value, int)), 0)
    try:
        reply = call_next(msg, context)
    except Exception as error:
        log.exception("the app failed")
        raise Refused("app", f"the app failed with {type(error).__name__}: see the log of this site") from None
    if not reply.has_content():
        raise Refused("app", "the app replied with an error: see the log of this site")
    if not site.simulated:
        check(reply.content, asked, site.policy.flower)
    parts = [f"{name}:{array.dtype}:{sha256(array.data)}" for name, array in _arrays(reply.content)]
    size = sum(len(array.data) for _, array in _arrays(reply.content))
    site.record(context.run_id, round, size, sha256("\n".join([*parts, *map(repr, _metrics(reply.content))]).encode()))
    return reply


def check(content: RecordDict, asked: Mapping[str, Array], limits: Guarded) -> None:
    """Refuse all but arrays of the names, shapes and types that were `asked` about, each once, and metrics."""
    seen, size = set[str](), 0
    for name, array in _arrays(content):
        own = asked.get(name)
        if own is None or (tuple(array.shape), array.dtype) != (tuple(own.shape), own.dtype) or name in seen:
            raise Refused(
                "policy", f"array {name!r}, {array.dtype} {list(array.shape)}, is not one that was asked about"
            )
        if len(array.data) > len(own.data) + _HEADER:
            raise Refused("policy", f"array {name!r} has {len(array.data):,} bytes, more than its numbers take")
        seen.add(name)
        size += len(array.data)
    if size > limits.max_mb * 1e6:
        raise Refused("policy", f"arrays of {size / 1e6:.3g} MB, and the policy allows max_mb = {limits.max_mb:g}")
    for name, value in _metrics(content):
        if name not in limits.metrics or not isinstance(value, int | float):
            raise Refused("policy", f"metric {name!r} is no single number that [flower] metrics of the policy names")
    if values := [name for record in content.config_records.values() for name in record]:
        raise Refused("policy", f"{values[0]!r} in a ConfigRecord: only arrays and metrics may leave")


def _arrays(content: RecordDict) -> list[tuple[str, Array]]:
    return [pair for _, record in sorted(content.array_records.items()) for pair in record.items()]


def _metrics(content: RecordDict) -> list[tuple[str, object]]:
    return [pair for _, record in sorted(content.metric_records.items()) for pair in record.items()]
