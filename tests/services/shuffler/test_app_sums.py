"""Secure sums at the shuffler's process: over TLS, signed, with receipts; the masks for the aggregator alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.deployment.federation import Client, Deployment, refused

from ntkfl.crypto.hpke import SEAL_BYTES
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.masking import sum_masks, unpack_words
from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, pack_rows, unpack_rows
from ntkfl.errors import MessageError
from ntkfl.federation.secure_sum import mask_reply
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.client import ShufflerClient
from tests.federation.masked import schema_of, words_of

CLIENTS = ("client-0", "client-1", "client-2")
SCHEMA = schema_of(6, len(CLIENTS))


def asked(deployment: Deployment) -> Batch:
    sizes = {"max_rows": 1, "row_bytes": SCHEMA.sealed_bytes, "numbers": SCHEMA.numbers}
    return deployment.batch(*CLIENTS, **sizes)


def masked(deployment: Deployment, said: Announced, values: list[int]) -> bytes:
    return mask_reply(words_of(values), deployment.opener.public, "demo", "run-0", said)


def test_a_secure_sum_from_announcement_to_masks(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.start() as process:
        aggregator, clients = deployment.aggregator(), [deployment.client(name) for name in CLIENTS]
        batch = asked(deployment)
        assert aggregator.publish(batch).status_code == 200
        said = deployment.announced[batch.key]
        bodies = {client: masked(deployment, said, [0, *range(i, i + 6)]) for i, client in enumerate(clients)}
        first = clients[0]
        assert len(bodies[first]) == SEED_BYTES + FRAME_BYTES + 4 * 7 + SEAL_BYTES
        for body in (b"", bytes(20), bytes(100), bodies[first][:-1], bodies[first][:31]):
            assert refused(first.ask("POST", "/sums", body)) == (422, "malformed")
        # Neither kind of submission can take the other's way.
        assert refused(first.ask("POST", "/rows", bodies[first][SEED_BYTES:])) == (409, "other-kind")
        other = Announced(batch.key, bytes(32))
        assert refused(first.ask("POST", "/sums", masked(deployment, other, [0] * 7))) == (409, "other-announcement")
        for client, body in bodies.items():
            assert refused(aggregator.on(batch.key, "GET", "/masks")) == (425, "not-ready")
            receipt = bytes.fromhex(client.ask("POST", "/sums", body).json()["receipt"])
            check_receipt(receipt, bytes.fromhex(deployment.peers.shuffler.signing_key), "demo", "run-0", said)
        assert refused(first.ask("POST", "/sums", bodies[first])) == (409, "replayed")
        for stranger in (first, deployment.client("client-0", "evaluator")):  # the second port alone has them
            assert stranger.ask("GET", f"/batches/{batch.key.round}/0/masks").status_code == 404

        rows = unpack_rows(aggregator.on(batch.key, "POST", "/release").content)[1]
        answer = aggregator.on(batch.key, "GET", "/masks")
        found, (total,) = unpack_rows(answer.content)
        assert found == said
        seeds = [body[:SEED_BYTES] for body in bodies.values()]
        assert np.array_equal(unpack_words(total, 7), sum_masks(seeds, said, 7))
        assert len(rows) == 3
        assert not any(seed.hex() in process.output() for seed in seeds)
        at = deployment.peers.shuffler.model_copy(update={"aggregator_url": deployment.urls["shuffler-aggregator"]})
        peers = deployment.peers.model_copy(update={"shuffler": at})
        reached = ShufflerClient(peers, deployment.folder / "aggregator")
        assert reached.masks(said, 7) == total
        with pytest.raises(MessageError):
            reached.masks(said, 6)
        assert aggregator.on(batch.key, "DELETE").status_code == 200
        assert refused(aggregator.on(batch.key, "GET", "/masks")) == (410, "forgotten")
        rows_wanted(deployment, clients)


def rows_wanted(deployment: Deployment, clients: list[Client]) -> None:
    """A batch of rows takes no seed: it would be released beside them."""
    aggregator = deployment.aggregator()
    batch = deployment.batch(*CLIENTS, max_rows=1, row_bytes=SCHEMA.sealed_bytes)
    assert aggregator.publish(batch).status_code == 200
    body = masked(deployment, deployment.announced[batch.key], [0] * 7)
    assert refused(clients[0].ask("POST", "/sums", body)) == (409, "other-kind")
    assert refused(clients[0].ask("POST", "/rows", body)) == (422, "malformed")
    assert refused(aggregator.on(batch.key, "GET", "/masks")) == (409, "other-kind")
    framed = pack_rows(deployment.announced[batch.key], [bytes(SCHEMA.sealed_bytes)])
    assert clients[0].ask("POST", "/rows", framed).status_code == 200
