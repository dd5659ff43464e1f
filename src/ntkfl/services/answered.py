"""What a client has answered in a run, on its disk: whatever kills it in between, it heeds no older question.

    answered-RUN.json   [round, exchange, digest of the announcement, digest of the round's cohort, digest of the terms]

It is written before an answer is computed. The same question may come again; the shuffler takes one answer to it.
"""

from __future__ import annotations

import json
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import ConfigError, TrustError
from ntkfl.services.announcement import Question
from ntkfl.services.key_server.client import locked


def take(folder: Path, question: Question) -> None:
    """`TrustError` where the question is older than another, or goes on with another cohort or under other terms than
    the run had before. On return it is on the disk, also through a loss of power.
    """
    head = question.head
    path, key = folder / f"answered-{head.run}.json", head.batch.key
    cohort, digest = head.batch.cohort_digest().hex(), question.announced.digest.hex()
    with locked(folder):
        known = _read(path)
        if known is not None:
            newest, (said, cohort_then, terms) = known
            if head.terms != terms:
                raise TrustError(f"run {head.run} goes on under other terms than it began with")
            if key < newest or (key == newest and digest != said):
                raise TrustError(f"exchange {tuple(key)} of run {head.run} was asked before, or is past")
            if key.round == newest.round and cohort != cohort_then:
                raise TrustError(f"round {key.round} goes on with another cohort than it began with")
        write_atomically(path, json.dumps([*key, digest, cohort, head.terms]).encode())


def _read(path: Path) -> tuple[BatchKey, list[str]] | None:
    try:
        round, exchange, *digests = json.loads(path.read_text())
        if len(digests) != 3 or type(round) is not int or type(exchange) is not int:
            raise ValueError
        return BatchKey(round, exchange), digests
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{path} cannot be read: what was answered in this run is not known; begin a new run"
        ) from None
