"""What masking costs: bytes and seconds of a client, the shuffler and the aggregator, beside the plain reply."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ntkfl.methods.replies import Addend
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from ntkfl_experiments.bench.race import race
from ntkfl_experiments.bench.rows import BenchRow, Setting


def secure_sum(setting: Setting) -> list[BenchRow]:
    """Masking, summing and unmasking one round of vectors, for 20, 100 and 300 clients."""
    rows: list[BenchRow] = []
    for clients, numbers in ((3, 1_000),) if setting.quick else ((20, 100_000), (100, 100_000), (300, 100_000)):
        rows += _crowd(clients, numbers, setting)
    return rows


def _crowd(clients: int, numbers: int, setting: Setting) -> list[BenchRow]:
    from ntkfl.crypto.hpke import SealingKey  # sealing is an extra
    from ntkfl.crypto.masking import sum_masks
    from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey, unpack_rows
    from ntkfl.federation.secure_sum import SumSchema, mask_reply, open_sum
    from ntkfl.services.announcement import Batch
    from ntkfl.services.store import BatchStore

    announced, opener = Announced.of(key := BatchKey(1, 0), b"bench"), SealingKey.generate()
    vector = torch.randn(numbers, generator=torch.Generator().manual_seed(0))
    summand = {"vector": Addend(vector.double(), 10.0)}
    schema = SumSchema.of("update", summand, clients)
    plain = len(Message("update", 1, {"vector": vector}).encode())
    words = schema.encode(summand, Randomness.simulated(0))
    names = tuple(f"client-{i}" for i in range(clients))
    bodies = [mask_reply(words, opener.public, "bench", "bench", announced) for _ in names]
    asked = Batch(key, len(names), 1, schema.sealed_bytes, clients, schema.numbers)

    with tempfile.TemporaryDirectory() as folder:
        shuffler = BatchStore(Path(folder) / "state.sqlite")

        def take() -> None:
            shuffler.open(asked, announced.digest)
            for name, body in zip(names, bodies, strict=True):
                shuffler.submit(name, announced, unpack_rows(body[SEED_BYTES:])[1], body[:SEED_BYTES])

        once = Setting(quick=True, device=setting.device)  # a batch is taken and released once
        timed = race({"take": take, "release": lambda: shuffler.release(key)}, 1, once)
        _, sealed, masks = timed["release"].result
        shuffler.close()
    timed |= race(
        {
            "encode": lambda: schema.encode(summand, Randomness.simulated(0)),
            "mask and seal": lambda: mask_reply(words, opener.public, "bench", "bench", announced),
            "sum": lambda: sum_masks([body[:SEED_BYTES] for body in bodies], announced, schema.numbers),
            "open": lambda: open_sum(schema, sealed, masks, opener, "bench", "bench", announced),
        },
        3,
        setting,
    )
    size = len(bodies[0])
    labels = {
        "encode": "a client: clip, scale, round",
        "mask and seal": "a client: mask, seal",
        "take": "shuffler: take all",
        "release": "shuffler: release, sum masks",
        "sum": "of which sum masks",
        "open": "aggregator: open, sum, unmask",
    }
    details = {"clients": clients, "numbers": numbers, "plain_bytes": plain, "masked_bytes": size}
    note = f"{numbers:,} numbers, {size:,} bytes per client, {size / plain:.4f} of the plain reply's in float32"
    return [
        BenchRow(f"{clients}, {label}", timed[way].seconds, note=note if way == "encode" else "", details=dict(details))
        for way, label in labels.items()
    ]
